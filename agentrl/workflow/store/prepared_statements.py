"""Statements of the hot path: compiled by SQLAlchemy once, then given to the driver itself.

Through SQLAlchemy's `execute` the same statements take 2.0 times the processor time of a step on SQLite (494 us instead of 230,
with a call 1,004 instead of 506) and 1.4 times on Postgres (1,373 us instead of 1,041); the other writers of the process wait
meanwhile. These are medians of 24 interleaved pairs of 50 steps (`bench.performance.writes`). Types, transactions and errors
remain SQLAlchemy's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sqlalchemy import Connection, Dialect, Insert, Select, Update

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
    """The SQL text for one driver, the statement's own values, and functions that convert the other values for the driver."""

    text: str
    own: Values
    convert: Mapping[str, Callable[[Any], Any]]

    def values(self, parameters: Values) -> dict[str, Any]:
        values = {**self.own, **parameters}
        for name, convert in self.convert.items():
            values[name] = convert(values[name])
        return values


@dataclass(frozen=True)
class PreparedStatement:
    """A statement that is compiled once. Each call must pass the same names: its bind parameters and the columns that it
    sets.
    """

    statement: Select[Any] | Insert | Update
    _compiled: dict[str, _CompiledStatement] = field(default_factory=dict)

    def rows(self, tx: Connection, values: Values) -> list[Any]:
        """Run the statement once; return its rows as the driver's tuples."""
        compiled = self._compiled_for(tx, values)
        with driver_cursor(tx, compiled.text) as cursor:
            rows: list[Any] = cursor.execute(compiled.text, compiled.values(values)).fetchall()
        return rows

    def run(self, tx: Connection, *rows: Values) -> int:
        """Run the statement once for each of the rows, pipelined on Postgres; return the number of changed rows."""
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
    processors = {name: bind.type.dialect_impl(dialect).bind_processor(dialect) for name, bind in compiled.binds.items()}
    own = {name: value for name, value in compiled.params.items() if name not in names}
    return _CompiledStatement(str(compiled), own, {name: convert for name, convert in processors.items() if convert})
