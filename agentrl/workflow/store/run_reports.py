"""Reports of runs to trackers: which reports are due, and what has been written.

A report is due while its run is running. After the run's end, the report stays due until the tracker has the run's final
status, but for at most one hour. `agentrl report` writes an older report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, func, select, update

from agentrl.workflow.store.connect import insert, read_transaction, transaction
from agentrl.workflow.store.driver_reader import Row, select_rows, sql_read_transaction
from agentrl.workflow.store.planning import log
from agentrl.workflow.store.reads.label_rows import load_tags
from agentrl.workflow.store.run_names import find_run
from agentrl.workflow.tables import schema
from agentrl.workflow.trajectory import storable

DUE_HOURS = 1
"""The time for which a report stays due after its run's end, in hours. If the tracker is unreachable for longer, `agentrl
report` writes the rest.
"""
MAX_EVALS = 1000
_REPORTS = schema.reports.c


@dataclass(frozen=True, slots=True)
class TrackerReport:
    """The report of a run to a tracker: what was last written.

    Args:
        handle: the run's id in the tracker; empty before the run is created there.
        iteration, status: the last iteration and status that were written.
        error: the error of the last write; empty if the write succeeded.
    """

    run_id: int
    tracker: str
    handle: str
    url: str
    samples: int
    iteration: int
    status: str
    error: str


@transaction
def add_reports(tx: Connection, run: str, trackers: Sequence[str], samples: int) -> int:
    """Add trackers to a run; if the run already has a tracker, its report becomes due again. Return the run's id. Raise
    NotFoundError if there is no such run.
    """
    number = int(find_run(tx, run, "id")["id"])
    again = {"samples": samples, "status": "", "error": ""}
    for tracker in dict.fromkeys(trackers):
        row = insert(tx, schema.reports).values(run_id=number, tracker=tracker, samples=samples)
        tx.execute(row.on_conflict_do_update(index_elements=["run_id", "tracker"], set_=again))
    return number


@read_transaction
def list_due_reports(tx: Connection) -> list[TrackerReport]:
    """Return the reports that are due, in the order of their runs, newest run first."""
    runs, recently = schema.runs.c, datetime.now(UTC) - timedelta(hours=DUE_HOURS)
    due = (runs.status == "running") | (
        (_REPORTS.status != runs.status) & (func.coalesce(runs.finished_at, recently) >= recently)
    )
    query = select(schema.reports).join(schema.runs, runs.id == _REPORTS.run_id).where(due)
    return [_report(row) for row in tx.execute(query.order_by(runs.id.desc(), _REPORTS.tracker)).mappings()]


@read_transaction
def list_reports(tx: Connection, run: str) -> list[TrackerReport]:
    """Return the reports of a run. Raise NotFoundError if there is no such run."""
    query = select(schema.reports).where(_REPORTS.run_id == find_run(tx, run, "id")["id"]).order_by(_REPORTS.tracker)
    return [_report(row) for row in tx.execute(query).mappings()]


def _report(row: Mapping[Any, Any]) -> TrackerReport:
    return TrackerReport(**{name: row[name] for name in TrackerReport.__slots__})


@transaction
def record_opened(tx: Connection, report: TrackerReport, handle: str, url: str) -> None:
    """Store the run's id in the tracker and the URL of its page there. If the URL is new, write an event."""
    _change(tx, report, handle=handle, url=url)
    if url != report.url:
        log(tx, report.run_id, "reporting", report.tracker, url)


@transaction
def record_written(tx: Connection, report: TrackerReport, iteration: int, status: str | None = None) -> None:
    """Store the last iteration that was written. If everything was written, also store the run's `status`."""
    _change(tx, report, iteration=iteration, error="", **({} if status is None else {"status": status}))


@transaction
def record_failure(tx: Connection, report: TrackerReport, error: str) -> None:
    """Store the error of a failed write. Only the first failure after a success is also written as an event."""
    before = tx.execute(select(_REPORTS.error).where(*_is(report)).with_for_update()).scalar_one_or_none()
    if before is None:
        return
    _change(tx, report, error=error)
    if not before:
        log(tx, report.run_id, "report_failed", report.tracker, error)


def _is(report: TrackerReport) -> tuple[Any, ...]:
    return _REPORTS.run_id == report.run_id, _REPORTS.tracker == report.tracker


def _change(tx: Connection, report: TrackerReport, **values: Any) -> None:
    values = {name: storable(value) if isinstance(value, str) else value for name, value in values.items()}
    tx.execute(update(schema.reports).where(*_is(report)).values(values))


def lease_name(run_id: int, tracker: str) -> str:
    """Return the name of the report's lease (`leases.take_service_lease`). Only the holder of the lease writes the report."""
    return f"report {run_id} {tracker}"[:64]


@sql_read_transaction
def load_tracked_run(tx: Any, run_id: int) -> Row:
    """Return the `name`, `config`, `manifest` and `tags` of the run with this id."""
    query = "SELECT name, config, manifest FROM runs WHERE id = :id"
    (row,) = select_rows(tx, query, id=run_id)
    return {**row, "tags": load_tags(tx, [run_id]).get(run_id, [])}


@sql_read_transaction
def load_run_status(tx: Any, run_id: int) -> str:
    """Return the status of the run with this id."""
    return str(select_rows(tx, "SELECT status FROM runs WHERE id = :id", id=run_id)[0]["status"])


@sql_read_transaction
def load_own_evals(tx: Any, run_id: int, after: int) -> list[Row]:
    """Return the evaluations that the run planned itself, for policy versions above `after`, ordered by version, with `status`
    and results.

    The results are None if the evaluation is not done.
    """
    query = """
        SELECT m.measures_version AS version, m.status, m.finished_at, v.mean_reward, v.low, v.high, v.accuracy, v.pass_at,
               v.episodes, v.errors
        FROM runs m LEFT JOIN evals v ON v.run_id = m.id
        WHERE m.measures_id = :id AND m.measures_version > :after ORDER BY m.measures_version LIMIT :limit"""
    return select_rows(tx, query, id=run_id, after=after, limit=MAX_EVALS)
