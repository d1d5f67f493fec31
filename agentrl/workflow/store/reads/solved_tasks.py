"""How often each task was solved in the stored episodes of all runs."""

from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import select_rows, sql_read_transaction
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.store.reads.task_rows import load_rule


@dataclass(frozen=True, slots=True)
class SolvedCount:
    """Done episodes of a task, and how many of them are right."""

    episodes: int = 0
    right: int = 0

    @property
    def share(self) -> float:
        """The share that is right."""
        return self.right / self.episodes


@dataclass(frozen=True, slots=True)
class SampledGroups:
    """Groups of a run: how many have done episodes, and in how many of these all rewards are equal."""

    groups: int
    equal: int


@sql_read_transaction
def load_solved(tx: Any, run: str = "") -> dict[str, SolvedCount]:
    """Return content hash of a task -> its done episodes, of one run or of all; forks, whose prompts were edited, are left out.

    Raises:
        NotFoundError: there is no such run.
    """
    chosen = "AND r.id = :id" if run else ""
    asked = {"id": run_id_and_name(tx, run)["id"]} if run else {}
    query = f"SELECT r.id FROM runs r WHERE r.kind IN ('train', 'eval', 'search') {chosen} ORDER BY r.id"
    found: dict[str, SolvedCount] = {}
    for row in select_rows(tx, query, **asked):
        _add_run(tx, row["id"], found)
    return found


def _add_run(tx: Any, run_id: int, found: dict[str, SolvedCount]) -> None:
    rule = load_rule(tx, run_id)
    parts: dict[int, dict[str, float]] = {}
    query = """
        SELECT w.episode_id, w.part, sum(w.value) AS value FROM rewards w
        JOIN reward_sets s ON s.id = w.reward_set_id AND s.run_id = :id AND s.name = 'default'
        GROUP BY w.episode_id, w.part"""
    for row in select_rows(tx, query, id=run_id):
        parts.setdefault(row["episode_id"], {})[row["part"]] = row["value"]
    query = """
        SELECT e.id, e.reward, t.content_hash FROM episodes e JOIN tasks t ON t.id = e.task_id
        WHERE e.run_id = :id AND e.status = 'done' AND e.reward IS NOT NULL"""
    for row in select_rows(tx, query, id=run_id):
        right = rule.judge(row["reward"], parts.get(row["id"], {}))
        before = found.get(row["content_hash"], SolvedCount())
        found[row["content_hash"]] = SolvedCount(before.episodes + 1, before.right + right)


@sql_read_transaction
def count_equal_groups(tx: Any, run: str) -> SampledGroups:
    """Return how many groups of the run have done episodes, and how many of these have one reward in all of them.

    Raises:
        NotFoundError: there is no such run.
    """
    query = """
        SELECT count(*) AS groups, coalesce(sum(CASE WHEN low = high THEN 1 ELSE 0 END), 0) AS equal FROM
          (SELECT min(reward) AS low, max(reward) AS high FROM episodes
           WHERE run_id = :id AND status = 'done' AND reward IS NOT NULL GROUP BY group_id) ends"""
    (row,) = select_rows(tx, query, id=run_id_and_name(tx, run)["id"])
    return SampledGroups(row["groups"], row["equal"])
