"""Where the seconds of a run went. The parts add up to the total."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from agentrl.workflow.store.driver_reader import Row, select_rows, sql_read_transaction
from agentrl.workflow.store.reads.run_rows import run_id_and_name

REST = "unexplained"
"""The part with the seconds that no other part explains."""
REST_MEANS = {
    "run": "workers started, checkpoints were written, messages travelled",
    "episodes": "they waited for others of their batch, or your agent worked",
}
"""What mostly happens in the seconds of REST, in a run and in its episodes."""
MAX_UPDATE_SECONDS = 1e9
Span = tuple[datetime, datetime]

_EPISODES = """
    SELECT sum(seconds) AS whole, sum(generate_seconds) AS sampling, sum(tool_seconds) AS tools FROM v_episodes
    WHERE run = :run AND finished_at IS NOT NULL"""
_CALLS = """
    SELECT sum(CASE WHEN c.kind <> 'grade' THEN c.queue_seconds END) AS "waiting for a tools worker",
           sum(CASE WHEN c.kind = 'grade' THEN c.seconds END) AS judging
    FROM v_tool_calls c JOIN episodes e ON e.id = c.episode_id WHERE c.run = :run AND e.finished_at IS NOT NULL"""


@sql_read_transaction
def load_run_seconds(tx: Any, run: str, episodes: bool = True) -> list[Row]:
    """Return where the seconds of a run went, as rows with `of`, `part`, `seconds` and `share`. Raise NotFoundError if there is
    no such run.

    Rows with `of` = "run" divide the time from the run's start to its end, or of an open run to the newest time in its
    iterations: an iteration's rollout, an update, both at once (`rollout and update`), the time in which the run was stopped
    before it was resumed (`stopped`), and the rest (`unexplained`). The evaluations that the run planned are runs of their own:
    their seconds are no part of it.

    Rows with `of` = "episodes" divide the seconds of the ended episodes, added up. Episodes run at the same time, so the total
    may exceed that of the run. The part `counted twice` is negative: tool calls of an episode ran at the same time.

    The rows of each kind add up to its total. `share` is the share of the total; all shares of a kind add up to 1.

    Args:
        episodes: False to leave out the parts of episodes, whose sums take a while in a large run.
    """
    row = run_id_and_name(tx, run)
    rows = _rows("run", _divide_run(tx, row["id"]))
    return rows + _rows("episodes", _divide_episodes(tx, row["name"])) if episodes else rows


def _rows(of: str, parts: Mapping[str, float]) -> list[Row]:
    total = sum(parts.values())
    return [{"of": of, "part": part, "seconds": value, "share": value / total} for part, value in parts.items() if value]


def _divide_episodes(tx: Any, run: str) -> dict[str, float]:
    sums = {**select_rows(tx, _EPISODES, run=run)[0], **select_rows(tx, _CALLS, run=run)[0]}
    whole = float(sums.pop("whole") or 0.0)
    parts = {part: float(value or 0.0) for part, value in sums.items()}
    rest = whole - sum(parts.values())
    return {**parts, REST if rest > 0 else "counted twice": rest} if whole else {}


def _divide_run(tx: Any, run_id: int) -> dict[str, float]:
    (run,) = select_rows(tx, "SELECT started_at, finished_at FROM runs WHERE id = :id", id=run_id)
    query = """
        SELECT started_at, rolled_out_at, finished_at, update_seconds FROM iterations
        WHERE run_id = :id AND started_at IS NOT NULL"""
    iterations = [row for row in select_rows(tx, query, id=run_id) if row["started_at"]]  # a damaged time reads as None
    if run["started_at"] is None or not iterations:
        return {}
    newest = max(at for row in iterations for at in (row["started_at"], row["rolled_out_at"], row["finished_at"]) if at)
    end = run["finished_at"] or newest
    rollouts, updates = [], []
    for row in iterations:
        if row["rolled_out_at"] or not row["finished_at"]:  # an iteration that trained on stored episodes has no rollout
            rollouts.append((row["started_at"], row["rolled_out_at"] or end))
        if row["finished_at"] and row["update_seconds"]:
            seconds = min(max(0.0, row["update_seconds"]), MAX_UPDATE_SECONDS)
            updates.append((row["finished_at"] - timedelta(seconds=seconds), row["finished_at"]))
    spans = {"stopped": _list_stops(tx, run_id), "rollout": rollouts, "update": updates}
    return _divide(run["started_at"], max(run["started_at"], end), spans)


def _list_stops(tx: Any, run_id: int) -> list[Span]:
    """Return the times in which the run was paused or failed, before it was resumed."""
    query = """
        SELECT kind, created_at FROM events WHERE run_id = :id AND kind IN ('paused', 'failed', 'resumed') ORDER BY id"""
    events = select_rows(tx, query, id=run_id)
    return [
        (one["created_at"], other["created_at"])
        for one, other in pairwise(events)
        if one["kind"] != "resumed" and other["kind"] == "resumed" and one["created_at"] and other["created_at"]
    ]


def _divide(begin: datetime, end: datetime, spans: Mapping[str, Sequence[Span]]) -> dict[str, float]:
    """Return the seconds of each part of the time from begin to end."""
    edges = [
        (min(max(at, begin), end), kind, step)
        for kind, its in spans.items()
        for span in its
        for at, step in zip(span, (1, -1), strict=True)
    ]
    parts = dict.fromkeys(("rollout", "rollout and update", "update", "stopped", REST), 0.0)
    lasting: Counter[str] = Counter()
    last = begin
    for at, kind, step in [*sorted(edges), (end, REST, 0)]:
        parts[_name_part(lasting)] += (at - last).total_seconds()
        lasting[kind] += step
        last = at
    return parts


def _name_part(lasting: Mapping[str, int]) -> str:
    if lasting["stopped"] > 0:
        return "stopped"
    return " and ".join(kind for kind in ("rollout", "update") if lasting[kind] > 0) or REST
