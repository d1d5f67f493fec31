"""Sessions of tools: the worker that runs an episode's interpreter, and the cells with which the interpreter can be rebuilt.

A session belongs to one attempt of an episode. Its cells are the episode's calls of the session's tool, in order. In a fork,
the cells of the inherited steps come first. The worker that owns the session holds a lease in the session's row. The first
result of a call is stored, even if it comes from a worker that has lost the session.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, exists, select, update

from agentrl.workflow.store.connect import insert, read_transaction, transaction
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import is_lease_free, now_ms
from agentrl.workflow.trajectory import Exit, ToolResult

_SESSIONS, _CALLS, _EPISODES = schema.tool_sessions.c, schema.tool_calls.c, schema.episodes.c


@dataclass(frozen=True, slots=True)
class SessionKey:
    """The key of a session. An attempt of an episode has one session for each tool that keeps state."""

    episode: int
    attempt: int
    tool: str


@dataclass(frozen=True, slots=True)
class Cell:
    """A call in a session. `result` is None if the call has no result yet. `result.exit` is None if the call did not reach the
    session.
    """

    id: int
    step: int
    arguments: Mapping[str, Any]
    result: ToolResult | None


def _matches(key: SessionKey) -> ColumnElement[bool]:
    return (_SESSIONS.episode_id == key.episode) & (_SESSIONS.attempt == key.attempt) & (_SESSIONS.tool == key.tool)


@transaction
def take(tx: Connection, key: SessionKey, owner: str, lease_seconds: float) -> str:
    """Claim the session for `owner`, which then starts the interpreter. If another worker holds a live lease, leave the session
    to that worker.

    Return the name of the worker that holds the session.
    """
    until = now_ms() + int(lease_seconds * 1000)
    acquired = tx.execute(
        insert(tx, schema.tool_sessions)
        .values(episode_id=key.episode, attempt=key.attempt, tool=key.tool, owner=owner, lease_until=until)
        .on_conflict_do_nothing(index_elements=["episode_id", "attempt", "tool"])
        .returning(_SESSIONS.owner)
    ).scalar_one_or_none()
    if acquired:
        return owner
    ours = (_SESSIONS.owner == owner) | is_lease_free(_SESSIONS.lease_until, lease_seconds)
    again = {"owner": owner, "lease_until": until, "builds": _SESSIONS.builds + 1}
    tx.execute(update(schema.tool_sessions).where(_matches(key), ours).values(again))
    return str(tx.execute(select(_SESSIONS.owner).where(_matches(key))).scalar_one())


@transaction
def keep(tx: Connection, owner: str, lease_seconds: float) -> set[SessionKey]:
    """Renew the leases of the owner's sessions, and release the sessions of ended episodes. Return the sessions that the owner
    still holds.
    """
    its = (_EPISODES.id == _SESSIONS.episode_id) & (_EPISODES.attempt == _SESSIONS.attempt)
    goes_on = exists(_EPISODES.id).where(its, _EPISODES.status == "running")
    mine = update(schema.tool_sessions).where(_SESSIONS.owner == owner)
    tx.execute(mine.where(~goes_on).values(owner="", lease_until=None))
    tx.execute(mine.values(lease_until=now_ms() + int(lease_seconds * 1000)))
    held = select(_SESSIONS.episode_id, _SESSIONS.attempt, _SESSIONS.tool).where(_SESSIONS.owner == owner)
    return {SessionKey(*row) for row in tx.execute(held)}


@transaction
def leave(tx: Connection, owner: str) -> None:
    """Release all sessions of an owner that stops. Other workers may claim them at once."""
    tx.execute(update(schema.tool_sessions).where(_SESSIONS.owner == owner).values(owner="", lease_until=None))


@transaction
def taint(tx: Connection, key: SessionKey, what: str) -> None:
    """Mark the episode as tainted, so that it is never trained on. `what` describes how the result of a repeated cell
    differs.
    """
    tx.execute(update(schema.tool_sessions).where(_matches(key)).values(differs=what))
    same = (_EPISODES.id == key.episode) & (_EPISODES.attempt == key.attempt)
    tx.execute(update(schema.episodes).where(same).values(tainted=True))


@read_transaction
def load_cells_until(tx: Connection, key: SessionKey, call: int) -> list[Cell]:
    """Return the cells of the session in order, up to and including the call with the id `call`."""
    position = tx.execute(select(_CALLS.step, _CALLS.call).where(_CALLS.id == call)).one()
    before = (_CALLS.step < position.step) | ((_CALLS.step == position.step) & (_CALLS.call <= position.call))
    return [*_load_inherited_cells(tx, key.episode, key.tool), *_load_cells(tx, key, before)]


def _load_inherited_cells(tx: Connection, episode: int, tool: str) -> list[Cell]:
    parent = schema.episodes.alias()
    line = select(parent.c.id, parent.c.attempt, _EPISODES.inherited_steps).join(parent, parent.c.id == _EPISODES.parent_id)
    row = tx.execute(line.where(_EPISODES.id == episode)).one_or_none()
    if row is None:
        return []
    above = [cell for cell in _load_inherited_cells(tx, row.id, tool) if cell.step < row.inherited_steps]
    return [*above, *_load_cells(tx, SessionKey(row.id, row.attempt, tool), _CALLS.step < row.inherited_steps)]


def _load_cells(tx: Connection, key: SessionKey, among: ColumnElement[bool]) -> Sequence[Cell]:
    rows = tx.execute(
        select(schema.tool_calls)
        .where(_CALLS.episode_id == key.episode, _CALLS.attempt == key.attempt, _CALLS.tool == key.tool)
        .where(_CALLS.kind == "call", among)
        .order_by(_CALLS.step, _CALLS.call)
    )
    return [Cell(row.id, row.step, row.arguments, _cell_result(row)) for row in rows]


def _cell_result(row: Any) -> ToolResult | None:
    if row.result is None:
        return None
    seen = Exit(row.sandbox, row.exit_status, row.exit_code) if row.sandbox else None
    return ToolResult(row.result, row.error_class, row.seconds, row.cpu_seconds, seen)
