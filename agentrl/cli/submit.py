"""`agentrl submit`: converts flags to a RunConfig, writes the run and sends its first chord. If no stack is running, it starts
one.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Annotated, Any

import typer

from agentrl.cli.config_options import with_config_options
from agentrl.cli.console import Json, say
from agentrl.cli.continued_policy import resolve_start, with_origin
from agentrl.cli.ensure_workers import send_run
from agentrl.cli.options import Assignments, ConfigFile
from agentrl.cli.plan import show_plan
from agentrl.cli.probe_process import check_model, check_update, probe_sampler
from agentrl.cli.resolve_targets import existing_database, find_stored_start
from agentrl.workflow.config import FLAGS, RunConfig
from agentrl.workflow.errors import AgentRLError, ConfigError
from agentrl.workflow.resolve import parse_weights
from agentrl.workflow.runtime.shown_text import format_count

STORED = "Stored episodes"
EXAMPLES = """Pass a dataset, a config file or stored episodes:
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
            help="Train on stored groups: those of a fork run, or group numbers.",
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
        typer.Option(help="Reward set to train on [default].", show_default=False, rich_help_panel=STORED),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="RUN[@V]",
            help="Policy to start from [that of their run].",
            show_default=False,
            rich_help_panel=STORED,
        ),
    ] = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    wait: Annotated[
        bool | None,
        typer.Option("--wait/--detach", help="Follow the run to its end / submit it without workers.", show_default=False),
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
    run_config, origins = resolve(config, flags, tuple(assignments or ()), os.environ)
    if not run_config.source.given and config is None and origins["dataset.name"] == "default":
        raise ConfigError("Nothing to train on: no dataset, config or episodes.", EXAMPLES)
    if probe and not dry_run:
        raise ConfigError("--probe requires --dry-run.", "Add --dry-run.")
    if not run_config.source.given and (policy or run_config.source.reward_set != "default"):
        raise ConfigError("--policy and --reward-set require stored episodes.", "Add --from-episodes RUN.")
    if run_config.source.runs:
        run_config, origins, policy = _with_served_prompts(run_config, origins, policy)
    prepared = (
        _prepare_from_stored(run_config, origins, policy)
        if run_config.source.given
        else _prepare_from_model(run_config, origins, dry_run)
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
            check_update(prepared.config)
        with _timed("workers"):
            check_separate(prepared.config.rollout.max_staleness > 0)
        show_plan(prepared, facts, as_json)
        return
    send_run(prepared, wait, as_json)


def _with_origins(prepared: Any, origins: dict[str, str]) -> Any:
    """Return the prepared run with the source of each value in `manifest["origins"]`. Defaults are left out."""
    chosen = {key: origin for key, origin in origins.items() if origin != "default"}
    submission = replace(prepared.submission, manifest={**prepared.submission.manifest, "origins": chosen})
    return replace(prepared, submission=submission)


@contextmanager
def _timed(name: str) -> Iterator[None]:
    start = perf_counter()
    yield
    say(f"checked {name:18} {perf_counter() - start:5.1f} s")


def _say_sizes(config: RunConfig, base: str) -> None:
    """Print the number of parameters that train, and their memory, computed from the model's files."""
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
        say(str(parameters))
    memory = [estimate_memory(config, files, rank, settings().slots, on_gpu) for on_gpu in (True, False)]
    if config.update.trainer == "agentrl" and None not in memory:
        say(f"memory on a GPU: {memory[0]}; CUDA itself takes 0.5 to 1 GiB more")
        say(f"memory on a CPU: {memory[1]}")


def _source_values(groups: list[str], runs: list[str], reward_set: str | None) -> dict[str, Any]:
    numbers = [word for word in groups if word.isascii() and word.isdigit() and len(word) < 19]  # no database takes more digits
    names = [*(word for word in groups if word not in numbers), *runs]
    return {
        "source.groups": [int(word) for word in numbers] or None,
        "source.runs": names or None,
        "source.reward_set": reward_set,
    }


def _with_served_prompts(
    run_config: RunConfig, origins: dict[str, str], policy: str | None
) -> tuple[RunConfig, dict[str, str], str | None]:
    """If the stored episodes are those of a served run, return the config of a run on their prompts; else the arguments."""
    from agentrl.workers.requests.served_prompts import with_served_prompts

    db = existing_database()
    served = None if db is None else with_served_prompts(db, run_config, origins, policy)
    return (run_config, origins, policy) if served is None else (*served, None)


def _prepare_from_stored(run_config: RunConfig, origins: dict[str, str], policy: str | None) -> Any:
    from agentrl.workers.requests.stored_groups import prepare_stored

    db, start = find_stored_start(policy)
    prepared = prepare_stored(db, run_config, origins, start)
    _say_sizes(prepared.config, prepared.submission.policy.base)
    return with_origin(prepared, policy) if policy else prepared


def _prepare_from_model(run_config: RunConfig, origins: dict[str, str], dry_run: bool) -> Any:
    config, start = resolve_start(run_config, origins)
    base = start.base if start else ""
    if dry_run:  # it prints each check as it passes; a submission prints nothing before all have passed
        _say_sizes(config, base)
    from agentrl.workers.requests import submit  # takes longer than all that is said before

    prepared = submit.prepare(existing_database(), config, policy=start, check=_timed if dry_run else submit.unreported)
    if not dry_run:
        _say_sizes(config, base)
    if start is None:
        return prepared
    return with_origin(prepared, config.model.path, config.model.lora, merges=config.model.lora == "new" and not dry_run)


def _say_skipped(rows: tuple[str, ...]) -> None:
    if rows:
        say(f"Left out {format_count(len(rows), 'malformed row')}:")
        for row in rows[:20]:
            say(f"  {row}")
