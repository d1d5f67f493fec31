"""Our modules as they were spelled before they moved into folders: stored hashes of reward code are taken from that source."""

import re
from functools import lru_cache

PACKAGE = "workflow"
_ROOMS = {
    "chat": "chat=rendering probing=template_probe stops=stop_strings templates turns=parsing",
    "": "calls=call_json engine=engines",
    "models": (
        "base=loading critic forward=fast_forward lm_head memory models=lookup packed=packed_weights parameters "
        "plain=exported_files policy scoring=logprobs tiny"
    ),
    "runtime": "faults garbage=gc_pause hub once=lazy patience warm=warm_processes webpage=html_text within=time_limit",
    "training": (
        "advantages batch conversations=demonstrations crediting=token_layout dpo=preference "
        "interrupted=offline_checkpoint lines=packing losses merging moments=optimizer offline=offline_training "
        "pieces=oom_backoff reading=row_scorer schedules sft=supervised trainer trl_options trl_trainer "
        "updates=reports"
    ),
    "checkpoints": (
        "checkpoint=sealed_folder collect=checkpoint_gc epochs=epoch_links mirror=checkpoint_cache remote=object_store"
    ),
    "inference": (
        "adapters=exported_adapters answers=responses connection=http "
        "decoding=rolling_batch drafts=turns llamacpp=llamacpp_engine openai=openai_engine opened=open_policy "
        "rolling=rolling_engine sampling served=remote_engine slots=kv_cache streaming"
    ),
    "stats": "dynamic=group_variance evaluate=evaluation harvest=selection paired=paired_test",
    "analysis": "compare=episode_diff replay=verify_episode rescoring=verify_tokens whatif=counterfactual",
    "tables": "columns db=schema meanings=descriptions views",
    "control": "scheduler snapshot",
    "mcp": "mcp=mcp_tool mcp_process=mcp_servers",
    "judging": "asserts=assertions constants judging=code_judge",
    "sql": "databases querying=query_process readonly readonly_postgres",
    "store": (
        "calls=tool_calls claims=train_claims compact=vacuum epochs=epoch_ends family=reads.lineage keeping=retention "
        "ledger=reads.ledger lost=lost_workers mending=repair named=run_names offline=offline_data "
        "origin=reads.provenance past=reads.update_inputs prepared=prepared_statements query=reads.user_sql "
        "reader=driver_reader results=reads.eval_results rollout=rollout_claims scoring=reward_sets "
        "serving=control_reads sessions=tool_sessions training=train_commits values=row_values waiting=waiting_runs"
    ),
    "sandbox": "plain=exact_json seats=uid_pool turns=fair_semaphore watch=limits_watch",
}
"""Room -> its modules, `old=new` where the name changed too. Those of `store` and `sandbox` were there before."""

_MATH = "pip install 'agent" + "rl[math]'"
_RESPELLED = {
    # for Pythons before 3.11.5, whose `re` is wrong about the first spelling
    r"""|\)(?=[-+*/^]))+"  # sqrt(2), (1)-2""": r"""|\)(?=[-+*/^]))++"  # sqrt(2), (1)-2""",
    # `math_answer`, whose hint is made by `install_command` now
    "(the extra `math`)": f"(`{_MATH}`)",
    "from agentrl.workflow.installation import install_command\n": "",
    'install_command("math")': f'"{_MATH}"',
}
"""What is written in another way now -> as it was."""
_KEPT = ("store", "sandbox")
_OLD = {
    (f"{room}.{old}" if room in _KEPT else old): ".".join(filter(None, (room, new or old)))
    for room, modules in _ROOMS.items()
    for old, _, new in (module.partition("=") for module in modules.split())
}
_NEW = {new: old for old, new in _OLD.items()}


@lru_cache(maxsize=128)
def spelled_before(source: str) -> str:
    """The source of a module of ours with its imports, and what it calls their modules, as before the rooms.

    A line of `_RESPELLED`, too, is as it was: it means what it meant.
    """
    for now_spelled, before in _RESPELLED.items():
        source = source.replace(now_spelled, before)
    renamed: dict[str, str] = {}

    def imported(line: re.Match[str]) -> str:
        indent, room, names, lines = line[1], line[2], [], []
        for name in line[3].split(", "):
            module = _NEW.get(f"{room}.{name}".lstrip("."))
            if module is None:
                names.append(name)
                continue
            folder, _, old = module.rpartition(".")
            renamed[name] = old
            if folder == room:
                names.append(old)
            else:
                lines.append(f"from {'.'.join(filter(None, (PACKAGE, folder)))} import {old}")
        if names:
            lines.append(f"from {'.'.join(filter(None, (PACKAGE, _NEW.get(room, room))))} import {', '.join(names)}")
        return "\n".join(indent + each for each in lines)

    source = re.sub(rf"^( *)from agentrl\.{PACKAGE}\.?([\w.]*) import (.+)$", imported, source, flags=re.MULTILINE)
    for new, old in renamed.items():
        source = re.sub(rf"(?<![\w.]){new}\.(?=\w)", f"{old}.", source)
    return re.sub(rf"(?:^from {PACKAGE}\S* import .+\n)+", _in_order, _named(source), flags=re.MULTILINE)


def _in_order(lines: re.Match[str]) -> str:
    return "".join(sorted(lines[0].splitlines(keepends=True), key=lambda line: line.split()[1]))


def _named(source: str) -> str:
    """With the modules that comments name."""
    return re.sub(r"`(\w+(?:\.\w+)+)`", lambda name: f"`{PACKAGE}.{_NEW[name[1]]}`" if name[1] in _NEW else name[0], source)
