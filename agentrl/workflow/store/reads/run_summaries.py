"""Summaries for a list of runs: algorithm, tags, a sparkline of the reward, tokens, and why a run waits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from agentrl.workflow.store.driver_reader import Row, among, select_rows
from agentrl.workflow.store.leases import LOSS_EVENTS
from agentrl.workflow.store.reads.label_rows import load_tags
from agentrl.workflow.tables.views import RunRow

SPARK_POINTS = 60
"""The most points of a sparkline."""
LEARNING_KINDS = ("train", "search")
"""The kinds of runs that have an algorithm."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run's entry in a list, besides its row.

    Args:
        algorithm: None: it learns nothing.
        spark: [iteration, mean reward] of at most SPARK_POINTS iterations and the newest one.
        tokens: tokens read and sampled in its finished iterations; None: they are not counted, or there are none.
        waits_for: what its rollouts wait for; empty: nothing is known to keep them.
        active_at: when something was last written of it.
    """

    algorithm: str | None
    tags: Sequence[str]
    spark: Sequence[Sequence[float]]
    tokens: int | None
    waits_for: str
    active_at: datetime | None

    def shown(self) -> dict[str, Any]:
        """Return its fields by their names."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def load_summaries(tx: Any, runs: Sequence[RunRow]) -> dict[int, RunSummary]:
    """Return the summary of each run by its number, inside a transaction."""
    if not runs:
        return {}
    ids = [run.id for run in runs]
    algorithms, tags, sparks, sums = _algorithms(tx, ids), load_tags(tx, ids), _sparks(tx, ids), _sums(tx, ids)
    running = [run for run in runs if run.status == "running"]
    waits, steps, events = _waits(tx, running), _newest_steps(tx, running), _newest_events(tx, ids)
    return {
        run.id: RunSummary(
            algorithm=algorithms.get(run.id) if run.kind in LEARNING_KINDS else None,
            tags=tags.get(run.id, ()),
            spark=sparks.get(run.id, ()),
            tokens=(sums[run.id]["tokens"] or None) if run.id in sums else None,
            waits_for=waits.get(run.id, ""),
            active_at=_newest(
                *(run.created_at, run.started_at, run.finished_at, events.get(run.id), steps.get(run.id)),
                sums[run.id]["finished_at"] if run.id in sums else None,
            ),
        )
        for run in runs
    }


def _newest(*moments: datetime | None) -> datetime | None:
    return max((moment for moment in moments if moment is not None), default=None)


def _algorithms(tx: Any, ids: Sequence[int]) -> dict[int, str | None]:
    query = f"SELECT id, config FROM runs WHERE id IN ({among(ids)})"
    return {row["id"]: (row["config"].get("algorithm") or {}).get("name") for row in select_rows(tx, query)}


def _sparks(tx: Any, ids: Sequence[int]) -> dict[int, list[list[float]]]:
    """Every Nth iteration that has a reward, and the newest."""
    query = f"""
        SELECT i.run_id, i.number + 1 AS iteration, i.mean_reward FROM
          (SELECT run_id, max(number) AS newest, max(number) / {SPARK_POINTS} + 1 AS stride FROM iterations
           WHERE run_id IN ({among(ids)}) AND status = 'done' GROUP BY run_id) s
        JOIN iterations i ON i.run_id = s.run_id AND (i.number % s.stride = 0 OR i.number = s.newest)
        WHERE i.mean_reward IS NOT NULL ORDER BY i.run_id, i.number"""
    found: dict[int, list[list[float]]] = {}
    for row in select_rows(tx, query):
        found.setdefault(row["run_id"], []).append([row["iteration"], row["mean_reward"]])
    return found


def _sums(tx: Any, ids: Sequence[int]) -> dict[int, Row]:
    query = f"""
        SELECT run_id, CAST(coalesce(sum(prompt_tokens + sampled_tokens), 0) AS BIGINT) AS tokens,
               max(finished_at) AS finished_at
        FROM iterations WHERE run_id IN ({among(ids)}) GROUP BY run_id"""
    return {row["run_id"]: row for row in select_rows(tx, query)}


def _newest_events(tx: Any, ids: Sequence[int]) -> dict[int, datetime]:
    query = f"""
        SELECT run_id, created_at FROM events WHERE id IN
          (SELECT max(id) FROM events WHERE run_id IN ({among(ids)}) GROUP BY run_id)"""
    return {row["run_id"]: row["created_at"] for row in select_rows(tx, query)}


def _newest_steps(tx: Any, running: Sequence[RunRow]) -> Mapping[int, datetime]:
    query = "SELECT sampled_at FROM steps WHERE run = :run ORDER BY id DESC LIMIT 1"
    found = ((run.id, select_rows(tx, query, run=run.run)) for run in running)
    return {run: rows[0]["sampled_at"] for run, rows in found if rows}


def _waits(tx: Any, running: Sequence[RunRow]) -> dict[int, str]:
    """What a worker said last; or that a running run makes the checkpoint again that the run samples with."""
    if not running:
        return {}
    ids, losses = among(run.id for run in running), ", ".join(f"'{kind}'" for kind in LOSS_EVENTS)
    said = f"""
        SELECT run_id, detail FROM events WHERE kind = 'waiting' AND id IN
          (SELECT max(id) FROM events WHERE run_id IN ({ids}) AND kind NOT IN ({losses}) GROUP BY run_id)"""
    found = {row["run_id"]: str(row["detail"]) for row in select_rows(tx, said)}
    making = f"""
        SELECT r.id AS run_id, m.name, t.broken FROM runs r JOIN policies p ON p.run_id = r.id AND p.path <> ''
        JOIN policies t ON t.path = p.path AND t.broken <> '' JOIN runs m ON m.id = t.run_id AND m.status = 'running'
        WHERE r.id IN ({ids}) AND r.kind <> 'train'"""
    made = {row["run_id"]: f"{row['name']} is rebuilding its checkpoint ({row['broken']})." for row in select_rows(tx, making)}
    return found | made
