"""State for a live view: a few numbers that change with every commit that the view shows."""

from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import select_rows, sql_read_transaction
from agentrl.workflow.store.reads.eval_results import count_evals
from agentrl.workflow.store.row_codecs import MAX_ID

NEWEST = 50
"""Runs of a list that is looked at."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run that is looked at.

    Args:
        stamp: another one after each commit of an iteration, an event, an evaluation, another status.
        work: another one after each turn, call and episode of the open iterations.
        closed: how many iterations are over, with their groups and episodes.
    """

    stamp: str
    work: str
    closed: int


@sql_read_transaction
def find_state(tx: Any, run_id: int) -> RunState | None:
    """Return the state of the run; None if it does not exist."""
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
    """Return what moves whenever one of the newest runs does."""
    query = """
        SELECT r.id, r.status, CASE WHEN r.status = 'running' THEN
          (SELECT count(*) FROM iterations i WHERE i.run_id = r.id AND i.status = 'done') END AS done
        FROM (SELECT id, status FROM runs WHERE measures_id IS NULL ORDER BY id DESC LIMIT :newest) r"""
    rows = select_rows(tx, query, newest=NEWEST)
    return "|".join(f"{row['id']},{row['status']},{row['done']}" for row in rows)
