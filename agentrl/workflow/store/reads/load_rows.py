"""The load of hosts: the rows of the last minutes, by the database's clock."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agentrl.workflow.store.driver_reader import Row, select_rows, sql_read_transaction
from agentrl.workflow.tables.views import MachineRow

SLOT_SECONDS = 5
"""The time between two rows of a host, in seconds."""
FRESH_SECONDS = 20
"""The age, in seconds, up to which a host's newest row shows its present load."""
MAX_ROWS = 5000
"""The most rows in an answer, newest first: ten minutes of 41 hosts."""
MAX_HOST_CHARS, MAX_GPUS_CHARS = 64, 10_000
_COLUMNS = ", ".join(
    {
        "host": f"substr(host, 1, {MAX_HOST_CHARS}) AS host",
        "gpus": f"CASE WHEN length(CAST(gpus AS TEXT)) <= {MAX_GPUS_CHARS} THEN gpus END AS gpus",
    }.get(name, name)
    for name in MachineRow.COLUMNS
)
_RUNNING = "(SELECT count(*) FROM runs WHERE status = 'running' AND kind <> 'serve')"


@dataclass(frozen=True, slots=True)
class MachineLoads:
    """The load of hosts over some minutes.

    Args:
        rows: the rows of `v_machine`, oldest first; rows of the same time are ordered by host.
        clock: the database's time when the rows were read.
        running: the number of running runs.
        fresh: True if the newest row is at most FRESH_SECONDS old.
    """

    rows: list[Row]
    clock: datetime
    running: int
    fresh: bool

    def newest(self) -> list[Row]:
        """Return the newest row of each host, ordered by host. Hosts without a row in the last FRESH_SECONDS are left out."""
        oldest = self.clock.timestamp() - FRESH_SECONDS
        newest = {row["host"]: row for row in self.rows if row["created_at"].timestamp() >= oldest}
        return [newest[host] for host in sorted(newest)]


@sql_read_transaction
def load_machines(tx: Any, seconds: float = 600.0) -> MachineLoads:
    """Return the load of the hosts over the last `seconds`."""
    clock, running, newest, now = _state(tx)
    first = now - int(seconds / SLOT_SECONDS)
    query = (
        f"SELECT {_COLUMNS} FROM machine_loads WHERE slot > :first AND slot <= :now ORDER BY slot DESC, host DESC LIMIT :most"
    )
    rows = select_rows(tx, query, first=first, now=now, most=MAX_ROWS)
    return MachineLoads(rows[::-1], clock, running, _is_fresh(newest, now))


@sql_read_transaction
def mark_machines(tx: Any) -> str:
    """Return a text that changes when hosts write rows of a new time slot, when no host has written a row for FRESH_SECONDS,
    and when the first run starts or the last one ends.
    """
    _, running, newest, now = _state(tx)
    return f"{newest}|{running > 0}|{_is_fresh(newest, now)}"


def _state(tx: Any) -> tuple[datetime, int, int, int]:
    """Return the database's time, the number of running runs, the newest slot (0: none), and the present slot."""
    query = f"""
        SELECT CURRENT_TIMESTAMP AS created_at, {_RUNNING} AS running,
               (SELECT coalesce(max(slot), 0) FROM machine_loads) AS newest"""
    (state,) = select_rows(tx, query)
    clock = state["created_at"]
    return clock, state["running"], state["newest"], int(clock.timestamp()) // SLOT_SECONDS


def _is_fresh(newest: int, now: int) -> bool:
    return (now - newest) * SLOT_SECONDS <= FRESH_SECONDS
