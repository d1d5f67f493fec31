"""Training on stored groups: a run that samples no episodes and uses the config of the runs that sampled the groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from agentrl.workers.requests.eval_config import SINGLE_PASS, TRAINING_KEYS, sampling_values
from agentrl.workers.requests.submit import (
    PreparedRun,
    list_remarks,
    manifest,
    plan_evaluation,
    remark_on_rewards,
    submission_of,
)
from agentrl.workflow import trainers
from agentrl.workflow.algorithms import resolve_run
from agentrl.workflow.config import RunConfig, SourceConfig, build
from agentrl.workflow.errors import ConfigError, StateError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import load_hooks
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.forks import StoredRun, find_episode_counted_twice, find_run_of_group, load_stored_run
from agentrl.workflow.store.imported_runs import EXACT
from agentrl.workflow.store.run_names import find_run, find_stored_policy
from agentrl.workflow.store.stored_tokens import check_run_tokens
from agentrl.workflow.trajectory import PolicyRef

ALLOWED_KEYS = ("name", "seed", "epochs", "output_dir", "hooks", "rollout.tasks_per_iteration")
"""Config keys that a user may set, in addition to the keys of the sections in TRAINING_KEYS."""


def prepare_stored(
    db: Database, request: RunConfig, origins: Mapping[str, str], policy: PolicyRef | None = None
) -> PreparedRun:
    """Check the request and build the submission. Nothing is written. `origins` has the origin of each value; the user has set
    those whose origin is not "default". Raise AgentRLError if the request is invalid; the class and the message say why.
    """
    chosen = {key: value for key, value in request.flat().items() if origins.get(key, "default") != "default"}
    _refuse_ignored(chosen)
    stored = load_stored_groups(db, request.source, 2 if Experiment(request).algorithm.needs_group else 1, policy)
    for source in stored.sources:
        if not source.row["manifest"].get(EXACT, True):
            raise StateError(
                f"{source.row['name']} was recorded without all tokens and logprobs, which reinforcement learning needs.",
                f"Imitate it: agentrl sft --from-episodes {source.row['name']}",
            )
    first = stored.sources[0]
    defaults = {key: value for key, value in RunConfig().flat().items() if key in ALLOWED_KEYS}
    config = resolve_run(build(sampling_values(stored.config) | defaults | chosen | SINGLE_PASS))
    trainers.check(config)
    load_hooks(config.hooks)
    experiment, start = Experiment(config, first.weights), replace(stored.start, version=0)
    submission = submission_of(
        db,
        experiment,
        "train",
        start,
        f"{first.row['name'][:50]}-stored",
        manifest=manifest(config),
        tasks=(),
        code_hash=first.code_hash,
        groups=[group for source in stored.sources for group in source.groups],
        reward_set=config.source.reward_set,
    )
    submission = replace(submission, evaluation=plan_evaluation(db, config, start))
    remarks = (*stored.remarks, *remark_on_rewards(*stored.experiments), *list_remarks(submission))
    return PreparedRun(submission, experiment, remarks=remarks)


@dataclass(frozen=True)
class StoredGroups:
    """Stored groups of one or more runs, and the weights that are trained on them.

    Args:
        sources: the groups of each run. The config and the model are those of the first run.
        start: the policy from which training starts.
        remarks: remarks about groups that are left out.
    """

    sources: Sequence[StoredRun]
    start: PolicyRef
    remarks: tuple[str, ...]

    @cached_property
    def experiments(self) -> Sequence[Experiment]:
        return [Experiment.load(source.row["config"], source.weights) for source in self.sources]

    @property
    def config(self) -> RunConfig:
        """The config of the first run."""
        return self.experiments[0].config


def load_stored_groups(db: Database, source: SourceConfig, least: int, policy: PolicyRef | None = None) -> StoredGroups:
    """Load the finished groups of the source. Raise NotFoundError if a run,
    group or reward set does not exist. Raise StateError if no group has enough done episodes. Raise ConfigError if an episode
    would be used twice, or the groups differ in base model or temperature.

    Args:
        source: the names of runs and the numbers of groups.
        least: a group with fewer done episodes than this is left out.
        policy: the initial weights; None for the weights from which the first source run started.
    """
    sources = _load_sources(db, source, least)
    start = policy or find_stored_policy(db, sources[0].row["name"], sources[0].version)
    _check_alike(sources, start)
    remarks = tuple(_left_out_remark(run, source.reward_set) for run in sources if len(run.groups) < run.planned)
    return StoredGroups(sources, start, remarks)


def _left_out_remark(source: StoredRun, reward_set: str) -> str:
    row = source.row
    scored = (
        "" if reward_set == "default" else f", scored in {reward_set!r} (run `agentrl rescore` again to add newer episodes)"
    )
    some = f"{len(source.groups)} of its {source.planned} groups"
    return f"{row['name']} is {row['status']}: {some} have enough done episodes{scored}."


def _refuse_ignored(chosen: Mapping[str, Any]) -> None:
    ignored = [key for key in chosen if not key.startswith(TRAINING_KEYS) and key not in (*ALLOWED_KEYS, "iterations")]
    if ignored:
        raise ConfigError(f"{', '.join(ignored)}: fixed by the stored episodes, and cannot be set now.", "Leave it out.")
    if chosen.get("epochs", 1) != 1 or "iterations" in chosen:
        message = "Stored episodes give exactly one epoch: a run trains on an episode at most once."
        raise ConfigError(message, "Leave --epochs and --iterations out.")


def _load_sources(db: Database, source_config: SourceConfig, least: int) -> list[StoredRun]:
    """Return the source runs with their selected groups. If a run itself is named, all of its groups are selected."""
    groups_by_run: dict[int, list[int]] = {find_run(db, run)["id"]: [] for run in source_config.runs}
    whole = set(groups_by_run)
    for group in source_config.groups:
        run = find_run_of_group(db, group)
        if run not in whole:
            groups_by_run.setdefault(run, []).append(group)
    sources = [load_stored_run(db, run, groups, source_config.reward_set, least) for run, groups in groups_by_run.items()]
    for source in sources:
        check_run_tokens(source.row["name"], source.row["tokens_removed_at"])
    if not any(source.groups for source in sources):
        raise StateError(
            f"No finished group has at least {least} episodes that are done.",
            f"List the episodes: agentrl episodes {sources[0].row['name']}",
        )
    twice = find_episode_counted_twice(db, [group for source in sources for group in source.groups])
    if twice is not None:
        raise ConfigError(
            f"Episode {twice} would be trained on twice: the group of its forks contains it too.",
            "Train on the two groups in two runs.",
        )
    return sources


def _check_alike(sources: list[StoredRun], start: PolicyRef) -> None:
    """Check that all sources have the same base model and sampling temperature, so that tokens and logprobs are comparable."""
    bases = {source.row["base_hash"] for source in sources} | {start.base_hash}
    temperatures = {source.row["config"]["rollout"]["temperature"] for source in sources}
    if len(bases) > 1 or len(temperatures) > 1:
        what = "base models" if len(bases) > 1 else "sampling temperatures"
        raise ConfigError(
            f"One run cannot use these episodes and this policy: their {what} differ.",
            f"Submit one run for each of the {what}.",
        )
