"""Pages of a list: their size, order and start.

A cursor identifies the last returned row by its sort value and its id. So each row is returned once, even if rows are added
meanwhile. If the sort value of a row changes between two reads, the row may be returned twice or be missed. In a list by id
this cannot happen. A cursor belongs to one list with one filter and one order. With another list, filter or order, it raises
ConfigError.
"""

import json
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2s
from typing import Any, Generic, TypeVar

from agentrl.workflow.errors import ConfigError, did_you_mean, suggest
from agentrl.workflow.store.driver_reader import among, select_rows
from agentrl.workflow.store.row_codecs import MAX_ID, SORTED_CHARS
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
"""The sort columns that contain texts. All other sort columns, except those of `text_order`, contain numbers."""
PIECE_SECONDS = 0.6
"""The time after which a search returns what it has, in seconds. The next page goes on from there."""
FIRST_WINDOW, MAX_WINDOW = 64, 8000
"""The numbers of rows that a search checks with one query: at first, and at most."""
SAMPLE_ROWS = 400
"""The number of rows from which `_narrow` finds a bound for the first rows of a list."""


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
    """Some rows of a list. `next` is the cursor of the following page; it is empty on the last page.

    A search returns after PIECE_SECONDS, with the rows found so far. `searched` is the number of rows that were checked for
    this page; None if the list is read without a search.
    """

    rows: tuple[R, ...]
    next: str = ""
    searched: int | None = None


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
    narrow: bool = False,
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
        narrow: True if the conditions leave so many rows of `table` that their order takes long, and an index has these rows by
            id.
    """
    column, way, digest, place = _resolve(kind, parameters, paging, orders, own)
    args = {**parameters}
    if place:
        conditions = [*conditions, _beyond(column, way, place)]
        args |= _place_values(column, place)
    if narrow:
        conditions, args = _narrow(tx, table, conditions, args, column, way, paging.size + 1 + paging.offset)
    args |= {"page_size": paging.size + 1, "page_offset": paging.offset}
    records = [dict(row) for row in select_rows(tx, _page_query(kind, table, conditions, column, way), **args)]
    places = [(row.pop("sorted_by"), row["id"]) for row in records]
    rows = tuple(kind(**row) for row in records[: paging.size])
    return Page(rows, encode_cursor(digest, *places[paging.size - 1]) if len(records) > paging.size else "")


def search_page(
    tx: Any,
    kind: type[R],
    conditions: Sequence[str],
    tests: Sequence[str],
    parameters: Mapping[str, Any],
    paging: Paging,
    orders: Mapping[str, str],
    own: str,
    table: str,
) -> Page[R]:
    """Return a page like `select_page`, but only with rows that also meet `tests`: SQL conditions that are slow to check.

    The rows are checked in the list's order, window after window, until the page is full or PIECE_SECONDS have passed. So a
    page may have few rows, or none, and still be followed by another page. The time limit does not apply until `paging.offset`
    rows have been found and skipped.
    """
    column, way, digest, place = _resolve(kind, parameters, paging, orders, own)
    search = _Search(tx, table, conditions, tests, parameters, column, way)
    places, last = search.run(place, paging.size + paging.offset, paging.offset)
    ids = [id for _, id in places[paging.offset :]]
    rows = {row["id"]: row for row in select_values(tx, kind, f"WHERE id IN ({among(ids)})")} if ids else {}
    following = encode_cursor(digest, *last) if last else ""
    return Page(tuple(rows[id] for id in ids), following, search.searched)


def find_beside(
    tx: Any,
    conditions: Sequence[str],
    tests: Sequence[str],
    parameters: Mapping[str, Any],
    order: tuple[str, str],
    table: str,
    id: int,
) -> tuple[int | None, int | None]:
    """Return the ids of the rows before and after the row `id` in a list. An id is None at an end of the list, or if the search
    for it took too long.

    Args:
        order: the column of the list's order, and ASC or DESC.
        conditions, tests, parameters, table: those of `search_page`.
    """
    column, way = order
    rows = select_rows(tx, f"SELECT {column} AS sorted_by FROM {table} WHERE id = :id", id=id)
    if not rows:
        return None, None
    place = {"at": rows[0]["sorted_by"], "last": id}
    searches = (_Search(tx, table, conditions, tests, parameters, column, way, back) for back in (True, False))
    before, after = (search.run(place, 1)[0] for search in searches)
    return before[0][1] if before else None, after[0][1] if after else None


class _Search:
    """A walk through the rows of a list in its order, or backwards, that keeps the rows which meet slow conditions."""

    def __init__(
        self,
        tx: Any,
        table: str,
        conditions: Sequence[str],
        tests: Sequence[str],
        parameters: Mapping[str, Any],
        column: str,
        way: str,
        back: bool = False,
    ) -> None:
        self.searched = 0
        self._tx, self._table, self._conditions, self._tests = tx, table, conditions, tests
        self._parameters, self._column, self._way, self._back = parameters, column, way, back

    def run(
        self, place: Mapping[str, Any] | None, wanted: int, least: int = 0
    ) -> tuple[list[tuple[Any, int]], tuple[Any, int] | None]:
        """Return the places (sort value and id) of at most `wanted` rows, and the place to go on from: None at the end. Do not
        stop before `least` rows are found.
        """
        places: list[tuple[Any, int]] = []
        size, began = (FIRST_WINDOW if self._tests else wanted + 1), time.monotonic()
        while True:
            started = time.monotonic()
            window = self._read_window(place, size)
            met = self._meet(window)
            ended = len(window) < size
            for index, one in enumerate(window):
                if one[1] not in met:
                    continue
                places.append(one)
                if len(places) == wanted:
                    self.searched += index + 1
                    return places, None if ended and index + 1 == len(window) else one
            self.searched += len(window)
            if ended:
                return places, None
            place, now = {"at": window[-1][0], "last": window[-1][1]}, time.monotonic()
            if now - began >= PIECE_SECONDS and len(places) >= least:
                return places, window[-1]
            size = min(MAX_WINDOW, 2 * size) if now - started < PIECE_SECONDS / 8 else max(1, size // 2)

    def _read_window(self, place: Mapping[str, Any] | None, size: int) -> list[tuple[Any, int]]:
        conditions, args = self._conditions, {**self._parameters}
        if place:
            conditions = [*conditions, _beyond(self._column, self._way, place, self._back)]
            args |= _place_values(self._column, place)
        order = _order_by(self._column, self._way, self._back)
        query = f"{_select_places(self._table, conditions, self._column)} ORDER BY {order} LIMIT :window"
        return [(row["sorted_by"], row["id"]) for row in select_rows(self._tx, query, **args, window=size)]

    def _meet(self, window: Sequence[tuple[Any, int]]) -> set[int]:
        ids = [one[1] for one in window]
        if not self._tests or not ids:
            return set(ids)
        query = f"SELECT id FROM {self._table} WHERE id IN ({among(ids)}) AND {' AND '.join(self._tests)}"
        return {row["id"] for row in select_rows(self._tx, query, **self._parameters)}


def _resolve(
    kind: type[ViewRow], parameters: Mapping[str, Any], paging: Paging, orders: Mapping[str, str], own: str
) -> tuple[str, str, str, dict[str, Any] | None]:
    """Return the sort column, ASC or DESC, the digest of the list for its cursors, and the place to start after."""
    sort = paging.sort or own
    column, way = find_order(orders, sort)
    if not (1 <= paging.size <= MAX_SIZE and 0 <= paging.offset <= MAX_ID):
        raise ConfigError(f"A page has 1 to {MAX_SIZE} rows from row 0 on, not {paging.size} from row {paging.offset}.")
    digest = blake2s(repr((kind.VIEW, sort, sorted(parameters.items()))).encode(), digest_size=6).hexdigest()
    return column, way, digest, _parse_cursor(paging.cursor, digest, column) if paging.cursor else None


def _place_values(column: str, place: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the parameters of `_beyond`."""
    names = ("at", "last") if column != "id" and place["at"] is not None else ("last",)
    return {f"{prefix}{name}": place[name] for name in names}


