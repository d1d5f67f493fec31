"""Data for offline training: finished episodes with their rewards, and then the tokens of the selected ones."""

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, func, select

from agentrl.workflow.stats.best_episodes import Candidate
from agentrl.workflow.store.connect import read_transaction
from agentrl.workflow.store.episode_loader import load_episodes, split_in_parts, task_value
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import Episode


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
    """Return the episodes with these ids and all of their tokens, in the order of `ids`. An id that occurs twice gives two
    episodes.
    """
    by_id: dict[int, Episode] = {}
    for part in split_in_parts(ids):
        some = schema.episodes.c.id.in_(part)
        of_some = schema.tasks.c.id.in_(select(schema.episodes.c.task_id).where(some))
        tasks = {row["id"]: task_value(row) for row in tx.execute(select(schema.tasks).where(of_some)).mappings()}
        by_id |= {episode.id: episode for episode in load_episodes(tx, some, tasks)}
    return [by_id[number] for number in ids]
