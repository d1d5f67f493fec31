"""The inputs that are needed to repeat an episode (`replay --verify`) or an update (`whatif`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from agentrl.workflow.errors import NotFoundError, StateError
from agentrl.workflow.rewards import Part
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.store.connect import read_transaction
from agentrl.workflow.store.episode_loader import message_value, part_values
from agentrl.workflow.store.iterations import wanted_groups
from agentrl.workflow.store.reads.episode_rows import EpisodeRecord, find_episode
from agentrl.workflow.store.rollout_claims import CLOCK
from agentrl.workflow.store.run_names import find_run, require_weights
from agentrl.workflow.store.run_resources import resources_of_group
from agentrl.workflow.store.training_groups import load_groups
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import Group, Message, PolicyRef, SamplingKey


@dataclass(frozen=True, slots=True)
class RewardSet:
    """The rewards of an episode in one reward set. `code_hash` is the hash of the rewards' code when the set was written.
    `parts` are the reward parts, including those that hooks added, in the order of recording; empty if the episode has no
    rewards in the set.
    """

    weights: Mapping[str, float]
    code_hash: str
    parts: Mapping[str, Part]


@dataclass(frozen=True)
class Origin:
    """A complete episode, and the inputs that are needed to repeat it.

    Args:
        run, format, config, manifest, base, base_hash: the name of the episode's run (`run`), and columns of the run's row.
        key: the key of the episode's random draws.
        policies: the policy of each step that the episode sampled itself, by step number.
        collected: for each step whose policy's files were removed, the time of the removal, by step number.
        reward_sets: the reward sets of the run, by name.
        opening: for a fork, the messages that the first step which the fork sampled itself read; None if these are the env's
            messages.
        clock: the time that the chat template read when it rendered the prompts.
        resources: the texts that the episode used, by name.
    """

    record: EpisodeRecord
    run: str
    format: int
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    base: str
    base_hash: str
    key: SamplingKey
    policies: Mapping[int, PolicyRef]
    collected: Mapping[int, datetime]
    reward_sets: Mapping[str, RewardSet]
    opening: tuple[Message, ...] | None
    clock: datetime
    resources: Mapping[str, str] = field(default_factory=dict)


@read_transaction
def find_origin(tx: Connection, episode: int) -> Origin:
    """Return the episode with the inputs that are needed to repeat it. Raise NotFoundError if there is no such episode. Raise
    StateError if its tokens were removed.
    """
    record = find_episode(tx, episode)
    if record.removed:
        raise record.removed.error()
    query = (
        select(schema.runs, schema.groups.c.kind.label("purpose"), schema.groups.c.opening, schema.iterations.c.number)
        .add_columns(schema.episodes.c.group_id, CLOCK)
        .select_from(schema.episodes)
        .join(schema.runs, schema.runs.c.id == schema.episodes.c.run_id)
        .join(schema.groups, schema.groups.c.id == schema.episodes.c.group_id)
        .join(schema.iterations, schema.iterations.c.id == schema.episodes.c.iteration_id)
        .where(schema.episodes.c.id == episode)
    )
    run = tx.execute(query).mappings().one()
    steps = _policies(tx, episode)
    refs = {row.number: PolicyRef(run["base"], run["base_hash"], row.path, row.sha256, row.version) for row in steps}
    return Origin(
        record=record,
        run=run["name"],
        format=run["format"],
        config=run["config"],
        manifest=run["manifest"],
        base=run["base"],
        base_hash=run["base_hash"],
        key=SamplingKey.of(record.episode, run["seed"], run["purpose"], run["number"]),
        policies=refs,
        collected={row.number: row.collected_at for row in steps if row.collected_at is not None},
        reward_sets=_reward_sets(tx, episode, run["id"]),
        opening=tuple(message_value(message) for message in run["opening"]) if run["opening"] else None,
        clock=run["clock"],
        resources=resources_of_group(tx, run["group_id"]),
    )


def _reward_sets(tx: Connection, episode: int, run: int) -> dict[str, RewardSet]:
    rewards = schema.rewards.c
    sets = tx.execute(
        select(schema.reward_sets).where(schema.reward_sets.c.run_id == run).order_by(schema.reward_sets.c.id)
    ).all()
    rows: dict[int, list[Any]] = {row.id: [] for row in sets}
    for row in tx.execute(select(schema.rewards).where(rewards.episode_id == episode).order_by(rewards.id)):
        if row.reward_set_id in rows:
            rows[row.reward_set_id].append(row)
    return {row.name: RewardSet(row.weights, row.code_hash, part_values(rows[row.id])) for row in sets}


def _policies(tx: Connection, episode: int) -> Sequence[Any]:
    steps, policies, episodes = schema.steps.c, schema.policies.c, schema.episodes.c
    query = (
        select(steps.number, policies.version, policies.path, policies.sha256, policies.collected_at)
        .join(schema.steps, steps.policy_id == policies.id)
        .join(schema.episodes, (episodes.id == steps.episode_id) & (episodes.attempt == steps.attempt))
        .where(episodes.id == episode)
    )
    return tx.execute(query).all()


@dataclass(frozen=True)
class UpdateInputs:
    """The inputs of an iteration's update.

    Args:
        run: the run's row.
        number: the iteration's number, counted from 0. (The property `iteration` counts from 1.)
        policy: the policy with which the update started.
        groups, max_groups: see `train_claims.IterationWork`.
        advantages: the advantages that the update recorded, by episode id.
    """

    run: Mapping[str, Any]
    number: int
    policy: PolicyRef
    groups: tuple[Group, ...]
    max_groups: int
    advantages: Mapping[int, float]

    @property
    def iteration(self) -> int:
        """The iteration's number, counted from 1. It is also the version of the policy that the update makes."""
        return self.number + 1

    @property
    def is_borrowed(self) -> bool:
        """True if the update started with another run's checkpoint. Then it did not use that run's optimizer state and
        critic.
        """
        return not self.policy.path.endswith(self.run["manifest"].get("id", "")[:8])