def _narrow(
    tx: Any,
    table: str,
    conditions: Sequence[str],
    parameters: Mapping[str, Any],
    column: str,
    way: str,
    count: int,
) -> tuple[Sequence[str], dict[str, Any]]:
    """Return conditions, with their parameters, that the first `count` rows of a list meet, but few of its other rows. Without
    these conditions, a database that reads all rows of the list inserts many of them among the first ones so far. Call this
    inside a transaction that sees one state of the database.

    The row after the first `count` of a sample of the list is a bound: the first `count` rows of the list come before it. The
    sample has the first ids in the list's direction. So of many rows with equal values, few come before the bound.
    """
    if column == "id" or 4 * count > SAMPLE_ROWS:
        return conditions, {**parameters}
    # As a subquery, the limit is unknown to Postgres. Without statistics it expects fewer rows, and would read and sort all.
    sample = f"{_select_places(table, conditions, column)} ORDER BY id {way} LIMIT (SELECT {SAMPLE_ROWS})"
    rows = select_rows(tx, f"SELECT * FROM ({sample}) sample ORDER BY {_order_by('sorted_by', way)}", **parameters)
    if len(rows) < SAMPLE_ROWS:  # the whole list
        return [f"id IN ({among(row['id'] for row in rows)})"], {}
    place = {"at": rows[count]["sorted_by"], "last": rows[count]["id"]}
    bound = _beyond(column, way, place, back=True, prefix="bound_")
    return [*conditions, bound], {**parameters, **_place_values(column, place, "bound_")}


