"""Column types that the tables share, for SQLite and Postgres, and the database's own clock."""

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
    literal,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

Id = BigInteger().with_variant(Integer, "sqlite")


class Utc(TypeDecorator[datetime]):
    """A timestamp in UTC: `timestamptz` on Postgres, ISO text on SQLite; always timezone-aware in Python."""

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
    """The database's own clock, in ms since 1970. Leases are compared with it, never with a worker's clock."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_ms, "sqlite")
def _now_sqlite(element: Any, compiler: Any, **kwargs: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER)"


@compiles(now_ms, "postgresql")
def _now_postgres(element: Any, compiler: Any, **kwargs: Any) -> str:
    return "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"


def id_column() -> Column[int]:
    """Return the primary key: an integer that the table assigns."""
    return Column("id", Id, primary_key=True, autoincrement=True)


def reference_column(name: str, target: str, nullable: bool = False, index: bool = False) -> Column[int]:
    """Return a foreign key to the id of a row in `target`."""
    return Column(name, Id, ForeignKey(f"{target}.id"), nullable=nullable, index=index)


def text_column(name: str, default: str | None = "") -> Column[str]:
    """Return a text column, empty by default; with the default None it may be NULL."""
    return Column(name, Text, nullable=default is None, server_default=default)


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
    """Return a column for a timestamp that is NULL until the event."""
    return Column(name, Utc, nullable=True)


def created_column() -> Column[datetime]:
    """Return the column with the time at which the row was written."""
    return Column("created_at", Utc, nullable=False, server_default=func.now())


def run_name_column() -> Column[str]:
    """Return the column with the name of the row's run."""
    # Kept in the row, so that a run's newest rows are one range of an index: Postgres finds no such range through a join.
    return Column("run", String(64), nullable=False)


def check_one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    """Return the constraint that the column has one of these values."""
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=column)


CLOCK_JUMP_LEASES = 10
"""The number of lease lengths by which a lease may end after now. A later end means that the database's clock was set back."""


def is_lease_free(lease_until: Column[int], seconds: float) -> ColumnElement[bool]:
    """Return the SQL condition that no worker holds a live lease of this length in seconds, by the database's own clock.

    If the clock was set back, a lease counts as live for at most CLOCK_JUMP_LEASES lease lengths.
    """
    until = func.coalesce(lease_until, 0)
    return (until < now_ms()) | (until > now_ms() + int(CLOCK_JUMP_LEASES * seconds * 1000))


def first_time(column: Column[datetime], moment: datetime) -> ColumnElement[datetime]:
    """Return the SQL of the column's timestamp, or of `moment` if it is NULL."""
    return func.coalesce(column, literal(moment, Utc()))
