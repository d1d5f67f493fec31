"""Forks, which are new episodes that branch off a stored episode at a step; and runs that train on stored groups.

The first steps of a fork are read from its parent and never copied. The fork samples its steps from `fork_step` on. The forks
of one request form one group of the kind `fork`, so they share a baseline. The parent may be in the group too. A row of
`episodes` without steps then represents the parent: this row inherits all of the parent's steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select, text

from agentrl.workflow.errors import NotFoundError, StateError
from agentrl.workflow.store.connect import read_transaction
from agentrl.workflow.store.episode_loader import MAX_ID, episode_row, load_episodes, message_row, split_in_parts, task_value
from agentrl.workflow.store.row_codecs import no_step_error
from agentrl.workflow.store.run_resources import copy_links
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.step_values import FINAL_ANSWER
from agentrl.workflow.trajectory import OPEN, Episode, Message


@dataclass(frozen=True)
class Fork:
    """The point at which the episodes of a fork run branch off.

    Args:
        step: the number of the first step that the forks sample themselves.
        opening: the messages that this step reads instead of the env's messages; None for the env's messages.
        with_parent: True if the parent is in the group too. Its steps from this one on are then trained on.
    """

    parent: int
    step: int
    opening: tuple[Message, ...] | None = None
    with_parent: bool = False


@dataclass(frozen=True)
class ForkPoint:
    """The data that a fork needs: the episode, the row of its run, the run and version of the policy that sampled the step, and
    the weights and code hash of the run's rewards.
    """

    episode: Episode
    run: Mapping[str, Any]
    policy_run: str
    policy_version: int
    weights: Mapping[str, float]
    code_hash: str


@read_transaction
def load_fork_point(tx: Connection, episode: int, step: int) -> ForkPoint:
    """Return the data for a fork of the episode at that step. Raise NotFoundError if there is no such episode, or it has no
    such step. Raise StateError if the episode has not ended.
    """
    row = episode_row(tx, episode)
    if row["status"] in OPEN:
        raise StateError(
            f"Episode {episode} has not ended: it is {row['status']}.",
            "Fork it when it has ended. To end it now, pause its run: agentrl pause RUN.",
        )
    task = tx.execute(select(schema.tasks).where(schema.tasks.c.id == row["task_id"])).mappings().one()
    (value,) = load_episodes(tx, schema.episodes.c.id == episode, {task["id"]: task_value(task)})
    run = tx.execute(select(schema.runs).where(schema.runs.c.id == row["run_id"])).mappings().one()
    if not 0 <= step < len(value.steps):
        raise no_step_error(episode, step, len(value.steps))
    owner = row
    while step < owner["inherited_steps"]:
        owner = episode_row(tx, owner["parent_id"])
    steps, policies = schema.steps.c, schema.policies
    sampler = tx.execute(
        select(policies.c.version, schema.runs.c.name)
        .join(schema.steps, steps.policy_id == policies.c.id)
        .join(schema.runs, schema.runs.c.id == policies.c.run_id)
        .where(steps.episode_id == owner["id"], steps.attempt == owner["attempt"], steps.number == step)
    ).one()
    rewards = find_reward_set(tx, run["id"], "default")
    return ForkPoint(value, dict(run), sampler.name, sampler.version, rewards["weights"], rewards["code_hash"])


def find_reward_set(tx: Connection, run_id: int, name: str) -> Mapping[Any, Any]:
    """Return the run's reward set of that name. Raise NotFoundError if the run has no such set."""
    sets = schema.reward_sets.c
    rows = tx.execute(select(schema.reward_sets).where(sets.run_id == run_id)).mappings().all()
    for row in rows:
        if row["name"] == name:
            return row
    set_names = ", ".join(row["name"] for row in rows)
    raise NotFoundError(
        f"The run has no reward set {name!r}; it has {set_names}.", "Create one: agentrl rescore RUN --reward ..."
    )


def insert_fork(tx: Connection, run_id: int, policy_id: int, size: int, fork: Fork) -> None:
    """Plan the single iteration of a fork run: one group with `size` new episodes and, if `fork.with_parent`, the parent."""
    parent = episode_row(tx, fork.parent, locked=True)  # so that two forks at once do not count their samples alike
    iteration_id: int = tx.execute(
        schema.iterations.insert()
        .values(run_id=run_id, number=0, epoch=0, policy_id=policy_id, episodes=size + fork.with_parent)
        .returning(schema.iterations.c.id)
    ).scalar_one()
    task_id = parent["task_id"]
    tx.execute(schema.run_tasks.insert().values(run_id=run_id, task_id=task_id))
    opening = [message_row(message) for message in fork.opening] if fork.opening else None
    group_id: int = tx.execute(
        schema.groups.insert()
        .values(run_id=run_id, iteration_id=iteration_id, task_id=task_id, slot=0, kind="fork", opening=opening)
        .returning(schema.groups.c.id)
    ).scalar_one()
    copy_links(tx, parent["group_id"], group_id)
    first = _next_sample(tx, fork)
    shared = {
        "run_id": run_id,
        "iteration_id": iteration_id,
        "group_id": group_id,
        "task_id": task_id,
        "parent_id": fork.parent,
        "fork_step": fork.step,
    }
    rows = [{**shared, "sample": first + index, "inherited_steps": fork.step} for index in range(size)]
    tx.execute(schema.episodes.insert(), rows)
    if fork.with_parent:
        _insert_stand_in(tx, {**shared, "sample": first + size}, parent)


