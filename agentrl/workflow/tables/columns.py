"""Column types that the tables share, for SQLite and Postgres, and the database's clock."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ColumnElement,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Integer,
    String,
    Text,
    TypeDecorator,
    func,
    or_,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

Id = BigInteger().with_variant(Integer, "sqlite")


class Utc(TypeDecorator[datetime]):
    """A timestamp in UTC: `timestamptz` on Postgres and ISO text on SQLite. In Python it is always timezone-aware."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert the timestamp to UTC."""
        return value.astimezone(UTC) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Add the time zone UTC, which SQLite does not store."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class now_ms(FunctionElement[int]):  # noqa: N801 - reads as a SQL function
    """The SQL for the database's time in ms since 1970. Leases use this time, never a worker's clock."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_ms, "sqlite")
def _now_sqlite(element: Any, compiler: Any, **kwargs: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER)"


@compiles(now_ms, "postgresql")
def _now_postgres(element: Any, compiler: Any, **kwargs: Any) -> str:
    return "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"


def id_column() -> Column[int]:
    """Return the column of a primary key: an integer that the database assigns."""
    return Column("id", Id, primary_key=True, autoincrement=True)


def reference_column(name: str, target: str, nullable: bool = False, index: bool = False) -> Column[int]:
    """Return a foreign key to the id of a row in `target`."""
    return Column(name, Id, ForeignKey(f"{target}.id"), nullable=nullable, index=index)


def text_column(name: str, default: str | None = "") -> Column[str]:
    """Return a text column. If `default` is None the column may be NULL; else `default` is its default value."""
    return Column(name, Text, nullable=default is None, server_default=default)


def place_columns(name: str) -> tuple[Column[int], Column[int]]:
    """Return the columns of the place at which the row's `text` contains the value of the column `name`, which is then empty.

    The place is the position of the first character, counted from 1, and the number of characters. If the text does not contain
    the value, the place is NULL, and the column `name` has the value.
    """
    return Column(f"{name}_start", Integer, nullable=True), Column(f"{name}_length", Integer, nullable=True)


def count_column(name: str) -> Column[int]:
    """Return a column for a count that starts at 0."""
    return Column(name, Id, nullable=False, server_default="0")


def float_column(name: str) -> Column[float]:
    """Return a column for a float that may be NULL."""
    return Column(name, Float(53), nullable=True)


def seconds_column(name: str) -> Column[float]:
    """Return a column for a duration in seconds that starts at 0."""
    return Column(name, Float(53), nullable=False, server_default="0")


def time_column(name: str) -> Column[datetime]:
    """Return a column for the timestamp of an event. It is NULL until the event happens."""
    return Column(name, Utc, nullable=True)


def created_column() -> Column[datetime]:
    """Return the column with the time at which the row was written."""
    return Column("created_at", Utc, nullable=False, server_default=func.now())


def run_name_column() -> Column[str]:
    """Return the column with the name of the row's run."""
    # Kept in the row, so that a run's newest rows are one range of an index: Postgres finds no such range through a join.
    return Column("run", String(64), nullable=False)


def check_one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    """Return the constraint that the column must contain one of these values."""
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


CLOCK_JUMP_LEASES = 10
"""The maximum time from now to the end of a lease, in lease lengths. If a lease ends later, the database's clock was set back.
"""


def is_lease_free(lease_until: Column[int], seconds: "float | ColumnElement[float]") -> ColumnElement[bool]:
    """Return the SQL condition that no worker holds a live lease. The condition uses the database's clock.

    If that clock was set back, a lease may end too late. So a lease that ends more than CLOCK_JUMP_LEASES lease lengths from
    now counts as free. `lease_until` is the column with the end of the lease, in ms since 1970. `seconds` is the length of a
    lease, in seconds.
    """
    until = func.coalesce(lease_until, 0)
    return (until < now_ms()) | (until > now_ms() + CLOCK_JUMP_LEASES * seconds * 1000)


def is_one_of(column: Column[str], values: Iterable[str]) -> ColumnElement[bool]:
    """Return the SQL condition that the column has one of the values. It does not use IN, because a statement with IN cannot be
    compiled in advance.
    """
    return or_(*(column == value for value in values))
