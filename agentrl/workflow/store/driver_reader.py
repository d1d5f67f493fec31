"""Read-only database access through the plain driver (sqlite3 or psycopg). It is fast to start: importing SQLAlchemy takes
longer than listing rows.

A query of plain SQL (`select_rows`) accepts a `DriverTransaction`. It also accepts a transaction of SQLAlchemy, and then uses
the driver connection of that transaction.
"""

import json
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote

from agentrl.workflow.sql.readonly import sqlite_url
from agentrl.workflow.tables.column_kinds import DOCUMENTS, FLAGS, MOMENTS

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import Connection

    from agentrl.workflow.store.connect import Database

P = ParamSpec("P")
T = TypeVar("T")
Row = Mapping[str, Any]

_SQLITE = re.compile(r"sqlite(?:\+pysqlite)?:///([^?#]+)")
_POSTGRES = re.compile(
    r"postgres(?:ql)?(?:\+psycopg)?://(?:(?P<user>[\w.%-]*)(?::(?P<password>[\w.%-]*))?@)?(?P<host>[\w.-]*)(?::(?P<port>\d+))?"
    r"/(?P<dbname>[\w-]+)(?:\?(?P<more>[\w=&%/.-]+))?"
)
"""The pattern of plain Postgres URLs: all drivers parse them in the same way. Other URLs are left to SQLAlchemy."""
_NAMED_PARAMETER = re.compile(r"(?<![:\w]):(\w+)(?!:)")
WAIT_SECONDS = 30.0
"""The longest wait of a command for SQLite's lock, in seconds."""
STEPS_BETWEEN = 10_000
"""The number of SQLite instructions between two checks of the timeout."""
PLANNER_SETTINGS = {"random_page_cost": 1.1}
"""The planner settings of each Postgres connection. By default Postgres assumes a spinning disk, and would read a whole table
to find the newest steps of one run.
"""


class Queryable(Protocol):
    """A store that can be read: a `Database`, a `Reader`, the page's `ReadOnlyStore`, or an open transaction."""

    def ask(self, query: Callable[[Any], T]) -> T:
        """Run `query` in one read transaction."""


class DriverTransaction:
    """A read transaction on a connection of the plain driver."""

    def __init__(self, connection: Any, is_sqlite: bool, read_json: Callable[[str], Any] = json.loads) -> None:
        """Wrap the driver's read-only connection. `read_json` parses SQLite's JSON columns."""
        self._connection = connection
        self.is_sqlite = is_sqlite
        self._readers = _sqlite_readers(read_json) if is_sqlite else _POSTGRES_READERS

    def ask(self, query: Callable[[Any], T]) -> T:
        """Run `query` in this transaction."""
        return query(self)

    def text(self, query: str) -> str:
        """Return the query with its parameters in the driver's syntax."""
        return _driver_text(query, self.is_sqlite)

    def rows(self, query: str, parameters: Mapping[str, Any]) -> list[Row]:
        """Run a query and return its rows. See `select_rows`."""
        return _read_rows(self._connection.execute(self.text(query), parameters), self._readers)


def _driver_text(query: str, is_sqlite: bool) -> str:
    return query if is_sqlite else _NAMED_PARAMETER.sub(r"%(\1)s", query.replace("%", "%%"))


class Reader:
    """A database that commands and the Python API read through the plain driver.

    In three cases `Database` reads instead, with SQLAlchemy:

    - The database has another revision. `Database` upgrades it or raises an error.
    - The database is unreachable. `Database` retries, or raises an error with the cause.
    - The drivers do not all parse the URL in the same way.
    """

    def __init__(self, url: str, open_database: "Callable[[], Database]") -> None:
        """Store the URL and the function that opens the database with SQLAlchemy. No connection is opened."""
        self.url = url
        self._file, self._parts = sqlite_path(url), postgres_parts(url)
        self._open_database = open_database
        self._is_current = False
        self._database: Database | None = None

    def ask(self, query: Callable[[Any], T]) -> T:
        """Run `query` in a read transaction. Raise ServiceError if the database has another revision or is unreachable."""
        if self._database is None and (self._file or self._parts):
            try:
                with self._transaction() as tx:
                    if self._is_current or _revision(tx) == newest_revision():
                        self._is_current = True
                        return query(tx)
            except _driver_error_types(self._file is None):
                pass  # `Database` tries again, or says what is wrong
        self._database = self._database or self._open_database()
        return self._database.ask(query)

    def close(self) -> None:
        """Close the connections. A later query opens them again."""
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _transaction(self) -> AbstractContextManager[DriverTransaction]:
        if self._file is None:
            return postgres_transaction({"connect_timeout": 10} | self._parts, {})
        return sqlite_transaction(self._file, WAIT_SECONDS)