def _next_sample(tx: Connection, fork: Fork) -> int:
    """Return the first sample number that no fork of this step has. A second fork therefore draws other tokens."""
    siblings = (schema.episodes.c.parent_id == fork.parent) & (schema.episodes.c.fork_step == fork.step)
    return int(tx.execute(select(func.coalesce(func.max(schema.episodes.c.sample) + 1, 0)).where(siblings)).scalar_one())


def _insert_stand_in(tx: Connection, shared: Mapping[str, Any], parent: Mapping[Any, Any]) -> None:
    copied_columns = (
        "status",
        "stop_reason",
        "reward",
        "error_class",
        "error",
        "tainted",
        "started_at",
        "finished_at",
    )
    whole = parent["inherited_steps"] + parent["steps"]
    answer = tx.execute(text(f"SELECT {FINAL_ANSWER} FROM episodes e WHERE e.id = :id"), {"id": parent["id"]}).scalar_one()
    stand_in: int = tx.execute(
        schema.episodes.insert()
        .values(**shared, inherited_steps=whole, **{name: parent[name] for name in copied_columns}, final_answer=answer)
        .returning(schema.episodes.c.id)
    ).scalar_one()
    rewards = schema.rewards.c
    its = find_reward_set(tx, parent["run_id"], "default")["id"]
    parts = select(rewards.part, rewards.step, rewards.value, rewards.weight).where(
        rewards.episode_id == parent["id"], rewards.reward_set_id == its
    )
    mine = find_reward_set(tx, shared["run_id"], "default")["id"]
    rows = tx.execute(parts.order_by(rewards.id)).mappings()
    copies = [{"reward_set_id": mine, "episode_id": stand_in, **row} for row in rows]
    if copies:
        name = select(schema.runs.c.name).where(schema.runs.c.id == shared["run_id"]).scalar_subquery()
        tx.execute(schema.rewards.insert().values(run=name), copies)


@dataclass(frozen=True)
class StoredRun:
    """A run on whose groups another run trains.

    It has the run's row, the version of the run's first policy, the usable groups, the number of requested groups (`planned`),
    and the weights and code hash of one reward set.
    """

    row: Mapping[str, Any]
    version: int
    groups: Sequence[int]
    planned: int
    weights: Mapping[str, float]
    code_hash: str


@read_transaction
def load_stored_run(tx: Connection, run_id: int, only: Sequence[int], name: str, least: int) -> StoredRun:
    """Return the run and its usable groups. A group is usable if it is done and has at least `least` done episodes with a
    reward. Raise NotFoundError if the run has no such reward set.

    Args:
        only: the ids of the groups to use; empty for all groups of the run.
        name: the name of the reward set in which the rewards are looked up.
        least: the minimum number of done episodes with a reward in a group.
    """
    row = tx.execute(select(schema.runs).where(schema.runs.c.id == run_id)).mappings().one()
    groups, episodes = schema.groups.c, schema.episodes.c
    group_ids = set(only)
    rewards = find_reward_set(tx, run_id, name)
    done = select(episodes.group_id).where(episodes.run_id == run_id, episodes.status == "done")
    if name != "default":
        scored = select(schema.rewards.c.episode_id).where(schema.rewards.c.reward_set_id == rewards["id"])
        done = done.where(episodes.id.in_(scored))
    done = done.group_by(episodes.group_id).having(func.count() >= least)
    mine = groups.run_id == run_id
    finished = select(groups.id).where(mine, groups.status == "done", groups.id.in_(done)).order_by(groups.id)
    planned = select(func.count()).select_from(schema.groups).where(mine)
    first = select(func.min(schema.policies.c.version)).where(schema.policies.c.run_id == run_id)
    return StoredRun(
        dict(row),
        tx.execute(first).scalar_one(),
        [group for group in tx.execute(finished).scalars() if group in group_ids or not group_ids],
        len(group_ids) or tx.execute(planned).scalar_one(),
        rewards["weights"],
        rewards["code_hash"],
    )


@read_transaction
def find_episode_counted_twice(tx: Connection, groups: Sequence[int]) -> int | None:
    """Return the id of an episode that would be trained on twice; None if there is no such episode.

    This would happen if `groups` contains both the episode's own group and the group of a fork that includes the episode as the
    parent.
    """
    parents, forks = schema.episodes.alias(), schema.episodes
    stood_in = forks.c.inherited_steps > forks.c.fork_step  # a fork has just those before it
    query = select(parents.c.id, parents.c.group_id).join(forks, forks.c.parent_id == parents.c.id).where(stood_in)
    both = set(groups)
    for some in split_in_parts(groups):
        for parent in tx.execute(query.where(forks.c.group_id.in_(some))):
            if parent.group_id in both:
                return int(parent.id)
    return None


@read_transaction
def find_run_of_group(tx: Connection, group: int) -> int:
    """Return the id of the run that the group belongs to. Raise NotFoundError if there is no such group."""
    query = select(schema.groups.c.run_id).where(schema.groups.c.id == group)
    run_id = tx.execute(query).scalar_one_or_none() if abs(group) <= MAX_ID else None
    if run_id is None:
        raise NotFoundError(
            f"There is no group {group}.", 'List the groups: agentrl sql "SELECT id, run, task FROM v_groups LIMIT 20"'
        )
    return int(run_id)
