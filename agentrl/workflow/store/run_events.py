"""The events about which users are notified: a run has ended, or a run waits."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, func, select

from agentrl.workflow.store.connect import insert, transaction
from agentrl.workflow.tables import schema

RUN_ENDS = ("done", "failed", "cancelled")
WAITING = ("waiting", "paused")
LAST_SENT = "last notified event"
"""The name of a row in `service_leases`. The row's holder is the id of the last event that was sent."""
MAX_EVENTS = 100


@transaction
def list_unsent_events(tx: Connection) -> list[Mapping[str, Any]]:
    """Return the events that have not been sent as notifications yet, oldest first.

    Each event has `id`, `event` (run_end or waiting), the `run` and its `kind`, `status`, `detail` and `at`. Events
    from before the first call in a database are never sent, so the first call returns an empty list. Events of evaluations
    that a run planned itself are left out.
    """
    events, runs, leases = schema.events.c, schema.runs.c, schema.service_leases.c
    newest = tx.execute(select(func.coalesce(func.max(events.id), 0))).scalar_one()
    statement = insert(tx, schema.service_leases).values(name=LAST_SENT, holder=str(newest), lease_until=0)
    tx.execute(statement.on_conflict_do_nothing(index_elements=["name"]))
    last = int(tx.execute(select(leases.holder).where(leases.name == LAST_SENT)).scalar_one())
    query = (
        select(events.id, runs.name, runs.kind, events.kind.label("status"), events.detail, events.created_at)
        .join(schema.runs, runs.id == events.run_id)
        .where(events.id > last, events.kind.in_((*RUN_ENDS, *WAITING)), runs.measures_id.is_(None))
        .order_by(events.id)
        .limit(MAX_EVENTS)
    )
    return [
        {
            "id": row.id,
            "event": "run_end" if row.status in RUN_ENDS else "waiting",
            "run": row.name,
            "kind": row.kind,
            "status": row.status,
            "detail": row.detail,
            "at": row.created_at.isoformat(),
        }
        for row in tx.execute(query)
    ]


@transaction
def mark_sent(tx: Connection, event: int) -> None:
    """Record that all events up to the one with this id were sent."""
    values = {"holder": str(event)}
    tx.execute(schema.service_leases.update().where(schema.service_leases.c.name == LAST_SENT).values(values))
