"""Builds the response about an episode: its row, task, turns, rewards and outcome."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.workers.page.shown.credit_answers import CreditReader, explain_episode, find_reader, shown_readers
from agentrl.workers.page.shown.shown_texts import (
    MAX_MESSAGES,
    SHOWN_CHARS,
    ShownTexts,
    cut_texts,
    new_messages,
    shown_message,
    shown_task,
)
from agentrl.workers.page.shown.whole_run import typed_run
from agentrl.workflow.analysis.outcome_text import fate_sentence
from agentrl.workflow.analysis.token_strip import place_chains
from agentrl.workflow.store.reads.credit_rows import load_group_members
from agentrl.workflow.store.reads.episode_relations import (
    load_agent,
    load_beside,
    load_fate,
    load_forks,
    load_resources_of,
    load_row,
    load_run_of,
    load_task_of,
    load_whole_rewards,
)
from agentrl.workflow.store.reads.episode_shape import EpisodeShape, load_shape
from agentrl.workflow.store.reads.turn_rows import (
    ANNOTATION_FIELDS,
    CALL_FIELDS,
    find_removed_tokens,
    load_annotations,
    load_calls,
    load_grades,
    load_step_rewards,
    load_steps,
)
from agentrl.workflow.tables.views import EpisodeRow
from agentrl.workflow.token_chains import reasons_not_to_train

Row = Mapping[str, Any]
MAX_CALLS = 200
MAX_ANNOTATIONS = 1000
"""The most annotations in a response. MAX_CALLS is the most calls of a turn."""
_STEP_FIELDS = (
    "step", "policy_version", "finish_reason", "mean_logprob", "generate_seconds", "sampled_at", "observed_at", "request_id",
    "equal",
)  # fmt: skip


def load_episode_answer(tx: Any, episode: int, start: int, size: int) -> dict[str, Any]:
    """Return the page's response about an episode, with at most `size` of its turns, from turn `start` on.

    Raise NotFoundError if there is no such episode.
    """
    shape = load_shape(tx, episode)
    row, run = load_row(tx, episode), load_run_of(tx, shape.run_id)
    texts = ShownTexts()
    reader, readers = find_reader(tx, episode, shape.run_id, run)
    steps = [step.index for step in shape.value.steps if start <= step.index < start + size]
    rewards, rewards_left = load_whole_rewards(tx, episode)
    forks, forks_left = load_forks(tx, episode)
    annotations, annotations_left = load_annotations(tx, episode, shape.attempt, (), MAX_ANNOTATIONS)
    fate = load_fate(tx, row)
    removed = find_removed_tokens(tx, [step["id"] for step in shape.rows])
    end = start + size
    return {
        "episode": _shown_row(row, shape, texts),
        "run_kind": run["kind"],
        "tokens_removed": removed.sentence if removed else None,
        "beside": load_beside(tx, episode, shape.group_id),
        "task": shown_task(load_task_of(tx, shape.task_id), texts),
        "agent": _shown_agent(load_agent(tx, shape), texts),
        "turns": load_turns(tx, shape, steps, texts),
        "next_turn": end if end < len(shape.value.steps) else None,
        "chains": list_chains(shape),
        "rewards": [dict(reward) for reward in rewards],
        "rewards_left_out": rewards_left,
        "grades": [_shown_call(call, texts) for call in load_grades(tx, episode, shape.attempt)[:MAX_CALLS]],
        "fate": {**cut_texts(fate), "sentence": fate_sentence(fate)},
        "read_by": shown_readers(readers),
        "advantage": explain_episode(tx, reader, episode, load_group_members(tx, shape.group_id, reader.run["reward_set"])),
        "parent": None if row.parent_id is None else {"id": row.parent_id, "step": row.fork_step},
        "forks": forks,
        "forks_left_out": forks_left,
        "annotations": [_shown_annotation(annotation, texts) for annotation in annotations],
        "annotations_left_out": annotations_left,
        "resources": load_resources_of(tx, shape.group_id),
        "commands": list_commands(row, run, reader, removed is None),
    }


def _shown_row(row: EpisodeRow, shape: EpisodeShape, texts: ShownTexts) -> dict[str, Any]:
    document = {**cut_texts({**row}, SHOWN_CHARS), "run_id": shape.run_id}
    texts.put(document, "final_answer", row.final_answer, path="episode/final_answer")
    texts.put(document, "error", row.error, path="episode/error")
    texts.put(document, "reference", row.reference, path="task/reference")
    return document


def _shown_agent(agent: Row | None, texts: ShownTexts) -> dict[str, Any] | None:
    if agent is None:
        return None
    document: dict[str, Any] = {name: agent[name] for name in ("status", "exit_code", "error_class")}
    for name in ("error", "output", "answer"):
        texts.put(document, name, agent[name], agent[f"{name}_chars"], f"agent/{name}")
    return document


def load_turns(tx: Any, shape: EpisodeShape, steps: Sequence[int], texts: ShownTexts) -> list[dict[str, Any]]:
    value = shape.value
    before = {step: value.steps[step].parent for step in steps}
    parents = {parent for parent in before.values() if parent is not None and parent >= 0}
    calls = load_calls(tx, shape.step_ids([*{*steps, *parents}]))
    rewards = load_step_rewards(tx, shape.id, steps)
    annotations, left = load_annotations(tx, shape.id, shape.attempt, steps, MAX_ANNOTATIONS) if steps else ([], 0)
    idle = reasons_not_to_train(value)
    turns = []
    for row in load_steps(tx, shape.step_ids(steps)):
        number = row["step"]
        step, parent = value.steps[number], before[number]
        turn: dict[str, Any] = {name: row[name] for name in _STEP_FIELDS}
        turn |= {
            "chain": step.chain,
            "parent_step": None if parent is None or parent < 0 else parent,
            "shared_tokens": step.shared,
            "prompt_tokens": len(step.prompt_ids),
            "sampled_tokens": len(step.sampled_ids),
            "delivered": step.delivered,
            "trains": number not in idle and bool(step.sampled_ids),
            "why_not": idle.get(number),
            "inherited": number < value.inherited,
        }
        for name in ("thought", "content", "text", "new_row"):
            texts.put(turn, name, row[name], row[f"{name}_chars"], f"steps/{number}/{name}")
        turn |= _shown_prompt(row, calls.get(parent, []) if parent is not None else [], texts)
        mine = calls.get(number, [])
        turn["calls"] = [_shown_call(call, texts) for call in mine[:MAX_CALLS]]
        turn["calls_left_out"] = len(mine[MAX_CALLS:])
        turn["rewards"] = rewards.get(number, [])
        turn["annotations"] = [
            _shown_annotation(annotation, texts) for annotation in annotations if annotation["step"] == number
        ]
        turns.append(turn)
    if left and turns:
        turns[-1]["annotations_left_out"] = left
    return turns


def _shown_prompt(row: Row, results: Sequence[Row], texts: ShownTexts) -> dict[str, Any]:
    """Return the new messages of a turn's prompt, and the number of messages that the prompt shares with another chain."""
    shared, messages = new_messages(row["prompt"], results)
    documents = []
    for place, message in messages[:MAX_MESSAGES]:
        one = shown_message(message, f"steps/{row['step']}/messages/{place}", texts)
        documents.append({**one, "edited": True} if one["role"] == "tool" and results else one)
    return {"messages": documents, "messages_left_out": len(messages[MAX_MESSAGES:]), "shared_messages": shared}


