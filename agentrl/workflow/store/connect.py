"""The database and its transactions: SQLite in WAL mode or Postgres, behind the same functions.

A write transaction acquires SQLite's lock when it begins. A deferred transaction could fail in the middle, because another
writer has the lock (measured: 38,081 failures in 5 s with four writers). A transaction that loses its connection is run again.
A repetition is safe, because every write is idempotent by its keys.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import URL, Connection, Engine, ExceptionContext, Table, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from agentrl.workflow.errors import AccessDenied, ConfigError, ServiceError
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.store.driver_reader import PLANNER_SETTINGS, driver_cursor

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

P = ParamSpec("P")
T = TypeVar("T")

RETRY_SECONDS = 30.0
"""The time for which a transaction is retried while the database is unreachable, in seconds."""

POOL_SIZE = 8
"""The maximum number of Postgres connections of a process. The threads of the process share them, because a small server allows
only a few dozen.
"""

POOL_SECONDS = 60.0
"""The longest wait of a thread for a free connection, in seconds."""

DENIED = "42501"
"""The Postgres error code (SQLSTATE) for a statement that the login is not allowed to run."""

CLIENT_TIMEOUTS = {
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
"""The Postgres connection options that detect a silently cut network link after about 10 s. With the kernel's defaults it would
take 15 minutes or two hours. `tcp_user_timeout` is in ms, all other times are in seconds.
"""

_SERVER_TIMEOUTS = {
    "tcp_keepalives_idle": 5,
    "tcp_keepalives_interval": 2,
    "tcp_keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "idle_in_transaction_session_timeout": 15_000,
    "lock_timeout": 10_000,
}
"""The corresponding timeouts of the Postgres server. Keepalives are in seconds, the others in ms. If a client is cut off or
stopped in a transaction, the server releases the client's row locks. A statement that waits too long for a lock fails.
"""

URL_HINT = "Set AGENTRL_DATABASE_URL to sqlite:///FILE or postgresql://USER@HOST/NAME."

_UNUSABLE_FILE_ERRORS = ("not a database", "unable to open", "readonly database", "disk image is malformed")
"""Parts of SQLite's error messages for a file that SQLite cannot use. A retry does not help."""
SMALLEST_PAGE = 512
"""The size of the smallest SQLite database that is not empty, in bytes."""
_DISK_FULL_ERROR = "database or disk is full"


