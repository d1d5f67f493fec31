"""Counts of open work, runs and losses, for monitoring: few rows, for any size of the store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select, text

from agentrl.workflow.store.connect import read_transaction
from agentrl.workflow.store.leases import LOSS_EVENTS
from agentrl.workflow.store.reads.open_work import OPEN_WORK
from agentrl.workflow.tables.columns import now_ms

Row = Mapping[str, Any]
MAX_RUNS = 100
"""The newest running runs that are counted one by one: monitoring keeps a series for each."""
FAILURES = (*LOSS_EVENTS, "update_failed", "group_failed", "report_failed")
"""Kinds of events that are counted."""


@dataclass(frozen=True, slots=True)
class WorkCounts:
    """Counts of work.

    Args:
        queues: `queue`, `held` (by a lease), `waiting`, and `resent`: messages beyond the first.
        runs: `status` and `n`.
        events: `kind` and `n`.
        running: a row for each running run: `run`, `iterations` (done), tokens, seconds by part, and the last `reward`.
        sandbox: `run`, `sandbox`, `exit_status` and `n` of calls of running runs.
    """

    queues: Sequence[Row]
    runs: Sequence[Row]
    events: Sequence[Row]
    running: Sequence[Row]
    sandbox: Sequence[Row]


_QUEUES = f"""
    SELECT queue, count(*) FILTER (WHERE coalesce(lease_until, 0) >= :now) AS held,
           count(*) FILTER (WHERE coalesce(lease_until, 0) < :now) AS waiting,
           sum(CASE WHEN sends > 1 THEN sends - 1 ELSE 0 END) AS resent
    FROM ({OPEN_WORK}) work GROUP BY queue"""
_RUNS = "SELECT status, count(*) AS n FROM runs GROUP BY status"
_EVENTS = f"SELECT kind, count(*) AS n FROM events WHERE kind IN ({', '.join(map(repr, FAILURES))}) GROUP BY kind"
_COUNTED = f"(SELECT id, name FROM runs WHERE status = 'running' ORDER BY id DESC LIMIT {MAX_RUNS}) r"
_RUNNING = f"""
    SELECT r.name AS run,
           (SELECT count(*) FROM iterations i WHERE i.run_id = r.id AND i.status = 'done') AS iterations,
           (SELECT i.mean_reward FROM iterations i WHERE i.run_id = r.id AND i.status = 'done' ORDER BY i.number DESC LIMIT 1)
             AS reward,
           (SELECT sum(i.update_seconds) FROM iterations i WHERE i.run_id = r.id) AS update_seconds,
           sum(e.prompt_tokens) AS prompt_tokens, sum(e.sampled_tokens) AS sampled_tokens,
           sum(e.generate_seconds) AS generate_seconds, sum(e.tool_seconds) AS tool_seconds
    FROM {_COUNTED} LEFT JOIN episodes e ON e.run_id = r.id GROUP BY r.id, r.name"""
_SANDBOX = f"""
    SELECT r.name AS run, c.sandbox, c.exit_status, count(*) AS n FROM {_COUNTED} JOIN tool_calls c ON c.run = r.name
    WHERE c.sandbox IS NOT NULL GROUP BY r.name, c.sandbox, c.exit_status"""


@read_transaction
def count_work(tx: Connection) -> WorkCounts:
    """Count waiting work, claimed work and lost workers; leases are compared with the database's clock."""
    now = tx.execute(select(now_ms())).scalar_one()

    def rows(query: str, **values: Any) -> list[Row]:
        return [dict(row) for row in tx.execute(text(query), values).mappings()]

    return WorkCounts(rows(_QUEUES, now=now), rows(_RUNS), rows(_EVENTS), rows(_RUNNING), rows(_SANDBOX))
