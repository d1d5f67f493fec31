"""The reasons why the rollouts of a run wait. Either a server is unreachable (an event records this), or another run rebuilds a
checkpoint that the run needs.
"""

from sqlalchemy import ColumnElement, Connection, Select, and_, bindparam, func, select

from agentrl.workflow.store.connect import read_transaction, transaction
from agentrl.workflow.store.planning import log
from agentrl.workflow.store.prepared_statements import PreparedStatement
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.column_values import LOSS_EVENTS
from agentrl.workflow.trajectory import storable


def awaits_maker() -> ColumnElement[bool]:
    """Return an SQL condition on `runs`. It selects runs that must wait, because another run rebuilds the checkpoint that they
    need.

    A run that trains never meets the condition, because it rebuilds its checkpoints itself.
    """
    return and_(schema.runs.c.kind != "train", _select_rebuilding_runs().correlate(schema.runs).exists())


def _select_rebuilding_runs() -> Select[tuple[str, str]]:
    """Select the running runs that rebuild a checkpoint of the row of `runs`: name and fault."""
    mine, theirs, maker = schema.policies.alias("mine"), schema.policies.alias("theirs"), schema.runs.alias("maker")
    same = (mine.c.run_id == schema.runs.c.id, theirs.c.path == mine.c.path, theirs.c.broken != "")
    return select(maker.c.name, theirs.c.broken).where(*same, maker.c.id == theirs.c.run_id, maker.c.status == "running")


@transaction
def wait_for(tx: Connection, run_id: int, what: str) -> None:
    """Write an event, once per reason, that the run's rollouts wait for `what`."""
    # Locked: of two jobs that say so at once the second sees the first.
    tx.execute(select(schema.runs.c.id).where(schema.runs.c.id == run_id).with_for_update())
    mine = select(schema.events.c.id).where(schema.events.c.run_id == run_id)
    before = (
        mine.where(schema.events.c.kind.not_in(("waiting", *LOSS_EVENTS)))
        .order_by(schema.events.c.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    same_event = mine.where(schema.events.c.id > func.coalesce(before, 0), schema.events.c.detail == storable(what))
    if tx.execute(same_event.limit(1)).first() is None:
        log(tx, run_id, "waiting", detail=what)


@transaction
def wait_no_more(tx: Connection, run_id: int) -> None:
    """If the rollouts of the run were waiting, write the event `going_on`: they continue."""
    if _find_newest_wait(tx, run_id):
        log(tx, run_id, "going_on")


@read_transaction
def find_wait_reason(tx: Connection, run_id: int) -> str:
    """Return the reason why the run's rollouts wait; empty if they do not wait.

    The reason is another run that rebuilds the run's checkpoint or, without such a run, the detail of the newest `waiting`
    event.
    """
    for name, broken in _REBUILDING_RUN.rows(tx, {"run": run_id}):
        return f"{name} is rebuilding its checkpoint ({broken})."
    return _find_newest_wait(tx, run_id)


def _find_newest_wait(tx: Connection, run_id: int) -> str:
    """Return the detail of the run's newest event if that event is `waiting`; else an empty string."""
    for kind, detail in _NEWEST_EVENT.rows(tx, {"run": run_id}):
        return str(detail) if kind == "waiting" else ""
    return ""


_REBUILDING_RUN = PreparedStatement(
    _select_rebuilding_runs()
    .where(schema.runs.c.id == bindparam("run"), schema.runs.c.status == "running", schema.runs.c.kind != "train")
    .limit(1)
)
_NEWEST_EVENT = PreparedStatement(
    select(schema.events.c.kind, schema.events.c.detail)
    .where(schema.events.c.run_id == bindparam("run"), *(schema.events.c.kind != kind for kind in LOSS_EVENTS))
    .order_by(schema.events.c.id.desc())
    .limit(1)
)