def database_url(text: str) -> URL:
    """Parse the URL of a database. Raise ConfigError if its kind is unknown, or its password is not escaped."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:  # not shown: it may hold a password
        raise ConfigError("AGENTRL_DATABASE_URL is not a database URL.", URL_HINT) from error
    if "@" in (url.host or ""):  # a part of the password
        raise ConfigError("The password in AGENTRL_DATABASE_URL is not escaped.", "Write @ as %40, or set PGPASSWORD instead.")
    if url.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise ConfigError(f"AGENTRL_DATABASE_URL has an unknown scheme, {url.drivername!r}: use SQLite or Postgres.", URL_HINT)
    if url.database in (None, "", ":memory:"):
        raise ConfigError(
            "AGENTRL_DATABASE_URL names no SQLite file. A database in memory cannot be shared by processes.", URL_HINT
        )
    return url


def _may_be_sqlite(file: Path) -> bool:
    """Return False if the file is too short for a SQLite database. SQLite would overwrite such a file.

    A missing or empty file is accepted. A longer file is accepted too, because SQLite checks it.

    This function never opens the file. If it closed the file again, all locks of this process on the file would be released,
    SQLite's too. Another process could then believe that it is the last user, and delete the log that this process still uses.
    """
    try:
        size = file.stat().st_size
    except OSError:
        return True
    return size == 0 or size >= SMALLEST_PAGE


class Database:
    """A database. Threads may share the object, because each transaction has its own connection."""

    def __init__(self, url: str) -> None:
        """Create the folder of a SQLite file; open no connection yet. Raise ConfigError if the URL is not that of a SQLite file
        or a Postgres database. Raise ServiceError if the folder cannot be created, or the file is not a database.
        """
        self.url = database_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.engine = self._sqlite() if self.is_sqlite else self._postgres()
        self._group_commit = _GroupCommit(self.engine)

    def _sqlite(self) -> Engine:
        file = Path(str(self.url.database))
        folder = file.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"Cannot create the database's folder {str(folder)!r}: {error.strerror}."
            raise ServiceError(message, "Set AGENTRL_HOME, or AGENTRL_DATABASE_URL, to another folder.") from error
        if not _may_be_sqlite(file):  # SQLite takes a short file for an empty one, and writes over it
            message = f"The database {str(file)!r} cannot be used: file is not a database."
            raise ServiceError(message, "Use another database. This one was not changed.")
        engine = create_engine(self.url, connect_args={"timeout": 30.0}, pool_size=32, max_overflow=64)
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_immediate)
        event.listen(engine, "handle_error", _refuse_unusable)
        return engine

    def _postgres(self) -> Engine:
        engine = create_engine(
            self.url,
            pool_size=POOL_SIZE // 2,
            max_overflow=POOL_SIZE - POOL_SIZE // 2,
            pool_timeout=POOL_SECONDS,
            pool_pre_ping=True,
            connect_args={**CLIENT_TIMEOUTS, "client_encoding": "utf8"},
        )
        event.listen(engine, "connect", _configure_postgres)
        event.listen(engine, "handle_error", _refuse_denied)
        return engine

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a read transaction that sees one state of the database. Raise ServiceError at once if the database is
        unreachable.
        """
        with self._translate_errors(), self._connect_for_reading() as connection, connection.begin():
            yield connection

    def ask(self, query: Callable[[Connection], T]) -> T:
        """Run `query` in a read transaction; repeat it if the connection is lost. After RETRY_SECONDS raise ServiceError."""
        return self._retry(lambda: self._read_once(query))

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a write transaction; repeat it if the connection is lost. After RETRY_SECONDS raise ServiceError."""
        return self._retry(lambda: self._write_once(work))

    def _read_once(self, query: Callable[[Connection], T]) -> T:
        with self._connect_for_reading() as connection, connection.begin():
            return query(connection)

    def _connect_for_reading(self) -> Connection:
        """Open a connection whose transactions see one state: SQLite's default, REPEATABLE READ on Postgres."""
        options = {"agentrl_read": True} if self.is_sqlite else {"isolation_level": "REPEATABLE READ"}
        return self.engine.connect().execution_options(**options)

    def _write_once(self, work: Callable[[Connection], T]) -> T:
        if self.is_sqlite:
            return self._group_commit.run(work)
        with self.engine.begin() as connection:
            return work(connection)

    def _retry(self, attempt: Callable[[], T]) -> T:
        deadline = time.monotonic() + RETRY_SECONDS
        pause = 0.05
        while True:
            try:
                return attempt()
            except PoolTimeout as error:
                raise self._service_error(
                    f"all {POOL_SIZE} connections of this process have been busy for {POOL_SECONDS:g} s"
                ) from error
            except DBAPIError as error:
                if not _is_transient(error):
                    raise
                if time.monotonic() > deadline:
                    raise self._unreachable_error(error) from error
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OperationalError as error:
            if error.connection_invalidated or _is_transient(error):
                raise self._unreachable_error(error) from error
            raise

    def _unreachable_error(self, error: DBAPIError) -> ServiceError:
        return self._service_error(" ".join(str(error.orig).split()))

    def _service_error(self, reason: str) -> ServiceError:
        url = self.url.render_as_string(hide_password=True)
        return ServiceError(f"The database {url} does not answer: {reason}.", "Check AGENTRL_DATABASE_URL; `agentrl doctor`.")

    def close(self) -> None:
        self._group_commit.close()
        self.engine.dispose()


