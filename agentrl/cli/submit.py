"""`agentrl submit`: turns flags into a RunConfig, writes the run, sends its first chord. Starts a stack if none runs."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Annotated, Any

import typer

from agentrl.cli.console import Json, say, show, show_json, show_lines, show_table
from agentrl.cli.continued_policy import resolve_start, with_origin
from agentrl.cli.options import Assignments, ConfigFile, with_config_options
from agentrl.cli.probe_process import check_model, check_optimizer, probe_sampler
from agentrl.cli.resolve_targets import existing_database, find_stored_start
from agentrl.workflow.config import FLAGS, AgentConfig, ModelConfig, RunConfig
from agentrl.workflow.errors import AgentRLError, ConfigError
from agentrl.workflow.resolve import parse_weights
from agentrl.workflow.runtime.shown_text import cell

STORED = "Stored episodes"
EXAMPLES = """Name a dataset, a file or stored episodes:
    agentrl submit --dataset gsm8k --epochs 3
    agentrl submit --config configs/gsm8k_grpo.yaml
    agentrl submit --from-episodes RUN"""


@with_config_options
def submit(
    ctx: typer.Context,  # the generated options follow it
    *,
    from_groups: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN|GROUP",
            help="Train on stored groups: a fork run's, or by number.",
            show_default=False,
            rich_help_panel=STORED,
        ),
    ] = None,
    from_episodes: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="Train on a run's stored episodes.", show_default=False, rich_help_panel=STORED),
    ] = None,
    reward_set: Annotated[
        str | None,
        typer.Option(help="Reward set that trains [default].", show_default=False, rich_help_panel=STORED),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="RUN[@V]",
            help="Start from this policy [theirs].",
            show_default=False,
            rich_help_panel=STORED,
        ),
    ] = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    wait: Annotated[
        bool | None,
        typer.Option("--wait/--detach", help="Follow the run to its end / submit it even without workers.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan, write nothing.")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="With --dry-run: load the model and sample one token.")] = False,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Start a training run; prints its name."""
    from agentrl.cli.ensure_workers import check_separate
    from agentrl.workflow.resolve import resolve

    flags = {FLAGS[keyword]: None if value == [] else value for keyword, value in options.items()}
    flags["rewards"] = parse_weights(options["reward"] or ()) or None
    flags |= _source_values(from_groups or [], from_episodes or [], reward_set)
    asked, origins = resolve(config, flags, tuple(assignments or ()), os.environ)
    if not asked.source.given and config is None and origins["dataset.name"] == "default":
        raise ConfigError("Nothing to train on was named.", EXAMPLES)
    if probe and not dry_run:
        raise ConfigError("--probe goes with --dry-run.", "Add --dry-run.")
    if not asked.source.given and (policy or asked.source.reward_set != "default"):
        raise ConfigError("--policy and --reward-set go with stored episodes only.", "Add --from-episodes RUN.")
    prepared = (
        _prepare_from_stored(asked, origins, policy) if asked.source.given else _prepare_from_model(asked, origins, dry_run)
    )
    prepared = _with_origins(prepared, origins)
    _say_skipped(prepared.skipped_rows)
    for remark in prepared.remarks:
        say(remark)
    if dry_run:
        with _timed("model files"):
            facts = check_model(prepared.config.model, prepared.submission.policy.base)
        if probe and prepared.experiment.engine.local:
            with _timed("one token"):
                facts |= probe_sampler(prepared.config.model, prepared.submission.policy.base)
        with _timed("optimizer"):
            check_optimizer(prepared.config.update.optimizer)
        with _timed("workers"):
            check_separate(prepared.config.rollout.max_staleness > 0)
        _show_plan(prepared, facts, as_json)
        return
    send_run(prepared, wait, as_json)


def _with_origins(prepared: Any, origins: dict[str, str]) -> Any:
    """The request, with where each value that is no default came from, in the manifest's `origins`."""
    chosen = {key: origin for key, origin in origins.items() if origin != "default"}
    submission = replace(prepared.submission, manifest={**prepared.submission.manifest, "origins": chosen})
    return replace(prepared, submission=submission)


@contextmanager
def _timed(name: str) -> Iterator[None]:
    """Report a check that passed, with its seconds."""
    start = perf_counter()
    yield
    say(f"checked {name:18} {perf_counter() - start:5.1f} s")


