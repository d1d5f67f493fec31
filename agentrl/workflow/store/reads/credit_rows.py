"""The inputs of an episode's advantage: the rewards of the episodes in its group and in its update. The rewards are those of
the reward set that is used for training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import Row, among, select_rows
from agentrl.workflow.store.reads.episode_shape import asked_column, in_parts, shape_value, step_columns
from agentrl.workflow.trajectory import WHOLE, Episode

MAX_STEPS = 5000
"""The maximum number of steps in an update. For an update with more steps, the credit of tokens is not recomputed."""
MAX_EPISODES = 20_000
"""The maximum number of episodes that are read of a group or an update."""
_EPISODE = """
    e.id, e.run_id, e.group_id, e.sample, e.status, e.stop_reason, e.attempt, e.reward, e.parent_id, e.fork_step,
    e.inherited_steps, e.tainted"""


@dataclass(frozen=True, slots=True)
class Member:
    """An episode of a group or update.

    `row` is the episode's row. `reward` is its reward in the reward set; None if it has none there. `tokens` is the number of
    trainable tokens that the episode sampled itself.
    """

    row: Row
    reward: float | None
    tokens: int

    @property
    def trainable(self) -> bool:
        """True if the episode is done, has a reward and is not tainted."""
        return self.row["status"] == "done" and self.reward is not None and not self.row["tainted"]


def load_group_members(tx: Any, group: int, reward_set: str) -> list[Member]:
    """Return the episodes of a group, ordered by sample number."""
    query = f"SELECT {_EPISODE} FROM episodes e WHERE e.group_id = :id ORDER BY e.sample LIMIT {MAX_EPISODES}"
    return _members(tx, select_rows(tx, query, id=group), reward_set)


def load_update_members(tx: Any, iteration: int, run_id: int, reward_set: str) -> list[Member]:
    """Return the episodes on which the run's update trained. `iteration` is the id of the update's iteration."""
    query = f"""
        SELECT {_EPISODE} FROM consumptions c JOIN episodes e ON e.id = c.episode_id
        WHERE c.iteration_id = :id AND c.run_id = :run AND c.stage = 'train' ORDER BY e.id LIMIT {MAX_EPISODES}"""
    return _members(tx, select_rows(tx, query, id=iteration, run=run_id), reward_set)


def _members(tx: Any, rows: Sequence[Row], reward_set: str) -> list[Member]:
    rewards = load_rewards_in(tx, rows, reward_set)
    tokens = _count_tokens(tx, rows)
    return [Member(row, rewards[row["id"]], tokens.get(row["id"], 0)) for row in rows]


def _count_tokens(tx: Any, rows: Sequence[Row]) -> dict[int, int]:
    """Return the number of trainable tokens that each episode sampled itself, by episode id."""
    counts: dict[int, int] = {}
    for some in in_parts([row["id"] for row in rows]):
        query = f"""
            SELECT e.id, CAST(sum(
              s.sampled_tokens - coalesce(json_array_length({asked_column(tx)} -> 'grammar' -> 'guided'), 0)
            ) AS BIGINT) AS tokens
            FROM episodes e
            JOIN steps s ON s.episode_id = e.id AND s.attempt = e.attempt
            WHERE e.id IN ({among(some)}) AND s.number >= coalesce(e.fork_step, 0) AND NOT s.side_call
            AND (s.delivered OR EXISTS (
              SELECT 1 FROM steps n WHERE n.episode_id = s.episode_id AND n.attempt = s.attempt AND n.parent_step = s.number))
            GROUP BY e.id"""
        counts |= {row["id"]: row["tokens"] for row in select_rows(tx, query)}
    return counts


def load_rewards_in(tx: Any, rows: Sequence[Row], reward_set: str) -> dict[int, float | None]:
    """Return the reward of each episode in the reward set, by episode id; None for an episode without a reward.

    In the set `default`, the reward is read from the episode's row.
    """
    if reward_set == "default":
        return {row["id"]: row["reward"] for row in rows}
    earned = load_earned(tx, rows, reward_set)
    return {row["id"]: sum(earned[row["id"]].values()) if row["id"] in earned else None for row in rows}


def load_earned(tx: Any, rows: Sequence[Row], reward_set: str) -> dict[int, dict[int, float]]:
    """Return the weighted rewards in the reward set, as episode id -> step number -> reward.

    The reward of the whole episode has the key WHOLE. For the set `default` this key is left out, because the episode's row has
    that reward.
    """
    sets = _find_sets(tx, {row["run_id"] for row in rows}, reward_set)
    steps_alone = f"AND w.step <> {WHOLE}" if reward_set == "default" else ""
    earned: dict[int, dict[int, float]] = {}
    for some in in_parts([row["id"] for row in rows]):
        query = f"""
            SELECT w.episode_id, w.step, sum(w.value * w.weight) AS earned FROM rewards w
            WHERE w.episode_id IN ({among(some)}) AND w.reward_set_id IN ({among(sets)}) {steps_alone}
            GROUP BY w.episode_id, w.step ORDER BY w.episode_id, w.step"""
        for row in select_rows(tx, query):
            earned.setdefault(row["episode_id"], {})[row["step"]] = row["earned"]
    return earned


def _find_sets(tx: Any, runs: set[int], reward_set: str) -> list[int]:
    query = f"SELECT id FROM reward_sets WHERE run_id IN ({among([*runs])}) AND name = :name"
    return [row["id"] for row in select_rows(tx, query, name=reward_set)]


def load_shapes(tx: Any, members: Sequence[Member]) -> dict[int, Episode] | None:
    """Return each episode's shape without inherited steps, by id. Return None if the episodes have more than MAX_STEPS steps in
    total.
    """
    steps: dict[int, list[Row]] = {member.row["id"]: [] for member in members}
    left = MAX_STEPS
    for some in in_parts([*steps]):
        query = f"""
            SELECT {step_columns(tx)} FROM episodes e JOIN steps s ON s.episode_id = e.id AND s.attempt = e.attempt
            WHERE e.id IN ({among(some)}) ORDER BY s.episode_id, s.number LIMIT {left + 1}"""
        step_rows = select_rows(tx, query)
        left -= len(step_rows)
        if left < 0:
            return None
        for row in step_rows:
            steps[row["episode_id"]].append(row)
    return {member.row["id"]: shape_value(member.row, steps[member.row["id"]]) for member in members}


def load_algorithm(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Return the algorithm's name in a run's config, and the algorithm's options. The name is None if the config has no
    algorithm.
    """
    options = config.get("algorithm")
    return (str(options["name"]), options) if isinstance(options, Mapping) and options.get("name") else (None, {})
