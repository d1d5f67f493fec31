"""Changes of a run since an earlier read: a cursor for live views.

`mark_changes` gives the cursor; as `since` of a later filter it leaves the rows that may be new or other than they were then.
It is taken before the lists are read: whatever happens in between is in the next ones. Some rows come again as they were, none
is missed: an iteration that is over changes no more, with its groups and episodes (but for `eval_reward`, which comes later).
"""

from typing import Any, Protocol

from agentrl.workflow.store.driver_reader import select_rows, sql_read_transaction
from agentrl.workflow.store.reads.paging import cursor_error, decode_cursor, encode_cursor, is_id, storable_value
from agentrl.workflow.store.reads.run_rows import run_id_and_name

KIND = "changes"
OF_RUN = "run_id = :run_id"
LATE_EVENTS = 50
"""The newest events come again: on Postgres one may be committed after another of a greater number."""


@sql_read_transaction
def mark_changes(tx: Any, run: str) -> str:
    """Return the cursor of the run as it is now.

    Raises:
        NotFoundError: there is no such run.
    """
    run_id = run_id_and_name(tx, run)["id"]
    query = """
        SELECT coalesce(min(CASE WHEN status IN ('planned', 'running') THEN number END), max(number) + 1, 0) AS first_open
        FROM iterations WHERE run_id = :id"""
    (iterations,) = select_rows(tx, query, id=run_id)
    query = f"SELECT id FROM events WHERE run_id = :id ORDER BY id DESC LIMIT 1 OFFSET {LATE_EVENTS}"
    events = select_rows(tx, query, id=run_id)
    return encode_cursor(KIND, run_id, iterations["first_open"], events[0]["id"] if events else 0)


def since_values(since: str, run_id: int) -> dict[str, int]:
    """Return `first_open`, the number of the iteration with which the changes begin, and `last_event`, after which they do.

    Raises:
        ConfigError: it is not such a cursor, or another run's.
    """
    match decode_cursor(since, KIND):
        case [of, first_open, last_event] if of == run_id and is_id(first_open) and is_id(last_event):
            return {"first_open": first_open, "last_event": last_event}
    raise cursor_error(since)


class OfRun(Protocol):
    """A filter of rows that belong to a run's iterations."""

    @property
    def run(self) -> str:
        """The run's name or number."""

    @property
    def iteration(self) -> int | None:
        """Of that iteration, from 1."""

    @property
    def since(self) -> str | None:
        """The parts that may have changed since a cursor."""


def run_conditions(tx: Any, chosen: OfRun) -> tuple[list[str], dict[str, Any]]:
    """Return the conditions on groups or episodes, and their values: of the run, or of some of its iterations."""
    run_id = run_id_and_name(tx, chosen.run)["id"]
    numbers, values = [], {"run_id": run_id}
    if chosen.iteration is not None:
        numbers.append("number = :iteration - 1")
        values["iteration"] = storable_value(chosen.iteration)
    if chosen.since is not None:
        numbers.append("number >= :first_open")
        values["first_open"] = since_values(chosen.since, run_id)["first_open"]
    if not numbers:
        return [OF_RUN], values
    # Not of the run as well: SQLite would walk through all of it.
    some = " AND ".join([OF_RUN, *numbers])
    return [f"iteration_id IN (SELECT id FROM iterations WHERE {some})"], values