def _size_lines(config: RunConfig, base: str) -> Iterator[str]:
    """Lines on what trains and the memory that it takes, from the model's files alone; none where they do not say."""
    from agentrl.workflow.models.lookup import find_model_files, lora_rank_of
    from agentrl.workflow.models.memory_estimate import estimate_memory
    from agentrl.workflow.models.parameters import count_in_headers
    from agentrl.workflow.settings import settings

    try:
        files = find_model_files(base or config.model.path, config.dataset.name)
    except AgentRLError:
        return  # the checks report it
    if files is None:
        return
    rank = lora_rank_of(config.model, files.shapes)
    parameters = count_in_headers(files, rank, config.model.lora_targets)
    if parameters is not None:
        yield str(parameters)
    memory = [estimate_memory(config, files, rank, settings().slots, on_gpu) for on_gpu in (True, False)]
    if config.update.trainer == "agentrl" and None not in memory:
        yield f"memory on a GPU: {memory[0]}; CUDA itself takes about 0.5 GiB more"
        yield f"memory on a CPU: {memory[1]}"


def _source_values(groups: list[str], runs: list[str], reward_set: str | None) -> dict[str, Any]:
    """The flags that name stored episodes, as keys of the config."""
    numbers = [word for word in groups if word.isascii() and word.isdigit() and len(word) < 19]  # no database takes more digits
    named = [*(word for word in groups if word not in numbers), *runs]
    return {
        "source.groups": [int(word) for word in numbers] or None,
        "source.runs": named or None,
        "source.reward_set": reward_set,
    }


def _prepare_from_stored(asked: RunConfig, origins: dict[str, str], policy: str | None) -> Any:
    from agentrl.workers.requests.stored_groups import prepare_stored

    db, start = find_stored_start(policy)
    prepared = prepare_stored(db, asked, origins, start)
    for line in _size_lines(prepared.config, prepared.submission.policy.base):
        say(line)
    return with_origin(prepared, policy) if policy else prepared


def _prepare_from_model(asked: RunConfig, origins: dict[str, str], dry_run: bool) -> Any:
    config, start = resolve_start(asked, origins)
    for line in _size_lines(config, start.base if start else ""):
        say(line)
    from agentrl.workers.requests import submit  # takes longer than all that is said before

    prepared = submit.prepare(existing_database(), config, policy=start, check=_timed if dry_run else submit.unreported)
    if start is None:
        return prepared
    return with_origin(prepared, config.model.path, config.model.lora, merges=config.model.lora == "new" and not dry_run)


def send_run(prepared: Any, wait: bool | None, as_json: bool) -> None:
    """Starts the services, writes the run, and follows it if asked to. Only a detached run may wait for later workers."""
    from agentrl.cli.ensure_workers import start_run
    from agentrl.cli.watch import follow_to_end
    from agentrl.workers.stack.process import database

    made, missing = start_run(prepared, required=wait is not False)
    if as_json:
        show_json({"run": made.name, "id": made.id, "created": made.created, "iterations": made.iterations})
    else:
        show(made.name)
    counted = "1 iteration" if made.iterations == 1 else f"{made.iterations} iterations"
    before = "was submitted before" + ("" if made.status == "running" else f" and is {made.status}")
    say(f"{made.name}: {'submitted' if made.created else before}, {counted}.")
    for line in missing:
        say(line)
    if wait:
        follow_to_end(database(), made.name)
    elif made.status in ("paused", "failed"):
        say(f"Set it going: agentrl resume {made.name}")
    else:
        say(f"Follow it: agentrl watch {made.name}")


def _say_skipped(rows: tuple[str, ...]) -> None:
    if rows:
        say(f"Left out {len(rows)} malformed rows:")
        for row in rows[:20]:
            say(f"  {row}")


def _describe_origin(origin: dict[str, Any]) -> str:
    return f"{origin['run']}@{origin['version']}{', merged' if origin['lora'] == 'new' else ''}"


def _describe_evaluations(submission: Any, every: int | None) -> dict[str, str]:
    """The held-out tasks, and what measuring the first, every Nth and the last version costs; empty if nothing is measured."""
    evaluation = submission.evaluation
    if evaluation is None or every is None:
        return {}
    times, each = 1 + math.ceil(submission.iterations / every), len(evaluation.tasks) * evaluation.group_size
    tasks = f"{len(evaluation.tasks)} tasks of {evaluation.dataset} ({evaluation.config['dataset']['split']})"
    return {
        "held_out": f"every {every} versions: {tasks} x {evaluation.group_size}; {times} x {each} = {times * each} episodes"
    }


def _describe_roles(submission: Any) -> dict[str, str]:
    """Of a search, what its tasks are for."""
    roles = list(submission.roles.values())
    if not roles:
        return {}
    choose, held_out = roles.count("choose"), roles.count("held_out")
    return {"of these": f"{len(submission.tasks) - len(roles)} teach, {choose} choose, {held_out} are held out"}


def describe_agent(agent: AgentConfig) -> str:
    """The agent, and where it runs."""
    if not agent.sandboxed:
        return f"{agent.name} (no sandbox)"
    return f"{agent.name} (in the sandbox, reaches {'all' if agent.network == 'all' else 'the endpoint only'})"


