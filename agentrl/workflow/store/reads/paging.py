"""Pages of a list: their size, order and start.

A cursor identifies the last returned row by its sort value and its id. So each row is returned once, even if rows are added
meanwhile. If the sort value of a row changes between two pages, the row may be returned twice or be missed; ids never change. A
cursor belongs to one list with one filter and one order. Other lists reject it.
"""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2s
from typing import Any, Generic, TypeVar

from agentrl.workflow.errors import ConfigError, did_you_mean
from agentrl.workflow.store.driver_reader import select_rows
from agentrl.workflow.store.row_codecs import MAX_ID
from agentrl.workflow.tables.view_row import ViewRow
from agentrl.workflow.trajectory import storable

MAX_SIZE = 100_000
MAX_CURSOR_CHARS = 1000
"""The maximum length of a cursor, in characters. No valid cursor is longer."""
BY_NUMBER, FEW_BY_NUMBER = {"id": "id"}, {"id": "id + 0"}
"""Orders of a list by id. FEW_BY_NUMBER is for few rows that an index finds. Without its `+ 0`, Postgres would scan all rows in
the order of ids until it finds the few.
"""
TEXT_COLUMNS = ("run", "status")
"""The sort columns that contain texts. All other sort columns contain numbers."""


R = TypeVar("R", bound=ViewRow)
F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Paging:
    """The size, start and order of the page to return.

    Args:
        size: the maximum number of rows.
        cursor: the `Page.next` of the previous page; empty for the first page.
        offset: the number of rows to skip. A cursor is faster.
        sort: the name of one of the list's orders. With a `-` before the name the order is descending, else ascending. Empty
            for the list's default order.
    """

    size: int = 50
    cursor: str = ""
    offset: int = 0
    sort: str = ""


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    """Some rows of a list. `next` is the cursor of the following page; it is empty on the last page."""

    rows: tuple[R, ...]
    next: str = ""


def iterate_rows(
    list_page: Callable[[Any, F, Paging], Page[R]], db: Any, chosen: F, paging: Paging | None = None
) -> Iterator[R]:
    """Yield all rows of a list, reading them page by page."""
    paging = paging or Paging(size=MAX_SIZE)
    while True:
        page = list_page(db, chosen, paging)
        yield from page.rows
        if not page.next:
            return
        paging = replace(paging, cursor=page.next, offset=0)


def select_values(tx: Any, kind: type[R], rest: str, /, **parameters: Any) -> list[R]:
    """Return rows of the view of the row class `kind`. `rest` is the SQL after `FROM VIEW`."""
    query = f"SELECT {', '.join(kind.COLUMNS)} FROM {kind.VIEW} {rest}"
    return [kind(**row) for row in select_rows(tx, query, **parameters)]


def select_page(
    tx: Any,
    kind: type[R],
    conditions: Sequence[str],
    parameters: Mapping[str, Any],
    paging: Paging,
    orders: Mapping[str, str],
    own: str,
    table: str = "",
) -> Page[R]:
    """Return a page of the view of the row class `kind`. Raise ConfigError if there is no such order, the size is out of
    bounds, or the cursor does not belong to this list.

    Args:
        conditions: SQL conditions on the columns of `table`, or of the view if `table` is empty. Their `parameters` are written
            as `:name`.
        orders: the names by which the list can be sorted, each with its column.
        own: the name of the list's default order.
        table: the table in which the ids of the page's rows are looked up, which avoids the view's joins for skipped rows. If
            empty, they are looked up in the view.
    """
    sort = paging.sort or own
    column, way = _find_order(orders, sort)
    if not (1 <= paging.size <= MAX_SIZE and 0 <= paging.offset <= MAX_ID):
        raise ConfigError(f"A page has 1 to {MAX_SIZE} rows, not {paging.size} (offset {paging.offset}).")
    digest = blake2s(repr((kind.VIEW, sort, sorted(parameters.items()))).encode(), digest_size=6).hexdigest()
    args = {**parameters, "page_size": paging.size + 1, "page_offset": paging.offset}
    if paging.cursor:
        place = _parse_cursor(paging.cursor, digest, column)
        conditions = [*conditions, _after(column, way, place)]
        args |= place if column != "id" and place["at"] is not None else {"last": place["last"]}
    records = [dict(row) for row in select_rows(tx, _page_query(kind, table, conditions, column, way), **args)]
    places = [(row.pop("sorted_by"), row["id"]) for row in records]
    rows = tuple(kind(**row) for row in records[: paging.size])
    return Page(rows, encode_cursor(digest, *places[paging.size - 1]) if len(records) > paging.size else "")


