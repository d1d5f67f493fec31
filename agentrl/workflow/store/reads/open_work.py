"""The open work of running runs: the work that workers hold, the work that waits in queues, and counts for monitoring."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from agentrl.workflow.store.connect import read_transaction
from agentrl.workflow.store.driver_reader import Row, select_rows, sql_read_transaction
from agentrl.workflow.tables.column_values import LOSS_EVENTS, list_in_sql
from agentrl.workflow.tables.columns import now_ms


@dataclass(frozen=True, slots=True)
class OpenWork:
    """A group to roll out, an iteration to train on, or a tool call to run.

    Args:
        queue: rollout, train or tools; `id` is the id of the group, iteration or call.
        worker: the last worker that held the work.
        lease_until: the end of the lease, in ms since 1970 by the database's clock; None if no worker holds the work.
        sends: the number of messages that were sent for this work.
        losses: the number of workers that were lost while holding this work.
    """

    queue: str
    id: int
    run: str
    iteration: int
    status: str
    worker: str
    lease_until: int | None
    sends: int
    losses: int
    started_at: datetime | None


_OPEN = "runs r JOIN iterations i ON i.run_id = r.id AND i.status IN ('planned', 'running')"
_OPEN_GROUPS = f"{_OPEN} JOIN groups g ON g.iteration_id = i.id AND g.status IN ('planned', 'running')"
OPEN_WORK = f"""
    SELECT 'rollout' AS queue, g.id, r.name AS run, i.number + 1 AS iteration, g.status, g.worker, g.lease_until, g.sends,
           g.losses, g.started_at
    FROM {_OPEN_GROUPS} WHERE r.status = 'running'
    UNION ALL
    SELECT 'train', i.id, r.name, i.number + 1, i.status, i.worker, i.lease_until, i.train_sends, i.losses, NULL
    FROM {_OPEN} WHERE r.status = 'running' AND i.train_sends > 0
    UNION ALL
    SELECT 'tools', c.id, r.name, i.number + 1, c.status, c.worker, c.lease_until, c.sends, 0, c.started_at
    FROM {_OPEN_GROUPS} JOIN episodes e ON e.group_id = g.id JOIN tool_calls c ON c.episode_id = e.id AND c.attempt >= e.attempt
    WHERE r.status = 'running' AND c.result IS NULL"""
"""The SQL for all open work, with one row for each group, update and call."""


@sql_read_transaction
def list_open_work(tx: Any, limit: int = 1000) -> list[OpenWork]:
    """Return the open work, claimed or waiting, ordered by run."""
    return [OpenWork(**row) for row in select_rows(tx, f"{OPEN_WORK} ORDER BY 3, 4, 1, 2 LIMIT :limit", limit=limit)]


MAX_RUNS = 100
"""The maximum number of running runs that are counted individually, newest first. Monitoring stores a time series for each of
them.
"""
FAILURES = (*LOSS_EVENTS, "update_failed", "group_failed", "report_failed")
"""The kinds of events that `count_work` counts."""


@dataclass(frozen=True, slots=True)
class WorkCounts:
    """Counts of work, for monitoring.

    Args:
        queues: for each `queue`, the number of rows under a lease (`held`), the number of other rows (`waiting`), and the
            number of messages after the first (`resent`).
        runs: the number `n` of runs with each `status`.
        events: the number `n` of events of each `kind`.
        running: for each running run: its name (`run`), the number of done iterations (`iterations`), tokens, seconds by part,
            and the last `reward`.
        sandbox: the number `n` of calls with each `run`, `sandbox` and `exit_status`, for running runs.
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
_EVENTS = f"SELECT kind, count(*) AS n FROM events WHERE kind IN ({list_in_sql(FAILURES)}) GROUP BY kind"
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


def count_queues(tx: Connection) -> list[Row]:
    """Count the work of each queue. See `WorkCounts.queues`."""
    return select_rows(tx, _QUEUES, now=tx.execute(select(now_ms())).scalar_one())


@read_transaction
def count_work(tx: Connection) -> WorkCounts:
    """Count waiting work, claimed work and lost workers. Leases are compared with the database's clock."""
    others = (select_rows(tx, query) for query in (_RUNS, _EVENTS, _RUNNING, _SANDBOX))
    return WorkCounts(count_queues(tx), *others)
