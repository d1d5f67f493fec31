"""An episode's relations: its task, rewards, parents, forks and outcome."""

from collections.abc import Mapping
from typing import Any

from agentrl.workflow.store.driver_reader import Row, select_rows
from agentrl.workflow.store.reads.episode_shape import EpisodeShape
from agentrl.workflow.store.reads.paging import select_values
from agentrl.workflow.store.reads.turn_rows import cut_column
from agentrl.workflow.tables.views import EpisodeRow, FateRow, RewardRow

MAX_FORKS = 100
MAX_REWARDS = 500
"""The maximum numbers of forks (MAX_FORKS) and of reward parts (MAX_REWARDS) that are returned for an episode."""


def load_row(tx: Any, episode: int) -> EpisodeRow:
    """Return the row of an existing episode."""
    return select_values(tx, EpisodeRow, "WHERE id = :id", id=episode)[0]


def load_run_of(tx: Any, run_id: int) -> Row:
    """Return the columns of an episode's run that are needed to explain the episode."""
    query = "SELECT id, name, kind, base, base_hash, reward_set, config, manifest FROM runs WHERE id = :id"
    return select_rows(tx, query, id=run_id)[0]


def load_task_of(tx: Any, task_id: int) -> Row:
    """Return a task: its id, key, messages and reference. A long reference is cut."""
    query = f"SELECT id, key, messages, {cut_column('reference')} FROM tasks WHERE id = :id"
    return select_rows(tx, query, id=task_id)[0]


def load_whole_rewards(tx: Any, episode: int) -> tuple[list[RewardRow], int]:
    """Return at most MAX_REWARDS reward parts of the whole episode, from all reward sets, and the number of further parts."""
    rest = f"WHERE episode_id = :id AND step IS NULL ORDER BY id LIMIT {MAX_REWARDS + 1}"
    rewards = select_values(tx, RewardRow, rest, id=episode)
    if len(rewards) <= MAX_REWARDS:
        return rewards, 0
    (count,) = select_rows(tx, "SELECT count(*) AS n FROM rewards WHERE episode_id = :id AND step < 0", id=episode)
    return rewards[:MAX_REWARDS], count["n"] - MAX_REWARDS


def load_beside(tx: Any, episode: int, group: int) -> Row:
    """Return the ids of the `previous` and `next` episode of the group by sample number, or None."""
    query = """
        SELECT
          (SELECT b.id FROM episodes b WHERE b.group_id = :group AND b.sample < e.sample
           ORDER BY b.sample DESC LIMIT 1) AS previous,
          (SELECT a.id FROM episodes a WHERE a.group_id = :group AND a.sample > e.sample
           ORDER BY a.sample LIMIT 1) AS next
        FROM episodes e WHERE e.id = :id"""
    return select_rows(tx, query, id=episode, group=group)[0]


def load_forks(tx: Any, episode: int) -> tuple[list[Row], int]:
    """Return the newest MAX_FORKS forks of the episode, and the number of older forks."""
    query = f"""
        SELECT e.id, r.name AS run, e.run_id, e.fork_step AS step, e.reward, e.status FROM episodes e
        JOIN runs r ON r.id = e.run_id WHERE e.parent_id = :id ORDER BY e.id + 0 DESC LIMIT {MAX_FORKS}"""
    forks = select_rows(tx, query, id=episode)
    (count,) = select_rows(tx, "SELECT count(*) AS n FROM episodes WHERE parent_id = :id", id=episode)
    return forks, count["n"] - len(forks)


def load_agent(tx: Any, shape: EpisodeShape) -> Row | None:
    """Return the agent's status, exit code, error, output and answer; None if no agent ran the episode. Long texts are cut."""
    query = f"""
        SELECT status, exit_code, error_class, {cut_column("error")}, {cut_column("output")}, {cut_column("answer")}
        FROM agent_attempts WHERE episode_id = :id AND attempt = :attempt ORDER BY id DESC LIMIT 1"""
    rows = select_rows(tx, query, id=shape.id, attempt=shape.attempt)
    return rows[0] if rows else None


def load_resources_of(tx: Any, group: int) -> list[Row]:
    """Return the versions of the texts (such as prompts) that the episodes of a group use."""
    query = """
        SELECT v.id, v.name, v.version, v.chosen, v.run_id FROM group_resources l JOIN resources v ON v.id = l.resource_id
        WHERE l.group_id = :id ORDER BY v.name, v.version LIMIT 100"""
    return select_rows(tx, query, id=group)


def load_fate(tx: Any, row: EpisodeRow) -> dict[str, Any]:
    """Return the episode's outcome in its own run, with the reason. `elsewhere` has its outcomes in other runs."""
    fates = select_values(tx, FateRow, "WHERE episode_id = :id ORDER BY run LIMIT 100", id=row.id)
    own = next((fate for fate in fates if fate.run == row.run), None)
    names = ("run", "iteration", "task", "fate", "advantage", "dropped", "skipped")
    columns = ("status", "stop_reason", "reward", "error_class", "error", "attempt", "parent_id", "fork_step")
    return {
        "id": row.id,
        **{name: None if own is None else own[name] for name in names},
        **{name: row[name] for name in columns},
        "elsewhere": [dict(fate) for fate in fates if fate.run != row.run],
    }


def load_readers(tx: Any, episode: int) -> list[Mapping[str, Any]]:
    """Return the updates that used the episode, those of the episode's own run first, each with the reason if the update was
    skipped.
    """
    query = """
        SELECT c.run_id, r.name AS run, c.iteration_id, i.number + 1 AS iteration, c.advantage, i.skipped
        FROM consumptions c JOIN runs r ON r.id = c.run_id JOIN iterations i ON i.id = c.iteration_id
        JOIN episodes e ON e.id = c.episode_id
        WHERE c.episode_id = :id AND c.stage = 'train'
        ORDER BY CASE WHEN c.run_id = e.run_id THEN 0 ELSE 1 END, c.id LIMIT 100"""
    return select_rows(tx, query, id=episode)
