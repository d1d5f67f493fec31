"""Statements of frequent queries. SQLAlchemy compiles each statement once, and the driver executes it directly.

SQLAlchemy's `execute` needs more processor time for the same statements of a step. On SQLite it needs 2.0 times as much (494 us
instead of 230; for a step with a call, 1,004 instead of 506), on Postgres 1.4 times as much (1,373 us instead of 1,041). During
that time the other writers of the process wait. These are medians of 24 interleaved pairs of 50 steps
(`bench.performance.writes`). Types, transactions and errors are still those of SQLAlchemy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sqlalchemy import Connection, Dialect, Float, Insert, Numeric, Select, Update
from sqlalchemy.types import TypeEngine

from agentrl.workflow.store.driver_reader import driver_cursor

Values = Mapping[str, Any]


@cache
def _dialect(name: str) -> Dialect:
    if name == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.dialect(paramstyle="named")
    from sqlalchemy.dialects.postgresql import psycopg

    return psycopg.dialect()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _CompiledStatement:
    """A statement that is compiled for one driver."""

    text: str
    own: Values
    convert: Mapping[str, Callable[[Any], Any]]
    read: Sequence[tuple[int, Callable[[Any], Any]]]

    def values(self, parameters: Values) -> dict[str, Any]:
        values = {**self.own, **parameters}
        for name, convert in self.convert.items():
            values[name] = convert(values[name])
        return values

    def typed(self, row: Sequence[Any]) -> tuple[Any, ...]:
        cells = list(row)
        for place, read in self.read:
            cells[place] = read(cells[place])
        return tuple(cells)


@dataclass(frozen=True)
class PreparedStatement:
    """A statement that is compiled once. Each call passes values for the same bind parameters and columns."""

    statement: Select[Any] | Insert | Update
    _compiled: dict[str, _CompiledStatement] = field(default_factory=dict)

    def rows(self, tx: Connection, values: Values) -> list[Any]:
        """Run the statement once; return the result rows as tuples, with values of the columns' types."""
        compiled = self._compiled_for(tx, values)
        with driver_cursor(tx, compiled.text) as cursor:
            rows: list[Any] = cursor.execute(compiled.text, compiled.values(values)).fetchall()
        return [compiled.typed(row) for row in rows] if compiled.read else rows

    def mappings(self, tx: Connection, values: Values) -> list[dict[str, Any]]:
        """Run a query once; return the result rows as values by column name."""
        assert isinstance(self.statement, Select)
        names = self.statement.selected_columns.keys()
        return [dict(zip(names, row, strict=True)) for row in self.rows(tx, values)]

    def run(self, tx: Connection, *rows: Values) -> int:
        """Run the statement for each element of `rows`; return the number of changed table rows. On Postgres the executions are
        pipelined.
        """
        compiled = self._compiled_for(tx, rows[0])
        with driver_cursor(tx, compiled.text) as cursor:
            if len(rows) == 1:
                cursor.execute(compiled.text, compiled.values(rows[0]))
            else:
                cursor.executemany(compiled.text, [compiled.values(row) for row in rows])
            changed: int = cursor.rowcount
        return changed

    def _compiled_for(self, tx: Connection, values: Values) -> _CompiledStatement:
        dialect = tx.dialect.name
        if dialect not in self._compiled:
            self._compiled[dialect] = _compile(self.statement, _dialect(dialect), list(values))
        return self._compiled[dialect]


def _compile(statement: Any, dialect: Dialect, names: Sequence[str]) -> _CompiledStatement:
    compiled = statement.compile(dialect=dialect, column_keys=names)
    processors = {name: bind.type.dialect_impl(dialect).bind_processor(dialect) for bind, name in compiled.bind_names.items()}
    own = {name: value for name, value in compiled.params.items() if name not in names}
    columns = statement.selected_columns if isinstance(statement, Select) else ()
    readers = [_reader(column.type, dialect) for column in columns]
    return _CompiledStatement(
        str(compiled),
        own,
        {name: convert for name, convert in processors.items() if convert},
        [(place, read) for place, read in enumerate(readers) if read],
    )


def _reader(kind: TypeEngine[Any], dialect: Dialect) -> Callable[[Any], Any] | None:
    """Return the function that converts a value of the driver to a value of the column's type; None if both are the same."""
    is_number = isinstance(kind, Numeric | Float)  # both drivers return floats
    return None if is_number else kind.dialect_impl(dialect).result_processor(dialect, None)