@contextmanager
def sqlite_transaction(
    file: Path, lock_seconds: float, statement_seconds: float | None = None, read_json: Callable[[str], Any] = json.loads
) -> Iterator[DriverTransaction]:
    """Open a read transaction of a SQLite file.

    Args:
        lock_seconds: the longest wait while a writer has the lock, in seconds.
        statement_seconds: the time after which the transaction's statements are interrupted, in seconds; None for no limit.
        read_json: the function that parses a JSON text.
    """
    opened = sqlite3.connect(sqlite_url(file, "rw"), uri=True, timeout=lock_seconds, isolation_level=None)
    with closing(opened) as connection:
        connection.execute("PRAGMA query_only=ON")
        if statement_seconds is not None:
            end = time.monotonic() + statement_seconds
            connection.set_progress_handler(lambda: time.monotonic() > end, STEPS_BETWEEN)
        connection.execute("BEGIN")
        yield DriverTransaction(connection, is_sqlite=True, read_json=read_json)


@contextmanager
def postgres_transaction(parts: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[DriverTransaction]:
    """Open a read transaction of a Postgres database. For the arguments see `connect_postgres`."""
    with connect_postgres(parts, settings) as connection:
        set_read_only(connection)
        yield DriverTransaction(connection, is_sqlite=False)


def set_read_only(connection: "psycopg.Connection[tuple[Any, ...]]") -> None:
    """Let the connection's transactions only read, each from one snapshot of the database."""
    import psycopg

    connection.read_only, connection.isolation_level = True, psycopg.IsolationLevel.REPEATABLE_READ


def connect_postgres(parts: Mapping[str, Any], settings: Mapping[str, Any]) -> "psycopg.Connection[tuple[Any, ...]]":
    """Connect to Postgres with `PLANNER_SETTINGS`. `parts` are the arguments of `psycopg.connect`. `settings` are more server
    settings of the session, which override those in `parts["options"]`.
    """
    import psycopg

    chosen = [f"-c {name}={value}" for name, value in {**PLANNER_SETTINGS, **settings}.items()]
    options = " ".join([parts["options"], *chosen] if "options" in parts else chosen)
    return psycopg.connect(**{"client_encoding": "utf8"} | dict(parts) | {"options": options})


def _driver_error_types(postgres: bool) -> tuple[type[Exception], ...]:
    if not postgres:
        return (sqlite3.Error,)
    import psycopg

    return (psycopg.Error,)


def sqlite_path(url: str) -> Path | None:
    """Return the path of the file in a plain SQLite URL; None for any other URL."""
    match = _SQLITE.fullmatch(url)
    return Path(unquote(match[1])) if match and match[1] != ":memory:" else None


def postgres_parts(url: str) -> dict[str, Any]:
    """Return the arguments of `psycopg.connect` for a plain Postgres URL; empty for any other URL."""
    match = _POSTGRES.fullmatch(url)
    if not match:
        return {}
    parts = {key: unquote(value) for key, value in match.groupdict().items() if value and key != "more"}
    return parts | dict(parse_qsl(match["more"] or ""))


def newest_revision() -> str:
    """Return the newest database revision that this code knows, from the file names of the migrations."""
    from agentrl import migrations

    folder = Path(str(migrations.__file__)).parent / "versions"
    return max(file.name for file in folder.glob("[0-9]*_*.py")).partition("_")[0]


def _revision(tx: DriverTransaction) -> str:
    return str(tx.rows("SELECT version_num FROM alembic_version", {})[0]["version_num"])


def sql_read_transaction(query: Callable[Concatenate[Any, P], T]) -> "Callable[Concatenate[Queryable | Connection, P], T]":
    """Turn a query of plain SQL (`select_rows`) into a function that takes a store or an open transaction.

    With a store, the query runs in one read transaction. With an open transaction, the query becomes part of it.
    """

    @wraps(query)
    def run(db: "Queryable | Connection", /, *args: P.args, **kwargs: P.kwargs) -> T:
        ask = getattr(db, "ask", None)
        if ask is None:  # a connection of SQLAlchemy that is in a transaction
            return query(db, *args, **kwargs)
        result: T = ask(lambda tx: query(tx, *args, **kwargs))
        return result

    return run


def select_rows(tx: Any, query: str, /, **parameters: Any) -> list[Row]:
    """Run a query of plain SQL and return its rows. The query names its parameters as `:name`.

    SQLite returns times, booleans and JSON as text and numbers. So each result column is converted to the type that the column
    of the same name has in `tables.schema`, in which a name has the same type in all tables. A query that computes a time, a
    boolean or JSON must therefore give the result the name of a column of that type.
    """
    if isinstance(tx, DriverTransaction):
        return tx.rows(query, parameters)
    text = _driver_text(query, is_sqlite(tx))
    with driver_cursor(tx, text) as cursor:
        cursor.execute(text, parameters)
        return _read_rows(cursor, _SQLITE_READERS if is_sqlite(tx) else _POSTGRES_READERS)


def is_sqlite(tx: Any) -> bool:
    """Return True if the transaction, of the plain driver or of SQLAlchemy, is one of SQLite."""
    return tx.is_sqlite if isinstance(tx, DriverTransaction) else bool(tx.dialect.name == "sqlite")


@contextmanager
def driver_cursor(tx: "Connection", text: str) -> Iterator[Any]:
    """Open the driver's cursor in a transaction of SQLAlchemy, to run `text`. Errors of the driver are raised as errors of
    SQLAlchemy.
    """
    cursor: Any = tx.connection.cursor()
    try:
        yield cursor
    except Exception as error:  # noqa: BLE001 - it tells a lost connection from a violated constraint, and raises its own
        tx._handle_dbapi_exception(error, text, None, cursor, None)
    finally:
        cursor.close()


Readers = Mapping[str, Callable[[Any], Any]]
"""The type of a mapping from a column's name to the function that converts the driver's value to a Python value."""


def _read_rows(cursor: Any, readers: Readers) -> list[Row]:
    names = [column[0] for column in cursor.description]
    rows: list[Any] = [dict(zip(names, row, strict=True)) for row in cursor]
    for name in readers.keys() & set(names):
        read = readers[name]
        for row in rows:
            row[name] = read(row[name])
    return rows


def _sqlite_readers(read_json: Callable[[str], Any]) -> Readers:
    """Return the functions that convert SQLite's values to Python values, by column name.

    A value of an unexpected type is not converted, because another program may have written it. A text that is no time becomes
    None.
    """

    def read_document(value: Any) -> Any:
        return read_json(value) if isinstance(value, str) else value

    def read_moment(value: Any) -> Any:
        try:
            return datetime.fromisoformat(value).replace(tzinfo=UTC) if isinstance(value, str) else value
        except ValueError:
            return None

    def read_flag(value: Any) -> Any:
        return None if value is None else bool(value)

    kinds = ((DOCUMENTS, read_document), (MOMENTS, read_moment), (FLAGS, read_flag))
    return {name: read for names, read in kinds for name in names}


def _utc(value: datetime | None) -> datetime | None:
    """Convert a time to UTC. Postgres returns times in the time zone of the session."""
    return None if value is None else value.astimezone(UTC)


_SQLITE_READERS = _sqlite_readers(json.loads)
_POSTGRES_READERS: Readers = dict.fromkeys(MOMENTS, _utc)


def among(numbers: Iterable[int]) -> str:
    """Return the numbers as the list of an SQL IN. For an empty list return `NULL`, which matches no row."""
    return ", ".join(str(int(number)) for number in numbers) or "NULL"
