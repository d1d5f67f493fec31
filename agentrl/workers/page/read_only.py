"""The page's access to a store, by read-only connections and short statements. A read waits for a writer's lock for at most
LOCK_SECONDS, and never upgrades the database.
"""

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from agentrl.workflow.errors import AccessDenied, NotFoundError, ServiceError
from agentrl.workflow.settings import Settings
from agentrl.workflow.store.driver_reader import (
    DriverTransaction,
    connect_postgres,
    newest_revision,
    set_read_only,
    sqlite_transaction,
)
from agentrl.workflow.store.reads.run_rows import run_name
from agentrl.workflow.store.reads.user_sql import connection_parts, sqlite_file

if TYPE_CHECKING:
    from psycopg import Connection

T = TypeVar("T")
STATEMENT_SECONDS = 5.0
"""The time limit of a query of the page, in seconds."""
LOCK_SECONDS = 1.0
"""The longest wait for a writer's lock, in seconds."""
SPARE_SECONDS = 5.0
"""The longest time for which a connection to Postgres is kept for the next query, in seconds."""

_PASSING = (
    "locked", "busy", "interrupted", "unable to open", "disk I/O", "schema has changed", "image is malformed", "not a database",
    "no such table",
)  # fmt: skip
"""Parts of SQLite's messages about temporary errors, for example while a file is being replaced or upgraded."""
_PASSING_STATES = ("08", "42P01", "53", "55", "57")
"""The beginnings of Postgres' SQLSTATE codes of temporary errors. They mean: server unreachable, missing table, out of
resources, lock not available, and stopped or timed out.
"""


class Busy(ServiceError):
    """The error that the store cannot be read at present. The caller may retry soon."""


class _SpareConnection:
    """A connection to Postgres that is kept for the next query, for at most SPARE_SECONDS. In a new connection, Postgres
    reads its catalogs again, which takes up to 40 ms.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: Connection[tuple[Any, ...]] | None = None
        self._closing: threading.Timer | None = None

    def take(self) -> "Connection[tuple[Any, ...]] | None":
        """Return the kept connection if it still answers, else None."""
        import psycopg

        with self._lock:
            connection, self._kept = self._kept, None
            if self._closing is not None:
                self._closing.cancel()
        if connection is None:
            return None
        try:
            connection.execute("SELECT 1")
            connection.rollback()
        except psycopg.Error:
            connection.close()
            return None
        return connection

    def keep(self, connection: "Connection[tuple[Any, ...]]") -> None:
        """Keep the connection, or close it if another one is kept."""
        with self._lock:
            if self._kept is not None:
                connection.close()
            if connection.closed:
                return
            self._kept = connection
            self._closing = threading.Timer(SPARE_SECONDS, self._close, [connection])
            self._closing.daemon = True
            self._closing.start()

    def _close(self, connection: "Connection[tuple[Any, ...]]") -> None:
        with self._lock:
            if self._kept is connection:
                connection.close()
                self._kept = None


class ReadOnlyStore:
    """A store that is only read. No lock is held between queries. On Postgres, one connection is kept for SPARE_SECONDS."""

    def __init__(self, where: Settings) -> None:
        """Set the database that the store reads, by the settings `where`. No connection is opened yet."""
        self.settings = where
        self._file = sqlite_file(where)
        self._revision = ""
        self._spare = _SpareConnection()

    def ask(self, query: Callable[[DriverTransaction], T]) -> T:
        """Run `query` in one read transaction, and return its result. Raise Busy if the database is locked or does not answer,
        or the query took longer than STATEMENT_SECONDS. Raise NotFoundError if the database file does not exist. Raise
        ServiceError if the database is not at this code's revision.
        """
        with self._sqlite(self._file) if self._file is not None else self._postgres() as tx:
            if not self._revision:
                self._check_revision(tx)
            return query(tx)

    def ask_about_run(self, run: int, query: Callable[[DriverTransaction, str], T]) -> T:
        """Look up the name of the run with this number, and run `query` with the name as its second argument, both in one read
        transaction. Raise NotFoundError if the run does not exist. Raise ServiceError if the store cannot be read; see `ask`.
        """
        return self.ask(lambda tx: query(tx, run_name(tx, run)))

    def _check_revision(self, tx: DriverTransaction) -> None:
        exists = (
            "SELECT name FROM sqlite_master WHERE name = 'alembic_version'"
            if tx.is_sqlite
            else "SELECT 1 AS name WHERE to_regclass('alembic_version') IS NOT NULL"
        )
        rows = tx.rows("SELECT version_num FROM alembic_version", {}) if tx.rows(exists, {}) else []
        revision = str(rows[0]["version_num"]) if rows else ""
        newest = newest_revision()
        if revision > newest:
            raise ServiceError(
                f"A newer agentrl wrote this store (revision {revision}; known here: {newest}).", "Use that version."
            )
        if revision < newest:
            message = (
                f"The store is of revision {revision}; this agentrl reads {newest}."
                if revision
                else "There is no store in this database."
            )
            raise ServiceError(
                message, "Type: agentrl db upgrade" if revision else "Create one: agentrl submit --dataset gsm8k"
            )
        self._revision = revision

    @contextmanager
    def _sqlite(self, file: Path) -> Iterator[DriverTransaction]:
        if not (file.is_file() and file.stat().st_size):
            raise NotFoundError(f"There is no store {str(file)!r}.", "Create one: agentrl submit --dataset gsm8k")
        try:
            with sqlite_transaction(file, LOCK_SECONDS, STATEMENT_SECONDS, _read_json) as tx:
                yield tx
        except sqlite3.Error as error:
            self._revision = ""  # it may be another store by now
            _translate(error, any(word in str(error) for word in _PASSING))

    @contextmanager
    def _postgres(self) -> Iterator[DriverTransaction]:
        import psycopg

        from agentrl.workflow.store.connect import CLIENT_TIMEOUTS, database_url

        parts = {**CLIENT_TIMEOUTS, "connect_timeout": 5, **connection_parts(database_url(self.settings.database))}
        milliseconds = {"statement_timeout": int(STATEMENT_SECONDS * 1000), "lock_timeout": int(LOCK_SECONDS * 1000)}
        # Starting parallel workers takes longer than most queries of the page.
        settings = {**milliseconds, "max_parallel_workers_per_gather": 0}
        try:
            connection = self._spare.take() or connect_postgres(parts, settings)
            try:
                set_read_only(connection)
                connection.prepare_threshold = None  # a plan for all parameters may be far slower than one for these
                with connection.transaction():
                    yield DriverTransaction(connection, is_sqlite=False)
            finally:
                self._spare.keep(connection)
        except psycopg.errors.InsufficientPrivilege as error:
            reason = " ".join(str(error).split())[:200]
            raise AccessDenied(
                f"This login may not read the store: {reason}.", "Use a login that may SELECT from it."
            ) from error
        except psycopg.Error as error:
            self._revision = ""
            _translate(error, not error.sqlstate or error.sqlstate.startswith(_PASSING_STATES))


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


def _translate(error: Exception, passing: bool) -> NoReturn:
    """Raise Busy if `passing` says that the error is temporary. Otherwise raise the error unchanged."""
    if not passing:
        raise error
    reason = " ".join(str(error).split())[:200]
    hint = "Try again later. `agentrl doctor` checks whether the store answers."
    if "unable to open" in reason:
        hint = "If its folder is not writable, copy the store with its -wal and -shm files to a writable folder."
    raise Busy(f"The store cannot be read now: {reason}.", hint) from error
