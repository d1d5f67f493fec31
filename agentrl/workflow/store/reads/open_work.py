"""Open work of the running runs: claims that workers hold, and work that waits in queues."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agentrl.workflow.store.driver_reader import select_rows, sql_read_transaction


@dataclass(frozen=True, slots=True)
class OpenWork:
    """A group to roll out, an iteration to train on, or a tool call to answer.

    Args:
        queue: rollout, train or tools; `id` is that of the group, iteration or call.
        worker: the last worker that had it.
        lease_until: the end of its lease, in ms since 1970 by the database's clock; None: it waits.
        sends: the number of messages sent for it.
        losses: the number of workers lost with it.
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
"""SQL of all open work, a row for each group, update and call."""


@sql_read_transaction
def list_open_work(tx: Any, limit: int = 1000) -> list[OpenWork]:
    """Return the open work, claimed or waiting, run by run."""
    return [OpenWork(**row) for row in select_rows(tx, f"{OPEN_WORK} ORDER BY 3, 4, 1, 2 LIMIT :limit", limit=limit)]