def _page_query(kind: type[ViewRow], table: str, conditions: Sequence[str], column: str, way: str) -> str:
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    order = f"id {way}" if column == "id" else f"{column} {way} NULLS LAST, id {way}"  # no index is in the order of the other
    page = f"{column} AS sorted_by FROM {table or kind.VIEW} {where} ORDER BY {order} LIMIT :page_size OFFSET :page_offset"
    if not table:
        return f"SELECT {', '.join(kind.COLUMNS)}, {page}"
    columns = ", ".join(f"v.{name}" for name in kind.COLUMNS)
    again = f"page.sorted_by {way} NULLS LAST, page.id {way}"
    return f"SELECT {columns}, sorted_by FROM (SELECT id, {page}) page JOIN {kind.VIEW} v ON v.id = page.id ORDER BY {again}"


def choose_conditions(filter_: object, conditions: Mapping[str, str]) -> tuple[list[str], dict[str, Any]]:
    """Return SQL conditions for the fields that are set in a filter, and the values of the conditions' parameters.

    The values are converted so that every database accepts them. `conditions` has the condition of each
    field, by the field's name. The condition of `text` is a LIKE with `!` as its escape character.
    """
    values = {name: storable_value(value) for name in conditions if (value := getattr(filter_, name)) is not None}
    if "text" in values:
        values["text"] = f"%{escape_like(values['text'])}%"
    return [conditions[name] for name in values], values


def escape_like(text: str) -> str:
    """Escape a text for a LIKE with ESCAPE '!'."""
    return text.replace("!", "!!").replace("%", "!%").replace("_", "!_")


def storable_value(value: Any) -> Any:
    """Limit an integer, and replace characters of a text, so that every database accepts the value."""
    if isinstance(value, str):
        return storable(value)
    return max(-MAX_ID, min(MAX_ID, value)) if isinstance(value, int) else value


def _find_order(orders: Mapping[str, str], sort: str) -> tuple[str, str]:
    word = sort.removeprefix("-")
    if word not in orders:
        raise ConfigError(f"The list is not sorted by {word!r:.60}.", did_you_mean(word[:60], orders))
    return orders[word], "DESC" if sort.startswith("-") else "ASC"


def _after(column: str, way: str, place: Mapping[str, Any]) -> str:
    beyond = "<" if way == "DESC" else ">"
    if column == "id":
        return f"id {beyond} :last"
    if place["at"] is None:
        return f"{column} IS NULL AND id {beyond} :last"
    return f"({column} {beyond} :at OR {column} = :at AND id {beyond} :last OR {column} IS NULL)"


def encode_cursor(*parts: Any) -> str:
    """Encode the parts as a cursor, which is opaque to clients."""
    return urlsafe_b64encode(json.dumps(parts, separators=(",", ":")).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, of: str) -> list[Any]:
    """Return a cursor's parts after the first. Raise ConfigError if it is invalid, or the first is not `of`."""
    try:
        parts = json.loads(urlsafe_b64decode(cursor.encode("ascii") + b"==")) if len(cursor) <= MAX_CURSOR_CHARS else None
    except (ValueError, RecursionError):
        parts = None
    if not isinstance(parts, list) or parts[:1] != [of]:
        raise cursor_error(cursor)
    return parts[1:]


def cursor_error(cursor: str) -> ConfigError:
    """Return the error for a cursor that does not belong to this list."""
    return ConfigError(
        f"{cursor[:40]!r} is not a cursor of this list with this filter and order.", "Start again without a cursor."
    )


def is_id(value: Any) -> bool:
    """Return whether a part of a cursor can be a row's id."""
    return type(value) is int and abs(value) <= MAX_ID


def _parse_cursor(cursor: str, digest: str, column: str) -> dict[str, Any]:
    """Return the sort value (`at`) and the id (`last`) of the cursor's row."""
    match decode_cursor(cursor, digest):
        case [at, last] if is_id(last) and (at is None or _may_hold(column, at)):
            return {"at": at, "last": last}
    raise cursor_error(cursor)


def _may_hold(column: str, value: Any) -> bool:
    if column in TEXT_COLUMNS:
        return isinstance(value, str) and value == storable(value)
    return is_id(value) or isinstance(value, float)