def _shown_call(call: Row, texts: ShownTexts) -> dict[str, Any]:
    document: dict[str, Any] = {name: call[name] for name in CALL_FIELDS if name != "step"}
    texts.put_value(document, "arguments", call["arguments"], f"calls/{call['id']}/arguments")
    texts.put(document, "result", call["result"], call["result_chars"], f"calls/{call['id']}/result")
    return document


def _shown_annotation(row: Row, texts: ShownTexts) -> dict[str, Any]:
    document: dict[str, Any] = {name: row[name] for name in ANNOTATION_FIELDS}
    texts.put_value(document, "data", row["data"], f"annotations/{row['id']}/data")
    return document


def list_chains(shape: EpisodeShape) -> list[dict[str, Any]]:
    """Return the chains of the episode. Each has its steps, the step after which it begins, and the range of its tokens."""
    chains = []
    for place in place_chains(shape.value):
        parent = place.steps[0].parent
        after = None if parent is None or parent < 0 else parent
        fields = {"chain": place.chain, "steps": [step.index for step in place.steps], "from_step": after}
        chains.append({**fields, "shared_tokens": place.steps[0].shared, "start": place.start, "end": place.end})
    return chains


def list_commands(row: EpisodeRow, run: Row, reader: CreditReader, has_tokens: bool) -> dict[str, str | None]:
    """Return the commands that a user can run on the episode, by kind. For an impossible command, the value is None.
    `has_tokens` is False if the tokens of the episode were removed.
    """
    name, agent = typed_run(run["id"], row.run), bool(run["config"].get("agent"))
    sampled_here = run["kind"] != "import" and has_tokens
    last = max(row.steps - 1, 0)
    update = reader.update
    whatif = None
    if update is not None and reader.run["kind"] == "train" and has_tokens:
        algorithm = "rloo" if (run["config"].get("algorithm") or {}).get("name") != "rloo" else "grpo"
        of = typed_run(reader.run["id"], reader.run["name"])
        whatif = f"agentrl whatif {of} --iteration {update['iteration']} --algorithm {algorithm}"
    return {
        "replay": f"agentrl replay {row.id}",
        "verify": f"agentrl replay {row.id} --verify all" if sampled_here and row.steps else None,
        "fork": f"agentrl fork {row.id} --step {last}" if sampled_here and not agent and row.steps else None,
        "rescore": f"agentrl rescore {name} --reward NAME" if row.status == "done" and has_tokens else None,
        "whatif": whatif,
        "why": f"agentrl why {row.id}",
        "export": f"agentrl ui --export {name} --episode {row.id} --out {name}.html",
    }
