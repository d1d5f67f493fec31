"""An evaluation run of a policy: its config, its start, and the wait for its end."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import typer

from agentrl.cli.console import say
from agentrl.cli.follow import follow
from agentrl.cli.plan import describe_rewards
from agentrl.cli.resolve_targets import check_model_is_there, existing_database, find_policy, find_trusted_policy
from agentrl.workflow.config import RunConfig
from agentrl.workflow.runtime.shown_text import format_count

if TYPE_CHECKING:
    from agentrl.workers.requests.submit import PreparedRun
    from agentrl.workflow.experiment import Experiment


def run_to_end(prepared: "PreparedRun", group_size: int) -> Any:
    """Start an evaluation, wait for its end and return the run. Exit with 1 if its status is not done."""
    from agentrl.cli.ensure_workers import start_run
    from agentrl.workers.stack.process import database

    run, missing = start_run(prepared, required=True)
    counted = f"{run.name}: {format_count(len(prepared.submission.tasks), 'task')} x {group_size}"
    for line in [counted, f"  {_describe_scoring(prepared.experiment)}", *missing]:
        say(line)
    view = follow(database(), run.name, sys.stderr.isatty(), say)
    if view.run["status"] != "done":
        say(f"{run.name}: {view.run['status']} {view.run['reason']}")
        raise typer.Exit(1)
    return run


def with_policy_name(prepared: "PreparedRun", policy: str) -> "PreparedRun":
    """Add the name of the policy's run to the manifest, because several runs may have the same weights. The name is empty if
    the policy is a model that belongs to no run.
    """
    manifest = {**prepared.submission.manifest, "of": find_policy(policy)[0].name or ""}
    return replace(prepared, submission=replace(prepared.submission, manifest=manifest))


def eval_run_of(
    policy: str,
    dataset: str | None,
    split: str | None,
    n: int | None,
    rollout: Mapping[str, Any],
    env: str | None = None,
    trust: bool = False,
    agent: Mapping[str, Any] = MappingProxyType({}),
    rewards: Mapping[str, float] = MappingProxyType({}),
    rows: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[RunConfig, Any]:
    """Return the config of an evaluation (one iteration with all tasks), and the policy to measure. The policy is None if it is
    a model that belongs to no run.

    If an option is missing or None in `rollout`, `agent` or `rewards`, the option of the policy's run is used. `trust` allows
    code from the model's folder to run.
    """
    from agentrl.workers.requests.eval_config import eval_config, in_one_iteration

    base, ref = find_trusted_policy(policy, trust)
    config = eval_config(base, dataset, split, n, rollout, env, agent, rewards, rows)
    if ref is None:  # before the dataset, which may be far away: an unknown name is the first error to report
        check_model_is_there(policy, config)
    return in_one_iteration(existing_database(), config), ref


def _describe_scoring(measured: "Experiment") -> str:
    """Return the env and the rewards as text: `env math (prompt 3f9a61c2), rewards numeric_answer x 1`. With an agent, the
    prompt is left out, because agents do not use it.
    """
    prompt = measured.env.system_prompt
    prompt_text = f" (prompt {sha256(prompt.encode()).hexdigest()[:8]})" if prompt else " (no prompt)"
    prompt_text = prompt_text if measured.config.agent is None else ""
    return f"env {measured.config.env}{prompt_text}, rewards {', '.join(describe_rewards(measured.weights)) or 'none'}"
