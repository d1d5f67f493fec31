"""A timeline of a run: spans of groups, updates, tool calls and agents. There is one lane for each queue and worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from agentrl.workflow.store.driver_reader import Row, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.paging import storable_value
from agentrl.workflow.store.reads.run_rows import run_id_and_name

MAX_SPANS = 2000
"""The maximum number of spans in a response. Groups and updates are read first, then agents, then calls."""
NEWEST = 5
"""The number of newest iterations that are shown by default."""
MAX_ITERATIONS = 20
"""The maximum number of iterations in a response."""
QUEUES = {"group": "rollout", "update": "train", "agent": "agents", "call": "tools"}
"""The queue of the workers that do the work of a span, by the span's kind."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes and spans of a timeline, for the iterations from `first` to `last`, counted from 1.

    Args:
        lanes: the `queue` and `worker` of each lane.
        spans: the spans of the lanes. `lane` is the index of the span's lane. `id` is the id of the group, iteration, call or
            attempt. `end` is None while the work is running.
        left_out: the number of spans that are missing because of the limit MAX_SPANS.
    """

    lanes: Sequence[dict[str, str]]
    spans: Sequence[dict[str, Any]]
    left_out: int
    first: int
    last: int


@sql_read_transaction
def load_lanes(tx: Any, run: str, first: int | None = None, last: int | None = None) -> Lanes:
    """Return the timeline of at most MAX_ITERATIONS iterations of a run, from `first` to `last`, counted from 1.

    If `first` and `last` are None, these are the NEWEST iterations that were started last. Raise NotFoundError if there is no
    such run.
    """
    run_id = run_id_and_name(tx, run)["id"]
    newest = (
        "SELECT number + 1 AS last FROM iterations WHERE run_id = :id AND started_at IS NOT NULL ORDER BY number DESC LIMIT 1"
    )
    begun = select_rows(tx, newest, id=run_id)
    to = min(storable_value(last), begun[0]["last"]) if last is not None and begun else (begun[0]["last"] if begun else 0)
    start = to - NEWEST + 1 if first is None else storable_value(first)
    start = max(1, start, to - MAX_ITERATIONS + 1)
    values = {"id": run_id, "first": start - 1, "last": to - 1}
    span_rows: list[Row] = []
    left_out = 0
    for query in _QUERIES.values():
        rows = select_rows(tx, f"{_SPANS.format(query=query)} LIMIT :limit", **values, limit=MAX_SPANS - len(span_rows) + 1)
        if len(rows) > MAX_SPANS - len(span_rows):
            rows = rows[:-1]
            left_out += select_rows(tx, f"SELECT count(*) AS count FROM ({query}) spans", **values)[0]["count"] - len(rows)
        span_rows += rows
    lanes = sorted({_lane(row) for row in span_rows}, key=lambda lane: ([*QUEUES.values()].index(lane[0]), lane[1]))
    spans = [_span(row, lanes.index(_lane(row))) for row in span_rows]
    return Lanes([{"queue": queue, "worker": worker} for queue, worker in lanes], spans, left_out, start, to)


_AMONG = "i.run_id = :id AND i.number >= :first AND i.number <= :last"
_QUERIES = {
    "group": f"""
        SELECT 'group' AS kind, g.id, i.number + 1 AS iteration, g.worker, g.started_at, g.finished_at, g.status, 0.0 AS seconds
        FROM iterations i JOIN groups g ON g.iteration_id = i.id WHERE {_AMONG} AND g.started_at IS NOT NULL""",
    "update": f"""
        SELECT 'update' AS kind, i.id, i.number + 1 AS iteration, i.worker, i.rolled_out_at AS started_at, i.finished_at,
               i.status, i.update_seconds AS seconds
        FROM iterations i JOIN runs r ON r.id = i.run_id
        WHERE {_AMONG} AND r.kind = 'train' AND i.train_sends > 0
        AND (i.rolled_out_at IS NOT NULL OR i.finished_at IS NOT NULL AND i.update_seconds IS NOT NULL)""",
    "agent": f"""
        SELECT 'agent' AS kind, a.id, i.number + 1 AS iteration, a.worker, a.started_at, a.finished_at, a.status, 0.0 AS seconds
        FROM iterations i JOIN episodes e ON e.iteration_id = i.id JOIN agent_attempts a ON a.episode_id = e.id
        WHERE {_AMONG} AND a.started_at IS NOT NULL""",
    "call": f"""
        SELECT 'call' AS kind, c.id, i.number + 1 AS iteration, c.worker, c.started_at, c.finished_at, c.status, 0.0 AS seconds
        FROM iterations i JOIN episodes e ON e.iteration_id = i.id JOIN tool_calls c ON c.episode_id = e.id
        WHERE {_AMONG} AND c.started_at IS NOT NULL""",
}
_SPANS = "SELECT * FROM ({query}) spans ORDER BY iteration DESC, id"
"""The SQL for spans in the order of reading. The spans of a newer iteration are all read before those of an older iteration."""


def _lane(row: Row) -> tuple[str, str]:
    return QUEUES[row["kind"]], row["worker"].partition("/")[0]


def _span(row: Row, lane: int) -> dict[str, Any]:
    """Build the span of a row.

    The span of a finished update starts at its end minus its recorded duration, because the iteration may have waited before
    the update.
    """
    start, end = row["started_at"], row["finished_at"]
    if row["kind"] == "update" and end is not None and row["seconds"] is not None:
        start = end - timedelta(seconds=min(max(0.0, row["seconds"]), 1e9))
    fields = {name: row[name] for name in ("kind", "id", "iteration", "status")}
    return {"lane": lane, **fields, "start": start, "end": end}