@read_transaction
def load_update_inputs(tx: Connection, run: str, iteration: int | None) -> UpdateInputs:
    """Return the inputs of the update of an iteration of the run. `iteration` is its number, counted from 1.

    If `iteration` is None, use the last iteration whose update took a step. If no update took a step, use the last done
    iteration. Raise NotFoundError if there is no such run or iteration. Raise StateError if the iteration is not trained yet,
    or the run does not train. Raise CheckpointError if the weights with which the update started were removed.
    """
    row = find_run(tx, run)
    iteration_row = _find_iteration(tx, row, iteration)
    policies, consumptions = schema.policies.c, schema.consumptions.c
    of_run = select(schema.policies).where(policies.run_id == row["id"], policies.version == iteration_row.number)
    start = tx.execute(of_run).one()
    require_weights(row["name"], start.version, start.collected_at, f"the update of iteration {iteration_row.number + 1}")
    recorded = select(consumptions.episode_id, consumptions.advantage).where(consumptions.iteration_id == iteration_row.id)
    return UpdateInputs(
        run=row,
        number=iteration_row.number,
        policy=PolicyRef(row["base"], row["base_hash"], start.path, start.sha256, start.version),
        groups=load_groups(tx, iteration_row.id, row["reward_set"]),
        max_groups=wanted_groups(tx, iteration_row.id, row["config"]),
        advantages={consumption.episode_id: consumption.advantage for consumption in tx.execute(recorded)},
    )


def _find_iteration(tx: Connection, run: Mapping[str, Any], number: int | None) -> Any:
    name, iterations = run["name"], schema.iterations.c
    if run["kind"] != "train":
        raise StateError(f"{name!r} does not train: it is of kind {run['kind']}.", "Name a training run: agentrl runs")
    if number is not None and not 1 <= number <= run["iterations"]:
        raise NotFoundError(
            f"{name!r} has {format_count(run['iterations'], 'iteration')}, counted from 1; there is no iteration {number}."
        )
    query = select(schema.iterations).where(iterations.run_id == run["id"], iterations.status == "done")
    query = query if number is None else query.where(iterations.number == number - 1)
    rows = tx.execute(query.order_by(iterations.number.desc())).all()
    if not rows:
        missing = f"No iteration of {name!r} is" if number is None else f"Iteration {number} of {name!r} is not"
        raise StateError(f"{missing} trained yet.", f"agentrl watch {name}")
    return next((row for row in rows if not row.skipped), rows[0])
