"""The rows by which the hosts of an update find each other (table `rank_meetings`). A train worker writes a row, and workers
`ranks` read it.
"""

from dataclasses import dataclass, field

from sqlalchemy import Connection, delete, insert, select

from agentrl.workflow.store.connect import read_transaction, transaction
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import now_ms


@dataclass(frozen=True, slots=True)
class RendezvousRow:
    """Where and for which devices a train worker waits for other hosts.

    Args:
        address: the `host:port` at which the train worker listens.
        devices: `update.devices` of the run, as text.
        numerics: `model.numerics` of the run.
        token: the secret with which a host joins.
    """

    address: str
    devices: str
    numerics: str
    token: str = field(repr=False)


@transaction
def open_rendezvous(tx: Connection, row: RendezvousRow, seconds: float) -> None:
    """Write the row of a rendezvous that lasts for that time. Delete the rows of those that have ended."""
    rows = schema.rank_meetings
    tx.execute(delete(rows).where(rows.c.lease_until < now_ms()))
    values = {"address": row.address, "devices": row.devices, "numerics": row.numerics, "token": row.token}
    tx.execute(insert(rows).values(**values, lease_until=now_ms() + int(seconds * 1000)))


@read_transaction
def list_rendezvous(tx: Connection) -> list[RendezvousRow]:
    """Return the rows that have not ended, the oldest first. All hosts join the oldest, so it is complete first."""
    rows = schema.rank_meetings.c
    query = select(rows.address, rows.devices, rows.numerics, rows.token).where(rows.lease_until >= now_ms()).order_by(rows.id)
    return [RendezvousRow(*row) for row in tx.execute(query)]


@transaction
def close_rendezvous(tx: Connection, token: str) -> None:
    """Delete the row with that token."""
    tx.execute(delete(schema.rank_meetings).where(schema.rank_meetings.c.token == token))