@dataclass
class _PendingWrite:
    """One thread's write in a shared transaction, and its result."""

    work: Callable[[Connection], Any]
    done: bool = False
    result: Any = None
    error: BaseException | None = None


class _GroupCommit:
    """Group commit for SQLite: one thread of the process commits the writes of all threads that wait.

    SQLite allows one writer at a time. A writer that finds the database locked sleeps and tries again. To avoid this, the
    process acquires the lock once for all of its threads. While one thread writes, the others queue, and the next thread
    commits all queued writes in one transaction. Each of these writes runs in a savepoint, so a failing write does not roll
    back the others.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._turn = threading.Lock()
        self._line: deque[_PendingWrite] = deque()

    def run(self, work: Callable[[Connection], T]) -> T:
        """Queue the write, wait until it is committed, and return its result."""
        mine = _PendingWrite(work)
        self._line.append(mine)
        with self._turn:
            if not mine.done:
                self._run_waiting()
        if mine.error is not None:
            raise mine.error
        result: T = mine.result
        return result

    def _run_waiting(self) -> None:
        batch = [self._line.popleft() for _ in range(len(self._line))]
        left = batch
        try:
            while left:
                culprit = self._commit(left)
                left = [errand for errand in left if errand is not culprit] if culprit else []
        except BaseException as error:  # noqa: BLE001 - nothing was committed: each thread raises it, or tries again
            for errand in left:
                errand.error = errand.error or error
            self._release_connection()
        finally:
            for errand in batch:
                errand.done = True

    def _commit(self, errands: Sequence[_PendingWrite]) -> _PendingWrite | None:
        """Run the writes in one transaction.

        If a write fails and SQLite rolls back the whole transaction (for example because the disk is full), return the failed
        write; else return None.
        """
        connection = self._connection = self._connection or self._engine.connect()
        with connection.begin():
            if len(errands) == 1:  # alone, so that its failure undoes nothing else
                errands[0].error = None
                errands[0].result = errands[0].work(connection)
                return None
            for errand in errands:
                errand.error = None
                self._run_in_savepoint(connection, errand)
                if errand.error is not None and not _is_in_transaction(connection):
                    return errand
        return None

    def close(self) -> None:
        """Close the connection. It stays open between transactions, which saves a quarter of a short one's time."""
        with self._turn:
            self._release_connection()

    def _release_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @staticmethod
    def _run_in_savepoint(connection: Connection, errand: _PendingWrite) -> None:
        # Not `begin_nested`, which takes about as long as a short write.
        try:
            _execute(connection, "SAVEPOINT errand")
            errand.result = errand.work(connection)
            _execute(connection, "RELEASE errand")
        except Exception as error:  # noqa: BLE001 - its own thread raises it; the other threads' work stands
            errand.error = error
            if _is_in_transaction(connection):
                _execute(connection, "ROLLBACK TO errand")


def transaction(query: Callable[Concatenate[Connection, P], T]) -> Callable[Concatenate[Database, P], T]:
    """Turn a query into a write transaction: `claim_group(db, ...)` runs `claim_group(tx, ...)` inside `db.write`.

    The transaction has two fault points: `claim_group.before`, before the commit, and `claim_group.after`, between the commit
    and the return to the caller.
    """
    before, after = f"{query.__name__}.before", f"{query.__name__}.after"

    @wraps(query)
    def run(db: Database, /, *args: P.args, **kwargs: P.kwargs) -> T:
        def work(tx: Connection) -> T:
            result = query(tx, *args, **kwargs)
            faultpoint(before)
            return result

        result = db.write(work)
        faultpoint(after)
        return result

    return run


