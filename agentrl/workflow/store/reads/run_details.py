"""Details of a run that are not in its row: its summary for a list, its config, its manifest, and which kinds of rows it
has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from agentrl.workflow.store.driver_reader import Row, among, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.eval_results import MEASURED
from agentrl.workflow.store.reads.label_rows import load_tags
from agentrl.workflow.store.reads.run_rows import run_name
from agentrl.workflow.tables.column_values import LOSS_EVENTS, list_in_sql
from agentrl.workflow.tables.views import RunRow

PARTS_FROM = 1000
"""The number of a run's newest reward rows that are searched for the names of reward parts."""


@dataclass(frozen=True, slots=True)
class StoredConfig:
    """The stored config of a run. `origins` has the source of each value that was set (such as a command-line flag), by the
    value's dotted key; None if the sources were not stored.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str] | None


@sql_read_transaction
def find_config(tx: Any, run_id: int) -> StoredConfig:
    """Return the stored config of the run with this id. Raise NotFoundError if there is no such run."""
    run_name(tx, run_id)
    (row,) = select_rows(tx, "SELECT config, manifest FROM runs WHERE id = :id", id=run_id)
    return StoredConfig(row["config"], row["manifest"].get("origins"))


def load_manifest(tx: Any, run_id: int) -> dict[str, Any]:
    """Return the run's manifest, reward sets, output folder, first policy and newest policy. Call this inside a transaction."""
    query = "SELECT manifest, base, base_hash, output_dir, seed, format, reward_set FROM runs WHERE id = :id"
    (run,) = select_rows(tx, query, id=run_id)
    query = "SELECT name, code_hash, weights FROM reward_sets WHERE run_id = :id ORDER BY id"
    rewards = select_rows(tx, query, id=run_id)
    query = "SELECT version, kind, path, sha256, collected_at, broken FROM policies WHERE run_id = :id ORDER BY version"
    first = select_rows(tx, f"{query} LIMIT 1", id=run_id)
    newest = select_rows(tx, f"{query} DESC LIMIT 1", id=run_id)
    columns = {name: run[name] for name in ("base", "base_hash", "output_dir", "seed", "format", "reward_set")}
    policies = {"first": first[0] if first else None, "newest": newest[0] if newest else None}
    manifest = {name: value for name, value in run["manifest"].items() if name != "origins"}  # they stand beside the config
    return {**manifest, **columns, "reward_sets": [dict(row) for row in rewards], "policies": policies}


def find_what_it_has(tx: Any, run_id: int, name: str) -> dict[str, bool]:
    """Return, for some kinds of rows (such as annotations), whether the run has any. Call this inside a transaction."""
    queries = {
        "annotations": "SELECT 1 AS one FROM annotations WHERE run = :name LIMIT 1",
        "prompts": "SELECT 1 AS one FROM resources WHERE run_id = :id LIMIT 1",
        "critic_calls": "SELECT 1 AS one FROM critic_calls WHERE run_id = :id LIMIT 1",
        "agents": "SELECT 1 AS one FROM agent_attempts WHERE run = :name LIMIT 1",
        "evals": f"SELECT 1 AS one FROM ({MEASURED}) measured LIMIT 1",
    }
    values = {"id": run_id, "name": name}
    return {what: bool(select_rows(tx, query, **_used(query, values))) for what, query in queries.items()}


def _used(query: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if f":{key}" in query}


def list_reward_parts(tx: Any, run_id: int, name: str) -> list[str]:
    """Return the sorted names of the run's reward parts: parts that have a weight, and parts of the newest PARTS_FROM reward
    rows.

    Call this inside a transaction.
    """
    sets = select_rows(tx, "SELECT weights FROM reward_sets WHERE run_id = :id", id=run_id)
    query = f"SELECT DISTINCT part FROM (SELECT part FROM rewards WHERE run = :name ORDER BY id DESC LIMIT {PARTS_FROM}) newest"
    newest_parts = [row["part"] for row in select_rows(tx, query, name=name)]
    return sorted({*newest_parts, *(part for reward_set in sets for part in reward_set["weights"])})


