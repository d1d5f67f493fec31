"""Meetings: rows by which the hosts of an update find each other. A train worker writes one, and workers `ranks` read it."""

from dataclasses import dataclass, field

from sqlalchemy import Connection, delete, insert, select

from agentrl.workflow.store.connect import read_transaction, transaction
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import now_ms


@dataclass(frozen=True, slots=True)
class RankMeeting:
    """A meeting at which a train worker waits for other hosts.

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
def open_meeting(tx: Connection, meeting: RankMeeting, seconds: float) -> None:
    """Write the row of a meeting that lasts for that time. Delete the rows of meetings that have ended."""
    rows = schema.rank_meetings
    tx.execute(delete(rows).where(rows.c.lease_until < now_ms()))
    values = {"address": meeting.address, "devices": meeting.devices, "numerics": meeting.numerics, "token": meeting.token}
    tx.execute(insert(rows).values(**values, lease_until=now_ms() + int(seconds * 1000)))


@read_transaction
def list_meetings(tx: Connection) -> list[RankMeeting]:
    """Return the meetings that have not ended, the oldest first. All hosts join the oldest, so it is complete first."""
    rows = schema.rank_meetings.c
    query = select(rows.address, rows.devices, rows.numerics, rows.token).where(rows.lease_until >= now_ms()).order_by(rows.id)
    return [RankMeeting(*row) for row in tx.execute(query)]


@transaction
def close_meeting(tx: Connection, token: str) -> None:
    """Delete the row of the meeting with that token."""
    tx.execute(delete(schema.rank_meetings).where(schema.rank_meetings.c.token == token))
