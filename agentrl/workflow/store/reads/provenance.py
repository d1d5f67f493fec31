"""The origin of an episode: everything that `replay --verify` needs to repeat it, read at one moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from agentrl.workflow.rewards import Part
from agentrl.workflow.store.connect import read_transaction
from agentrl.workflow.store.episode_loader import message_value, part_values
from agentrl.workflow.store.reads.episode_rows import EpisodeRecord, find_episode
from agentrl.workflow.store.rollout_claims import CLOCK
from agentrl.workflow.store.run_resources import resources_of_group
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import Message, PolicyRef, SamplingKey


@dataclass(frozen=True, slots=True)
class RewardSet:
    """A scoring of the episode.

    Args:
        weights: by reward; `code_hash`: of the rewards' code at that time.
        parts: what they came to, and what hooks added, in the order of recording; empty where it is not scored.
    """

    weights: Mapping[str, float]
    code_hash: str
    parts: Mapping[str, Part]


@dataclass(frozen=True)
class Origin:
    """A full episode with its origin.

    Args:
        run, format, config, manifest, base, base_hash: the run's; `run` is its name.
        key: the key of its draws.
        policies: what each step that it sampled itself was sampled with, by the step's number.
        collected: when the files of such a policy were removed, by the step's number; only where they were.
        reward_sets: those of its run, by name.
        opening: what a fork's first own step read instead of what the env says; None for what the env says.
        resources: the texts that its run worked with.
        clock: the time at which its prompts were rendered.
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
    """Return the episode with its origin.

    Raises:
        NotFoundError: there is no such episode.
    """
    record = find_episode(tx, episode)
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