def read_transaction(query: Callable[Concatenate[Connection, P], T]) -> Callable[Concatenate[Database, P], T]:
    """Turn a query into a read transaction: `find_call(db, ...)` runs `find_call(tx, ...)` inside `db.ask`."""

    @wraps(query)
    def run(db: Database, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return db.ask(lambda tx: query(tx, *args, **kwargs))

    return run


def skip_flush(tx: Connection) -> None:
    """Let the transaction end before Postgres has written it to the disk, so that its row locks are released at once.

    If the Postgres server crashes, the transactions of the last 0.6 s that skipped the flush may be lost
    (https://www.postgresql.org/docs/current/wal-async-commit.html). Only a write whose loss is harmless may skip it: the
    renewal of a lease, or the note that a message was sent. SQLite in WAL mode does not wait for the disk at commits.
    """
    if tx.dialect.name == "postgresql":
        tx.execute(text("SET LOCAL synchronous_commit = off"))


def insert(tx: Connection, table: Table) -> "postgresql.Insert | sqlite.Insert":
    """Return an INSERT statement of the database's dialect, which supports ON CONFLICT."""
    if tx.dialect.name == "postgresql":
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)
    from sqlalchemy.dialects import sqlite

    return sqlite.insert(table)


def _is_transient(error: DBAPIError) -> bool:
    # Lost connections, restarts, lock time-outs and serialisation failures pass; a violated constraint does not.
    if error.connection_invalidated:
        return True
    if not isinstance(error, OperationalError):
        return False
    state = getattr(error.orig, "sqlstate", None)  # psycopg's errors have it, sqlite3's do not
    if state is None:
        message = str(error.orig)
        return any(word in message for word in ("locked", "busy", "connection", "resolve host"))
    return state[:2] in ("08", "40", "53", "55", "57")


def _configure_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=30000", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _configure_postgres(connection: Any, record: object) -> None:
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        name = connection.info.dbname
        connection.close()
        raise ConfigError(
            f"The database {name!r} has the encoding {encoding}, but texts of models need UTF8.",
            f"Type CREATE DATABASE {name}_utf8 ENCODING 'UTF8' TEMPLATE template0; and set AGENTRL_DATABASE_URL to that.",
        )
    with connection.cursor() as cursor:
        cursor.execute(";".join(f"SET {name} = {value}" for name, value in {**_SERVER_TIMEOUTS, **PLANNER_SETTINGS}.items()))
    connection.commit()


def _refuse_denied(context: ExceptionContext) -> None:
    if context.engine is None or getattr(context.original_exception, "sqlstate", None) != DENIED:
        return
    reason = " ".join(str(context.original_exception).split())
    raise AccessDenied(
        f"The login {context.engine.url.username} may not do this: {reason}.",
        "Use the database's owner; in the compose stack: docker compose exec control agentrl ...",
    ) from context.original_exception


def _begin_immediate(connection: Connection) -> None:
    reads = connection.get_execution_options().get("agentrl_read", False)
    _execute(connection, "BEGIN" if reads else "BEGIN IMMEDIATE")


def _execute(connection: Connection, statement: str) -> None:
    with driver_cursor(connection, statement) as cursor:
        cursor.execute(statement)


def _is_in_transaction(connection: Connection) -> bool:
    """Return False if SQLite has rolled back the transaction, for example because the disk is full."""
    driver = connection.connection.dbapi_connection
    return driver is None or bool(driver.in_transaction)


def _refuse_unusable(context: ExceptionContext) -> None:
    reason = " ".join(str(context.original_exception).split())
    if context.engine is not None and any(phrase in reason for phrase in _UNUSABLE_FILE_ERRORS):
        file = context.engine.url.database
        hint = "Give it write access, or set AGENTRL_DATABASE_URL, or AGENTRL_HOME, to another place."
        raise ServiceError(f"The database {file!r} cannot be used: {reason}.", hint) from context.original_exception
    if context.engine is not None and reason == _DISK_FULL_ERROR:
        message = f"The disk of the database {context.engine.url.database!r} is full, or its quota is used up."
        raise ServiceError(message, "Free space there; runs then continue by themselves.") from context.original_exception
