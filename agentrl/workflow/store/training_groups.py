"""Training data: the groups of an iteration with their complete episodes, and the episodes that `sft` and `dpo` learn from."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from sqlalchemy import Connection, Select, func, select, union_all

from agentrl.workflow.stats.best_episodes import Candidate
from agentrl.workflow.store.connect import read_transaction
from agentrl.workflow.store.episode_loader import load_episodes, members_of, split_in_parts, task_value
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import WHOLE, Episode, Group


def _load_slots(tx: Connection, iteration: int) -> dict[int, tuple[int, int]]:
    """Return the slot and the task id of each group on which the iteration trains, by group id."""
    groups, stored = schema.groups.c, schema.iteration_groups.c
    own = select(groups.id, groups.slot, groups.task_id).where(groups.iteration_id == iteration)
    lent = (
        select(groups.id, stored.slot, groups.task_id)
        .join(schema.iteration_groups, stored.group_id == groups.id)
        .where(stored.iteration_id == iteration)
    )
    rows = tx.execute(union_all(own, lent)).all()
    return {row.id: (row.slot, row.task_id) for row in sorted(rows, key=lambda row: row.slot)}


def load_groups(tx: Connection, iteration: int, reward_set: str) -> tuple[Group, ...]:
    """Return the groups on which the iteration trains, with the rewards of that reward set."""
    slots = _load_slots(tx, iteration)
    rows = tx.execute(select(schema.tasks).where(schema.tasks.c.id.in_({task for _, task in slots.values()}))).mappings()
    tasks = {row["id"]: task_value(row) for row in rows}
    members: dict[int, list[Episode]] = {group: [] for group in slots}
    of_group = select(schema.episodes.c.id, schema.episodes.c.group_id).where(members_of(iteration))
    groups = {row.id: row.group_id for row in tx.execute(of_group)}
    for episode in _load_rewards(tx, iteration, load_episodes(tx, members_of(iteration), tasks), reward_set):
        members[groups[episode.id]].append(episode)
    return tuple(Group(tasks[task], tuple(members[group]), slot) for group, (slot, task) in slots.items())


def _load_rewards(tx: Connection, iteration: int, episodes: Sequence[Episode], reward_set: str) -> list[Episode]:
    """Add the rewards of the set to the episodes and their steps. An episode without one cannot train."""
    sets = schema.reward_sets.c
    runs = select(schema.episodes.c.run_id).where(members_of(iteration))
    set_ids = tx.execute(select(sets.id).where(sets.name == reward_set, sets.run_id.in_(runs))).scalars().all()
    ids = [episode.id for episode in episodes]
    rewards: dict[int, dict[int, float]] = {}
    for some in split_in_parts(ids):
        # By set and episode, which one index finds: never all that a set has.
        query = _select_step_rewards(reward_set).where(schema.rewards.c.reward_set_id.in_(set_ids))
        for row in tx.execute(query.where(schema.rewards.c.episode_id.in_(some))):
            rewards.setdefault(row.episode_id, {})[row.step] = row.earned
    return [_with_rewards(episode, rewards.get(episode.id, {}), reward_set == "default") for episode in episodes]


def _select_step_rewards(reward_set: str) -> Select[tuple[int, int, float]]:
    sets, rewards = schema.reward_sets.c, schema.rewards.c
    query = (
        select(rewards.episode_id, rewards.step, func.sum(rewards.value * rewards.weight).label("earned"))
        .join(schema.reward_sets, sets.id == rewards.reward_set_id)
        .join(schema.episodes, (schema.episodes.c.id == rewards.episode_id) & (schema.episodes.c.run_id == sets.run_id))
        .group_by(rewards.episode_id, rewards.step)
        .order_by(rewards.episode_id, rewards.step)
    )
    return query.where(rewards.step != WHOLE) if reward_set == "default" else query


def _with_rewards(episode: Episode, earned: Mapping[int, float], default: bool) -> Episode:
    if earned:
        steps = tuple(replace(step, reward=earned.get(step.index, 0.0)) for step in episode.steps)
        episode = replace(episode, steps=steps)
    return episode if default else replace(episode, reward=sum(earned.values()) if earned else None)


@read_transaction
def load_candidates(tx: Connection, run_id: int, groups: Collection[int], reward_set: str) -> list[Candidate]:
    """Return the episodes of the run's groups that offline training may use, each with its reward.

    These are the done, untainted episodes that have a reward in the set.
    """
    episodes = schema.episodes.c
    done = (episodes.run_id == run_id) & (episodes.status == "done") & episodes.tainted.is_(False)
    query = select(episodes.id, episodes.group_id, episodes.task_id, episodes.reward).where(done)
    if reward_set != "default":
        rewards, sets = schema.rewards.c, schema.reward_sets.c
        query = (
            select(episodes.id, episodes.group_id, episodes.task_id, func.sum(rewards.value * rewards.weight).label("reward"))
            .join(schema.rewards, rewards.episode_id == episodes.id)
            .join(schema.reward_sets, sets.id == rewards.reward_set_id)
            .where(done, sets.run_id == run_id, sets.name == reward_set)
            .group_by(episodes.id, episodes.group_id, episodes.task_id)
        )
    group_ids = set(groups)
    rows = tx.execute(query.order_by(episodes.id)).all()
    return [Candidate(row.id, row.group_id, row.task_id, row.reward) for row in rows if row.group_id in group_ids]


@read_transaction
def load_chosen_episodes(tx: Connection, ids: Sequence[int]) -> list[Episode]:
    """Return the episodes with these ids, with all tokens, in the order of `ids`. If an id is repeated, its episode is
    repeated.
    """
    by_id: dict[int, Episode] = {}
    for part in split_in_parts(ids):
        some = schema.episodes.c.id.in_(part)
        of_some = schema.tasks.c.id.in_(select(schema.episodes.c.task_id).where(some))
        tasks = {row["id"]: task_value(row) for row in tx.execute(select(schema.tasks).where(of_some)).mappings()}
        by_id |= {episode.id: episode for episode in load_episodes(tx, some, tasks)}
    return [by_id[number] for number in ids]
