"""Numeric columns of views as series over a run's iterations. The rows are read in windows; each window returns partial sums,
and the caller adds them up.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args

from agentrl.workflow.errors import ConfigError, did_you_mean
from agentrl.workflow.store.driver_reader import select_rows, sql_read_transaction
from agentrl.workflow.store.reads.paging import cursor_error, decode_cursor, encode_cursor, is_id
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.tables.views import VIEWS

WINDOW_ROWS = 5000

WINDOWS = {
    "v_iterations": "iterations WHERE run_id = :id",
    "v_groups": "groups WHERE run_id = :id",
    "v_episodes": "episodes WHERE run_id = :id",
    "v_steps": "steps WHERE run = :run",
    "v_tool_calls": "tool_calls WHERE run = :run",
    "v_agent_attempts": "agent_attempts WHERE run = :run",
    "v_annotations": "annotations WHERE run = :run",
    "v_rewards": "rewards WHERE run = :run",
    "v_updates": "updates WHERE iteration_id IN (SELECT id FROM iterations WHERE run_id = :id)",
}
"""The table and the condition that select a run's rows by id, for each view with the columns run, iteration and id."""
KIND = "series"


@dataclass(frozen=True, slots=True)
class Window:
    """Aggregates of the rows of one window. Each `iteration` has one entry, with the `count`, `sum`, `min` and `max` of its
    finite values.

    `next` is the cursor of the next window; it is empty after the last window.
    """

    rows: Sequence[Mapping[str, Any]]
    next: str


def list_views() -> list[dict[str, Any]]:
    """Return all views, with the meanings of views and columns, and for each column whether `read_series` can read it
    (`chartable`).
    """
    return [
        {
            "view": view,
            "meaning": kind.meaning(),
            "columns": [
                {"column": name, "meaning": column.meaning, "chartable": name in _numbers(view)}
                for name, column in kind.COLUMNS.items()
            ],
        }
        for view, kind in VIEWS.items()
    ]


@cache
def _numbers(view: str) -> tuple[str, ...]:
    if view not in WINDOWS:
        return ()
    hints = VIEWS[view].types()
    ids = {"id", "iteration", *(name for name in hints if name.endswith("_id"))}
    return tuple(name for name, hint in hints.items() if name not in ids and _is_number(hint))


def _is_number(hint: Any) -> bool:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return any(kind in (int, float, bool) for kind in kinds)


@sql_read_transaction
def read_series(tx: Any, run: str, view: str, column: str, cursor: str = "") -> Window:
    """Return partial sums of a view's column by iteration, over the next WINDOW_ROWS rows of a run. Raise NotFoundError if
    there is no such run. Raise ConfigError if there is no such view or numeric column, or the cursor does not belong to this
    series.
    """
    if view not in WINDOWS:
        raise ConfigError(f"{view!r:.60} is not a view that has numbers by iteration.", did_you_mean(view[:60], WINDOWS))
    if column not in _numbers(view):
        raise ConfigError(f"{column!r:.60} is not a numeric column of {view}.", did_you_mean(column[:60], _numbers(view)))
    run_row = run_id_and_name(tx, run)
    of = [run_row["id"], view, column]
    values = {"id": run_row["id"]} if ":id" in WINDOWS[view] else {"run": run_row["name"]}
    window = f"SELECT id FROM {WINDOWS[view]} AND id > :last ORDER BY id LIMIT {WINDOW_ROWS}"
    values |= {"last": _parse_cursor(cursor, of)}
    (ends,) = select_rows(tx, f"SELECT max(id) AS last, count(*) AS count FROM ({window}) w", **values)
    query = f"SELECT v.iteration, v.{column} AS value FROM ({window}) w JOIN {view} v ON v.id = w.id"
    sums: dict[int, list[float]] = {}
    for row in select_rows(tx, query, **values):
        if row["value"] is not None and math.isfinite(row["value"]):
            sums.setdefault(row["iteration"], []).append(row["value"])
    following = encode_cursor(KIND, *of, ends["last"]) if ends["count"] == WINDOW_ROWS else ""
    return Window([_summed(iteration, sums[iteration]) for iteration in sorted(sums)], following)


def _summed(iteration: int, its: Sequence[float]) -> dict[str, Any]:
    try:
        total = math.fsum(its)
    except OverflowError:
        total = math.inf
    return {"iteration": iteration, "count": len(its), "sum": total, "min": min(its), "max": max(its)}


def _parse_cursor(cursor: str, of: Sequence[Any]) -> int:
    if not cursor:
        return 0
    match decode_cursor(cursor, KIND):
        case [*known, last] if known == [*of] and is_id(last):
            return int(last)
    raise cursor_error(cursor)
