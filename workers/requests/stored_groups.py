"""Training on stored groups: a run that makes no episode of its own, of the runs' config that made them.

What was decided when the episodes were made (model, dataset, env, sampling) is taken from there; only how they are credited
and trained on can be chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workers.requests.eval_config import SINGLE_PASS, TRAINING_KEYS, sampling_values
from agentrl.workers.requests.submission import (
    PreparedRun,
    find_free_name,
    list_remarks,
    manifest,
    pick_output_folder,
    plan_evaluation,
    remark_on_rewards,
)
from agentrl.workflow import trainers
from agentrl.workflow.algorithms import Algorithm, settle_run
from agentrl.workflow.config import RunConfig, SourceConfig, build
from agentrl.workflow.errors import ConfigError, StateError
from agentrl.workflow.hooks import load_hooks
from agentrl.workflow.plugins import find
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.forks import StoredRun, find_episode_counted_twice, find_run_of_group, load_stored_run
from agentrl.workflow.store.planning import Submission
from agentrl.workflow.store.run_names import find_run, find_stored_policy
from agentrl.workflow.trajectory import PolicyRef

ALLOWED_KEYS = ("name", "seed", "epochs", "output_dir", "hooks", "rollout.tasks_per_iteration")
"""What may be chosen beside the sections that say nothing of how episodes are made."""


def prepare_stored(db: Database, asked: RunConfig, origins: Mapping[str, str], policy: PolicyRef | None = None) -> PreparedRun:
    """Checks the request and makes the submission; writes nothing.

    Args:
        asked: with `source` given.
        origins: where each of its values came from; what is no default was chosen.
        policy: the weights to start from; unset: those that the first of the runs started from.

    Raises:
        AgentRLError: of the kind that is wrong, in one sentence.
    """
    chosen = {key: value for key, value in asked.flat().items() if origins.get(key, "default") != "default"}
    _refuse_ignored(chosen)
    algorithm: Algorithm = find("algorithms", asked.algorithm.name)
    found = load_stored_groups(db, asked.source, 2 if algorithm.needs_group else 1, policy)
    sources, start, first = found.sources, found.start, found.sources[0]
    name = asked.name or find_free_name(db, f"{first.row['name'][:50]}-stored")
    defaults = {key: value for key, value in RunConfig().flat().items() if key in ALLOWED_KEYS}
    config = settle_run(build(sampling_values(found.config) | defaults | chosen | SINGLE_PASS | {"name": name}))
    trainers.check(config)
    load_hooks(config.hooks)
    first_policy = PolicyRef(start.base, start.base_hash, start.path, start.sha256)
    submission = Submission(
        name=name,
        kind="train",
        config=config.model_dump(mode="json"),
        manifest=manifest(config),
        policy=first_policy,
        tasks=(),
        dataset=first.row["dataset"],
        seed=config.seed,
        epochs=1,
        tasks_per_iteration=config.rollout.tasks_per_iteration,
        group_size=config.rollout.group_size,
        weights=first.weights,
        code_hash=first.code_hash,
        output_dir=str(pick_output_folder(config, name)),
        groups=[group for source in sources for group in source.groups],
        reward_set=config.source.reward_set,
        evaluation=plan_evaluation(db, config, first_policy),
    )
    made = [(source.weights, RunConfig.model_validate(source.row["config"])) for source in sources]
    remarks = (*found.remarks, *remark_on_rewards(*made), *list_remarks(submission))
    return PreparedRun(submission, config, (), asked.name is not None, remarks)


@dataclass(frozen=True)
class StoredGroups:
    """Stored groups of one or several runs, and the weights that learn from them.

    Args:
        sources: by run, the first of which names config and model.
        start: its base, at the policy that was asked for, else at the one that it started from.
        remarks: what a person should know of it.
    """

    sources: Sequence[StoredRun]
    start: PolicyRef
    remarks: tuple[str, ...]

    @property
    def config(self) -> RunConfig:
        """The config that the episodes were made with."""
        return RunConfig.model_validate(self.sources[0].row["config"])


def load_stored_groups(db: Database, source: SourceConfig, least: int, policy: PolicyRef | None = None) -> StoredGroups:
    """The finished groups that the source names, with at least so many done episodes each.

    Args:
        policy: the weights to start from; unset: those that the first of the runs started from.

    Raises:
        NotFoundError: no such run, group or reward set.
        StateError: no group there is finished.
        ConfigError: an episode would count twice, or they are of several bases or temperatures.
    """
    sources = _load_sources(db, source, least)
    start = policy or find_stored_policy(db, sources[0].row["name"], sources[0].version)
    _check_alike(sources, start)
    remarks = tuple(_left_out_remark(each, source.reward_set) for each in sources if len(each.groups) < each.planned)
    return StoredGroups(sources, start, remarks)


def _left_out_remark(source: StoredRun, reward_set: str) -> str:
    row = source.row
    scored = (
        "" if reward_set == "default" else f", scored in {reward_set!r} (`agentrl rescore` again adds what has ended since)"
    )
    some = f"{len(source.groups)} of its {source.planned} groups"
    return f"{row['name']} is {row['status']}: {some} have enough done episodes{scored}."


def _refuse_ignored(chosen: Mapping[str, Any]) -> None:
    ignored = [key for key in chosen if not key.startswith(TRAINING_KEYS) and key not in (*ALLOWED_KEYS, "iterations")]
    if ignored:
        raise ConfigError(
            f"{', '.join(ignored)}: decided when the stored episodes were made, and cannot be chosen again.", "Leave it out."
        )
    if chosen.get("epochs", 1) != 1 or "iterations" in chosen:
        said = "A run trains on an episode at most once, so that stored ones give one epoch."
        raise ConfigError(said, "Leave --epochs and --iterations out.")


def _load_sources(db: Database, asked: SourceConfig, least: int) -> list[StoredRun]:
    """The runs to take groups from, each with those of its groups that are named; all where the run itself is."""
    named: dict[int, list[int]] = {find_run(db, run)["id"]: [] for run in asked.runs}
    whole = set(named)
    for group in asked.groups:
        run = find_run_of_group(db, group)
        if run not in whole:
            named.setdefault(run, []).append(group)
    sources = [load_stored_run(db, run, groups, asked.reward_set, least) for run, groups in named.items()]
    if not any(source.groups for source in sources):
        raise StateError(
            f"No finished group there has {least} done episodes to train on.", f"agentrl episodes {sources[0].row['name']}"
        )
    twice = find_episode_counted_twice(db, [group for source in sources for group in source.groups])
    if twice is not None:
        raise ConfigError(
            f"Episode {twice} would be trained on twice: it stands among its own forks too.", "Train on them in two runs."
        )
    return sources


def _check_alike(sources: list[StoredRun], start: PolicyRef) -> None:
    """One base, one sampling temperature: the tokens and their logprobs mean the same everywhere."""
    bases = {source.row["base_hash"] for source in sources} | {start.base_hash}
    temperatures = {source.row["config"]["rollout"]["temperature"] for source in sources}
    if len(bases) > 1 or len(temperatures) > 1:
        what = "base models" if len(bases) > 1 else "sampling temperatures"
        raise ConfigError(f"The episodes and the policy are of several {what}.", "Train on them in several runs.")
