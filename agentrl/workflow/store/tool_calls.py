"""Tool calls. Each call takes effect once and has one result, even if its message is delivered several times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import Connection, bindparam, case, func, select, update

from agentrl.workflow.store.connect import read_transaction, transaction
from agentrl.workflow.store.episode_annotations import annotation_rows
from agentrl.workflow.store.prepared_statements import PreparedStatement
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.columns import Utc, is_lease_free, now_ms
from agentrl.workflow.trajectory import ToolResult, storable

UNKNOWN_OUTCOME = ToolResult(
    "The worker was lost while this call ran; it may or may not have taken effect, and is not run again.", "unknown_outcome"
)


@dataclass(frozen=True, slots=True)
class CallWork:
    """The data of a call that a tools worker needs. `kind` is `grade` for a call to a judge, else `call`."""

    id: int
    env: str
    tool: str
    arguments: Mapping[str, Any]
    effects: str
    run: int = 0
    kind: str = "call"
    episode: int = 0
    attempt: int = 0


_CALLS, _EPISODES = schema.tool_calls.c, schema.episodes.c
_CALL = PreparedStatement(
    select(_CALLS.id, schema.runs.c.config["env"].as_string(), _CALLS.tool, _CALLS.arguments, _CALLS.effects, schema.runs.c.id)
    .add_columns(_CALLS.kind, _CALLS.episode_id, _CALLS.attempt)
    .join(schema.episodes, (_EPISODES.id == _CALLS.episode_id) & (_EPISODES.attempt == _CALLS.attempt))
    .join(schema.runs, schema.runs.c.id == _EPISODES.run_id)
    .where(_CALLS.id == bindparam("wanted"), _CALLS.result.is_(None), _EPISODES.status == "running")
    .where(_CALLS.kind != "agent")
)


@read_transaction
def find_call(tx: Connection, call: int) -> CallWork | None:
    """Return the call. Return None if the call has a result, its episode is not running, or an external agent runs the call."""
    rows = _CALL.rows(tx, {"wanted": call})
    return CallWork(*rows[0]) if rows else None


@read_transaction
def load_config(tx: Connection, run: int) -> Mapping[str, Any]:
    """Return the config of the run with this id."""
    config: Mapping[str, Any] = tx.execute(select(schema.runs.c.config).where(schema.runs.c.id == run)).scalar_one()
    return config


@transaction
def start_once(tx: Connection, call: int, worker: str, seconds: float) -> Literal["ours", "running", "lost"]:
    """Commit the start of a call that must not run twice.

    Return `ours` if this attempt may run the call, `running` if another attempt may still be running it, and `lost` if the time
    limit of the other attempt has passed. `worker` is a name that is unique to this attempt. `seconds` is the longest time that
    the call may take, in seconds.
    """
    calls = schema.tool_calls
    started = tx.execute(
        update(calls)
        .where(calls.c.id == call, calls.c.status == "pending")
        .values(
            status="started",
            worker=worker,
            starts=calls.c.starts + 1,
            lease_until=now_ms() + int(seconds * 1000),
            started_at=datetime.now(UTC),
        )
    )
    mine = select(calls.c.id).where(calls.c.id == call, calls.c.worker == worker)
    if started.rowcount or tx.execute(mine).first():
        return "ours"
    lost = select(calls.c.id).where(calls.c.id == call, is_lease_free(calls.c.lease_until, seconds))
    return "lost" if tx.execute(lost).first() else "running"


@transaction
def count_sending(tx: Connection, sent: Sequence[int]) -> None:
    """Add one to the number of messages of each of these calls that has no result."""
    again = update(schema.tool_calls).where(_CALLS.id.in_(sent), _CALLS.result.is_(None))
    tx.execute(again.values(sends=_CALLS.sends + 1))


@transaction
def lost_calls(tx: Connection, max_sends: int) -> list[int]:
    """Return the ids of calls whose message must be sent again, and add one to the number of messages of each.

    These are the calls of running episodes that have no result and fewer than `max_sends` messages. Started calls that must not
    run twice are included: see `start_once`.
    """
    iterations = select(schema.iterations.c.id).where(schema.iterations.c.status == "running")
    waiting = (
        select(_CALLS.id)
        .join(schema.episodes, (_EPISODES.id == _CALLS.episode_id) & (_EPISODES.attempt == _CALLS.attempt))
        .where(_EPISODES.iteration_id.in_(iterations), _EPISODES.status == "running")
        .where(_CALLS.result.is_(None), _CALLS.sends < max_sends, _CALLS.kind != "agent")
    )
    again = update(schema.tool_calls).where(_CALLS.id.in_(waiting)).values(sends=_CALLS.sends + 1)
    return sorted(tx.execute(again.returning(_CALLS.id)).scalars())


_RECORD_RESULT = PreparedStatement(
    update(schema.tool_calls)
    .where(_CALLS.id == bindparam("call_id"), _CALLS.result.is_(None))
    .values(
        starts=_CALLS.starts + case((_CALLS.effects == "once", 0), else_=1),
        started_at=func.coalesce(_CALLS.started_at, bindparam("began", type_=Utc())),
    )
)


@transaction
def record_result(tx: Connection, call: int, result: ToolResult, started_at: datetime, worker: str) -> bool:
    """Store the result of the call if the call has no result yet. Return whether this result was stored."""
    values = {
        "status": "unknown_outcome" if result.error_class == "unknown_outcome" else "done",
        "result": storable(result.content),
        "error_class": result.error_class,
        "seconds": result.seconds,
        "cpu_seconds": result.cpu_seconds,
        "sandbox": result.exit.sandbox if result.exit else None,
        "exit_status": result.exit.status if result.exit else None,
        "exit_code": result.exit.code if result.exit else None,
        "annotations": annotation_rows(result.annotations) or None,
        "worker": worker,
        "finished_at": datetime.now(UTC),
    }
    return bool(_RECORD_RESULT.run(tx, {**values, "call_id": call, "began": started_at}))
