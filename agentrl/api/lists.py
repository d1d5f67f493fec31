"""Lists of rows that are read from the database when they are iterated, with exports to a DataFrame, an Arrow table or a
dataset.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

from agentrl.api import html
from agentrl.workflow.store.reads.paging import Page, Paging
from agentrl.workflow.tables.view_row import ViewRow

if TYPE_CHECKING:
    import datasets
    import pandas
    import pyarrow

R = TypeVar("R", bound=ViewRow)
V = TypeVar("V")
PAGE = 1000
"""The number of rows in a page."""
SHOWN = 10
"""The most rows that a notebook shows."""


@dataclass(frozen=True)
class Rows(Generic[R, V]):
    """A list of rows. Each loop over the list reads the rows from the database again, page by page. So a later loop yields more
    rows while the run continues.

    Args:
        kind: the class of the rows. Its fields are the columns.
        read: the function that returns one page.
        value: the function that converts a row to the value that a loop over the list yields.
    """

    kind: type[R]
    read: Callable[[Paging], Page[R]]
    value: Callable[[R], V]

    def __iter__(self) -> Iterator[V]:
        return map(self.value, self.rows())

    def rows(self) -> Iterator[R]:
        """Yield the rows, which are mappings from column to value."""
        for page in self._pages():
            yield from page

    def head(self, count: int = SHOWN) -> list[V]:
        """Return the first `count` rows."""
        return list(islice(self, count))

    def to_arrow(self) -> "pyarrow.Table":
        """Return all rows as an Arrow table. Only `kind` determines the column types. Nested values are JSON text."""
        import pyarrow

        schema = pyarrow.schema([(name, _arrow_type(hint)) for name, hint in self.kind.types().items()])
        batches = [
            pyarrow.RecordBatch.from_pylist([_plain(row) for row in page], schema=schema) for page in self._pages() if page
        ]
        return pyarrow.Table.from_batches(batches, schema)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return all rows as a DataFrame. Integer columns that may have missing values have the dtype `Int64`."""
        import pandas

        table = self.to_arrow()
        frame: pandas.DataFrame = table.to_pandas()
        for name, hint in self.kind.types().items():
            if int in get_args(hint):
                frame[name] = pandas.array(table.column(name).to_pylist(), dtype="Int64")
        return frame

    def to_dataset(self) -> "datasets.Dataset":
        """Return all rows as a `datasets.Dataset`."""
        import datasets

        return datasets.Dataset(self.to_arrow())

    def _pages(self) -> Iterator[tuple[R, ...]]:
        cursor = ""
        while True:
            page = self.read(Paging(size=PAGE, cursor=cursor))
            yield page.rows
            cursor = page.next
            if not cursor:
                return

    def __repr__(self) -> str:
        return f"<{self.kind.VIEW.removeprefix('v_')}: iterate, .head(), .to_pandas(), .to_arrow(), .to_dataset()>"

    def _repr_html_(self) -> str:
        rows = list(islice(self.rows(), SHOWN + 1))
        return html.table(list(self.kind.COLUMNS), [list(row.values()) for row in rows[:SHOWN]], more=len(rows) > SHOWN)


@dataclass(frozen=True)
class Table:
    """The result of a SELECT: named columns and rows."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the result as a DataFrame."""
        import pandas

        return pandas.DataFrame.from_records(list(self.rows), columns=list(self.columns))

    def _repr_html_(self) -> str:
        return html.table(self.columns, self.rows[:SHOWN], more=len(self.rows) > SHOWN)


def _arrow_type(hint: Any) -> "pyarrow.DataType":
    import pyarrow

    (kind,) = [member for member in (get_args(hint) or (hint,)) if member is not type(None)] or [str]
    arrow_types: Mapping[Any, pyarrow.DataType] = {
        bool: pyarrow.bool_(),
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        datetime: pyarrow.timestamp("us", tz="UTC"),
    }
    return arrow_types.get(kind, pyarrow.string())


def _plain(row: ViewRow) -> dict[str, Any]:
    return {name: _text(value) if isinstance(value, Mapping | list | tuple) else value for name, value in row.items()}


def _text(value: Any) -> str:
    return json.dumps(dict(value) if isinstance(value, Mapping) else list(value), ensure_ascii=False)