def _select_places(table: str, conditions: Sequence[str], column: str) -> str:
    return f"SELECT {column} AS sorted_by, id FROM {table} WHERE {' AND '.join(conditions) or '1 = 1'}"


def _page_query(kind: type[ViewRow], table: str, conditions: Sequence[str], column: str, way: str) -> str:
    order = f"ORDER BY {_order_by(column, way)} LIMIT :page_size OFFSET :page_offset"
    if not table:
        where = " AND ".join(conditions) or "1 = 1"
        return f"SELECT {', '.join(kind.COLUMNS)}, {column} AS sorted_by FROM {kind.VIEW} WHERE {where} {order}"
    columns = ", ".join(f"v.{name}" for name in kind.COLUMNS)
    page = f"({_select_places(table, conditions, column)} {order}) page"
    again = f"page.sorted_by {way} NULLS LAST, page.id {way}"
    return f"SELECT {columns}, sorted_by FROM {page} JOIN {kind.VIEW} v ON v.id = page.id ORDER BY {again}"


def choose_conditions(
    filter_: object, conditions: Mapping[str, str], choices: Mapping[str, Sequence[str]] | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Return SQL conditions for the fields that are set in a filter, and the values of the conditions' parameters.

    The values are converted to values that every database accepts. Raise ConfigError if a field has none of its `choices`.

    Args:
        conditions: the condition of each field, by the field's name. The condition of `text` is a LIKE with `!` as its escape
            character.
        choices: the possible values of each field that has only a few, by the field's name.
    """
    for name, values_of_field in (choices or {}).items():
        if (value := getattr(filter_, name)) is not None:
            check_choice(value, values_of_field, name.replace("_", " "))
    values = {name: storable_value(value) for name in conditions if (value := getattr(filter_, name)) is not None}
    if "text" in values:
        values["text"] = f"%{escape_like(values['text'])}%"
    return [conditions[name] for name in values], values


def check_choice(word: str, words: Sequence[str], what: str) -> None:
    """Raise ConfigError, with all choices, if a word is none of them. `what` says what the words name."""
    if word not in words:
        hint = f"{suggest(str(word)[:60], words)} The {what} is one of {', '.join(words)}.".strip()
        raise ConfigError(f"There is no {what} {word!r:.60}.", hint)


def escape_like(text: str) -> str:
    """Escape a text for a LIKE with ESCAPE '!'."""
    return text.replace("!", "!!").replace("%", "!%").replace("_", "!_")


def storable_value(value: Any) -> Any:
    """Make a value acceptable to every database: limit an integer, or replace characters of a text."""
    if isinstance(value, str):
        return storable(value)
    return max(-MAX_ID, min(MAX_ID, value)) if isinstance(value, int) else value


def find_order(orders: Mapping[str, str], sort: str) -> tuple[str, str]:
    """Return the column of a list's order, and ASC or DESC. Raise ConfigError if there is no such order."""
    word = sort.removeprefix("-")
    if word not in orders:
        raise ConfigError(f"The list cannot be sorted by {word!r:.60}.", did_you_mean(word[:60], orders))
    return orders[word], "DESC" if sort.startswith("-") else "ASC"


def text_order(column: str) -> str:
    """Return the SQL by which a list is sorted by a text of any length. It takes only the first characters, because the sort
    value must fit into a cursor.
    """
    return f"substr({column}, 1, {SORTED_CHARS})"


def _order_by(column: str, way: str, back: bool = False) -> str:
    if back:
        way = "ASC" if way == "DESC" else "DESC"
    if column == "id":
        return f"id {way}"
    return f"{column} {way} NULLS {'FIRST' if back else 'LAST'}, id {way}"  # no index is in the order of the other


def _beyond(column: str, way: str, place: Mapping[str, Any], back: bool = False, prefix: str = "") -> str:
    """Return the condition of the rows after a place, or before it (`back`). `prefix` begins the names of its parameters."""
    sign, at, last = "<" if (way == "DESC") != back else ">", f":{prefix}at", f":{prefix}last"
    if column == "id":
        return f"id {sign} {last}"
    if place["at"] is None:
        return f"({column} IS NULL AND id {sign} {last}{f' OR {column} IS NOT NULL' if back else ''})"
    nulls = "" if back else f" OR {column} IS NULL"
    return f"(({column}, id) {sign} ({at}, {last}){nulls})"


def encode_cursor(*parts: Any) -> str:
    """Encode the parts as a cursor, which is opaque to clients."""
    return urlsafe_b64encode(json.dumps(parts, separators=(",", ":")).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, of: str) -> list[Any]:
    """Return the parts of a cursor after the first part. Raise ConfigError if the cursor is invalid, or its first part is not
    `of`.
    """
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
    if column in TEXT_COLUMNS or column.startswith("substr("):
        return isinstance(value, str) and value == storable(value)
    return is_id(value) or isinstance(value, float)