SPARK_POINTS = 60
LEARNING_KINDS = ("train", "search")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The values that a list of runs shows, but that are not in the run's row.

    Args:
        algorithm: the algorithm's name; None if the run does not learn.
        spark: the points of the run's sparkline: [iteration, mean reward] of at most SPARK_POINTS iterations and of the newest
            iteration.
        tokens: the number of tokens that were read and sampled in the finished iterations; None if it is zero or unknown.
        waits_for: what the run's rollouts wait for; empty if no reason to wait is recorded.
        active_at: the time of the newest write for this run.
        measured: `run_id`, `version` and `reward` of the newest evaluation of the run's policies that a person started; None if
            there is none.
    """

    algorithm: str | None
    tags: Sequence[str]
    spark: Sequence[Sequence[float]]
    tokens: int | None
    waits_for: str
    active_at: datetime | None
    measured: Mapping[str, Any] | None

    def shown(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def load_summaries(tx: Any, runs: Sequence[RunRow]) -> dict[int, RunSummary]:
    """Return the summary of each run, by run id. Call this inside a transaction."""
    if not runs:
        return {}
    ids = [run.id for run in runs]
    algorithms, tags, sparks, sums = load_algorithms(tx, ids), load_tags(tx, ids), _sparks(tx, ids), _sums(tx, ids)
    running = [run for run in runs if run.status == "running"]
    waits, steps, events = _waits(tx, running), _newest_steps(tx, running), _newest_events(tx, ids)
    measured = _measured_by_hand(tx, ids)
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
            measured=measured.get(run.id),
        )
        for run in runs
    }


def _newest(*moments: datetime | None) -> datetime | None:
    return max((moment for moment in moments if moment is not None), default=None)


def load_algorithms(tx: Any, ids: Sequence[int]) -> dict[int, str | None]:
    """Return the algorithm's name in the config of each run, by run id. Call this inside a transaction."""
    query = f"SELECT id, config FROM runs WHERE id IN ({among(ids)})"
    return {row["id"]: (row["config"].get("algorithm") or {}).get("name") for row in select_rows(tx, query)}


def _sparks(tx: Any, ids: Sequence[int]) -> dict[int, list[list[float]]]:
    """Return the points of each run's sparkline, by run id: every Nth iteration and the newest, if they have a reward."""
    query = f"""
        SELECT i.run_id, i.number + 1 AS iteration, i.mean_reward FROM
          (SELECT run_id, max(number) AS newest, max(number) / {SPARK_POINTS} + 1 AS stride FROM iterations
           WHERE run_id IN ({among(ids)}) AND status = 'done' GROUP BY run_id) s
        JOIN iterations i ON i.run_id = s.run_id AND (i.number % s.stride = 0 OR i.number = s.newest)
        WHERE i.mean_reward IS NOT NULL ORDER BY i.run_id, i.number"""
    points: dict[int, list[list[float]]] = {}
    for row in select_rows(tx, query):
        points.setdefault(row["run_id"], []).append([row["iteration"], row["mean_reward"]])
    return points


def _measured_by_hand(tx: Any, ids: Sequence[int]) -> dict[int, Mapping[str, Any]]:
    query = f"""
        SELECT mine.run_id AS of_run, m.id AS run_id, min(mine.version) AS version, v.mean_reward AS reward
        FROM runs m CROSS JOIN evals v CROSS JOIN policies theirs CROSS JOIN policies mine
        WHERE m.kind = 'eval' AND m.measures_id IS NULL AND v.run_id = m.id AND v.mean_reward IS NOT NULL
          AND theirs.run_id = m.id AND theirs.path <> '' AND mine.path = theirs.path AND mine.run_id IN ({among(ids)})
        GROUP BY mine.run_id, m.id, v.mean_reward ORDER BY m.id"""
    return {row["of_run"]: {name: row[name] for name in ("run_id", "version", "reward")} for row in select_rows(tx, query)}


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
    rows_by_run = ((run.id, select_rows(tx, query, run=run.run)) for run in running)
    return {run: rows[0]["sampled_at"] for run, rows in rows_by_run if rows}


def _waits(tx: Any, running: Sequence[RunRow]) -> dict[int, str]:
    if not running:
        return {}
    ids = among(run.id for run in running)
    query = f"""
        SELECT run_id, detail FROM events WHERE kind = 'waiting' AND id IN
          (SELECT max(id) FROM events WHERE run_id IN ({ids}) AND kind NOT IN ({list_in_sql(LOSS_EVENTS)}) GROUP BY run_id)"""
    waiting = {row["run_id"]: str(row["detail"]) for row in select_rows(tx, query)}
    making = f"""
        SELECT r.id AS run_id, m.name, t.broken FROM runs r JOIN policies p ON p.run_id = r.id AND p.path <> ''
        JOIN policies t ON t.path = p.path AND t.broken <> '' JOIN runs m ON m.id = t.run_id AND m.status = 'running'
        WHERE r.id IN ({ids}) AND r.kind <> 'train'"""
    rebuilding = {
        row["run_id"]: f"{row['name']} is rebuilding its checkpoint ({row['broken']})." for row in select_rows(tx, making)
    }
    return waiting | rebuilding
