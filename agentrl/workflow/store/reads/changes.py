"""Changes of a run, for live views. A cursor selects the rows that changed after an earlier read. A stamp is a text that
changes with every relevant commit.

`mark_changes` returns the cursor. A later filter that has this cursor as `since` selects only rows that may be new or changed.
Call `mark_changes` before reading the lists. The read after that then includes all changes that happen meanwhile. Some
unchanged rows may be returned again, but no change is missed. When an iteration has ended, its row, its groups and its episodes
no longer change. The only exception is the iteration's `eval_reward`, which is written later.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.workflow.store.driver_reader import select_rows, sql_read_transaction
from agentrl.workflow.store.reads.eval_results import count_evals
from agentrl.workflow.store.reads.paging import cursor_error, decode_cursor, encode_cursor, is_id, storable_value
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.store.row_codecs import MAX_ID

KIND = "changes"
OF_RUN = "run_id = :run_id"
LATE_EVENTS = 50
"""The number of newest events that a cursor returns again. On Postgres, an event may be committed later than an event with a
greater id, and would otherwise be missed.
"""


@sql_read_transaction
def mark_changes(tx: Any, run: str) -> str:
    """Return a cursor for the run's current state. Raise NotFoundError if there is no such run."""
    run_id = run_id_and_name(tx, run)["id"]
    query = """
        SELECT coalesce(min(CASE WHEN status IN ('planned', 'running') THEN number END), max(number) + 1, 0) AS first_open
        FROM iterations WHERE run_id = :id"""
    (iterations,) = select_rows(tx, query, id=run_id)
    query = f"SELECT id FROM events WHERE run_id = :id ORDER BY id DESC LIMIT 1 OFFSET {LATE_EVENTS}"
    events = select_rows(tx, query, id=run_id)
    return encode_cursor(KIND, run_id, iterations["first_open"], events[0]["id"] if events else 0)


def since_values(since: str, run_id: int) -> dict[str, int]:
    """Return the two parts of a cursor.

    `first_open` is the number, counted from 0, of the first iteration that may have changed. `last_event` is an event's id;
    only events with a greater id are returned. Raise ConfigError if the cursor is invalid or belongs to another run.
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
        """The iteration's number, counted from 1; None for all iterations."""

    @property
    def since(self) -> str | None:
        """A cursor of `mark_changes`, to select only rows that may have changed since that call; None for all rows."""


def run_conditions(tx: Any, chosen: OfRun) -> tuple[list[str], dict[str, Any]]:
    """Return SQL conditions that apply the filter to groups or episodes, and the values of the conditions' parameters."""
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


NEWEST = 50
"""The number of newest runs that the stamp of the list of runs covers."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run, for a client that watches the run.

    Args:
        stamp: a text that changes with each commit of an iteration, an event, an evaluation or a new status.
        work: a text that changes with each turn, call and episode of the open iterations.
        closed: the number of iterations that have ended. The groups and episodes of these iterations have ended too.
    """

    stamp: str
    work: str
    closed: int


@sql_read_transaction
def find_state(tx: Any, run_id: int) -> RunState | None:
    """Return the state of the run; None if the run does not exist."""
    query = "SELECT status, reason, iterations FROM runs WHERE id = :id"
    runs = select_rows(tx, query, id=run_id) if abs(run_id) <= MAX_ID else []
    if not runs:
        return None
    events = select_rows(tx, "SELECT id FROM events WHERE run_id = :id ORDER BY id DESC LIMIT 1", id=run_id)
    first = """
        SELECT coalesce(min(CASE WHEN status IN ('planned', 'running') THEN number END), max(number) + 1, 0) AS closed,
               count(*) AS iterations, count(*) FILTER (WHERE status = 'done') AS done
        FROM iterations WHERE run_id = :id"""
    (iterations,) = select_rows(tx, first, id=run_id)
    work = """
        SELECT count(*) AS episodes, count(*) FILTER (WHERE e.status NOT IN ('planned', 'running')) AS finished,
               CAST(coalesce(sum(e.steps), 0) AS BIGINT) AS steps, CAST(coalesce(sum(e.tool_calls), 0) AS BIGINT) AS calls
        FROM iterations i JOIN episodes e ON e.iteration_id = i.id
        WHERE i.run_id = :id AND i.number >= :closed AND i.status IN ('planned', 'running')"""
    (open_work,) = select_rows(tx, work, id=run_id, closed=iterations["closed"])
    newest = events[0]["id"] if events else 0
    parts = (*runs[0].values(), newest, *iterations.values(), count_evals(tx, run_id))
    return RunState("|".join(map(str, parts)), "|".join(map(str, open_work.values())), iterations["closed"])


@sql_read_transaction
def find_list_stamp(tx: Any) -> str:
    """Return a text that changes if the status or the number of done iterations of one of the NEWEST runs changes."""
    query = """
        SELECT r.id, r.status, CASE WHEN r.status = 'running' THEN
          (SELECT count(*) FROM iterations i WHERE i.run_id = r.id AND i.status = 'done') END AS done
        FROM (SELECT id, status FROM runs WHERE measures_id IS NULL ORDER BY id DESC LIMIT :newest) r"""
    rows = select_rows(tx, query, newest=NEWEST)
    return "|".join(f"{row['id']},{row['status']},{row['done']}" for row in rows)