def describe_rewards(weights: Mapping[str, float], agent: AgentConfig | None = None) -> list[str]:
    """The rewards with their weights; those that an agent gives itself too."""
    named = [f"{name} x {cell(weight)}" for name, weight in weights.items()]
    own = [f"the agent's own x {cell(float(agent.own_rewards))}"] if agent is not None else []
    return [*named, *own]


def _describe_update(made: Any) -> dict[str, Any]:
    """The parts of an update that differ from the ordinary; of a search what it works on."""
    from agentrl.workflow.algorithms import searches
    from agentrl.workflow.plugins import find

    config = made.config
    if searches(find("algorithms", config.algorithm.name)):
        return {"texts": ", ".join(config.resources), "critic": config.search.critic or "none"}
    warmup = f", alone in the first {config.critic.warmup} iterations" if config.critic.warmup else ""
    found: dict[str, Any] = {"convention": config.algorithm.convention}
    found |= {"trainer": config.update.trainer} if config.update.trainer != "agentrl" else {}
    found |= {"critic": f"learning rate {cell(config.critic.learning_rate)}{warmup}"} if made.algorithm.critic else {}
    return found | ({"passes": config.update.epochs} if config.update.epochs > 1 else {})


def _describe_calls(model: Any) -> str:
    """Name the format of calls, and say if bare JSON does not count as one."""
    named = "the template's own" if model.tool_format == "auto" else model.tool_format or "auto"
    return f"{named}, strict" if model.strict_calls else named


def _describe_time(submission: Any) -> dict[str, str]:
    """The time to expect, if a stored run's iterations did the same work; a search and stored groups have none."""
    from statistics import median

    from agentrl.workflow.store.reads.run_rows import find_similar_iterations

    db = existing_database()
    if db is None or submission.kind != "train" or not submission.episodes:
        return {}
    found = find_similar_iterations(db, submission.policy.base, submission.config)
    if found is None:
        return {}
    run, each = found[0], median(found[1])
    return {"time": f"about {_hours(each * submission.iterations)}: {each:.1f} s an iteration, as in {run}, and evaluations"}


def _hours(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _describe_model(facts: dict[str, Any], sampled_here: bool, model: ModelConfig) -> dict[str, str]:
    """How the built-in sampler runs the model, the layers that LoRA trains, else the precision, and remarks."""
    plan = {"sampler": facts["sampler"]} if sampled_here and "sampler" in facts else {}
    if layers := facts.get("lora_layers"):
        trained = facts["trained"]
        plan["lora_layers"] = ", ".join(f"{name} x {count}" for name, count in layers.items())
        plan["lora_trains"] = f"{trained['trainable']:,} of {trained['all']:,} parameters"
    elif "trained" in facts and model.dtype == "auto" and model.numerics != "exact":
        plan["precision"] = "float32; on a GPU bfloat16 with float32 weights (model.dtype=float32: float32 there too)"
    return plan | ({"remarks": " ".join(facts["remarks"])} if facts.get("remarks") else {})


def _show_plan(prepared: Any, facts: dict[str, Any], as_json: bool) -> None:
    submission, config = prepared.submission, prepared.config
    tasks, more = len(submission.tasks), config.rollout.dynamic_sampling
    planned = submission.episodes
    rewards = describe_rewards(submission.weights, config.agent)
    plan = {
        "name": submission.name,
        "dataset": f"{config.dataset.name} ({config.dataset.split})",
        "model": submission.policy.base,
        **({"from": _describe_origin(submission.manifest["from"])} if "from" in submission.manifest else {}),
        **_describe_model(facts, prepared.experiment.engine.local, config.model),
        "env": config.env,
        **({"agent": describe_agent(config.agent)} if config.agent is not None else {}),
        "tool_format": _describe_calls(config.model),
        "rewards": ", ".join(rewards),
        "algorithm": config.algorithm.name,
        **_describe_update(prepared.experiment),
        **({"hooks": ", ".join(config.hooks)} if config.hooks else {}),
        **({"report_to": ", ".join(config.report.to)} if config.report.to else {}),
        "tasks": tasks or f"{len(submission.groups)} stored groups",
        **({} if submission.kind == "search" else {"epochs": submission.passes, "iterations": submission.iterations}),
        "group_size": submission.group_size,
        **_describe_evaluations(submission, config.eval.every),
        **_describe_roles(submission),
        "episodes": planned or ("as many as the search takes" if submission.kind == "search" else "stored"),
        **({"dynamic_sampling": f"up to {planned * more} episodes ({more} x)"} if planned and more > 1 else {}),
        "output_dir": submission.output_dir,
        **_describe_time(submission),
    }
    if as_json:
        show_json(plan | {"config": submission.config})
    else:
        show_table(("plan", ""), [(key, value) for key, value in plan.items() if key != "rewards"])
        show_lines([("rewards", "bold"), *((f"  {line}", "") for line in rewards)])  # a table would cut long names
