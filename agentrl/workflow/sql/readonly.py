"""Runs untrusted SQL on a read-only connection, for `agentrl sql` and the tool `sql`.

SQLite runs with an authorizer that allows only reads, because with `mode=ro` alone ATTACH and VACUUM INTO could still write
files. If a query is refused, the error says why in one sentence. `readonly_postgres` is the part for Postgres.
"""

import itertools
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentrl.workflow.errors import AccessDenied, AgentRLError, ConfigError, ServiceError

MAX_SQL = 100_000
MAX_VALUE = 64 * 1024 * 1024
MAX_ANSWER = 256 * 1024 * 1024
"""The largest result, in characters and bytes. `MAX_SQL` limits the characters of a query, and `MAX_VALUE` limits the bytes of
a value in SQLite.
"""

NUMBER_BYTES = 8
"""The size, in bytes, that a number or NULL adds to the size of a result."""

STEP = 1000
"""The number of SQLite instructions between two checks of the limit."""

_ALLOWED_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_FORBIDDEN_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
_UNREADABLE = ("locked", "unable to open", "readonly", "not a database", "disk I/O", "image is malformed")

Table = tuple[list[str], list[tuple[Any, ...]]]
Over = Callable[[], bool]
"""A function that returns True if a query has exceeded its limit."""


def check_text(sql: str) -> None:
    """Raise AccessDenied if the query's text is too long or contains a NUL character. Raise ConfigError if it contains an
    unpaired surrogate.
    """
    if len(sql) > MAX_SQL:
        raise AccessDenied(f"The query has {len(sql)} characters, and {MAX_SQL} are allowed.", "Shorten the query.")
    if "\0" in sql:
        raise AccessDenied("The query contains a NUL character.", "Remove the character.")
    if any("\ud800" <= letter <= "\udfff" for letter in sql):
        raise ConfigError("The query contains an unpaired surrogate, which is not valid text.", "Remove it.")


def deadline(seconds: float) -> Over:
    """Return a function that returns True once `seconds` seconds have passed."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def instructions(count: int) -> Over:
    """Return a function that returns True after `count` SQLite instructions. Unlike a time limit, this limit does not depend on
    the machine's load.
    """
    left = iter(range(count // STEP))
    return lambda: next(left, None) is None


def collect_rows(rows: Iterable[tuple[Any, ...]], limit: int, size: int = MAX_ANSWER) -> list[tuple[Any, ...]]:
    """Return the first `limit` rows. Raise AccessDenied if together they have more than `size` characters and bytes."""
    collected, total = [], 0
    for row in itertools.islice(rows, limit):
        collected.append(row)
        total += sum(len(value) if isinstance(value, str | bytes) else NUMBER_BYTES for value in row)
        if total > size:
            raise AccessDenied(f"The answer is longer than {size} characters.", "Ask for fewer rows or columns.")
    return collected


# SQLite


def open_sqlite(file: Path, seconds: float = 5.0) -> sqlite3.Connection:
    """Open a read-only connection that waits up to `seconds` seconds for the lock of a writing process."""
    return sqlite3.connect(sqlite_url(file, "ro"), uri=True, timeout=seconds)


def sqlite_url(file: Path, mode: str) -> str:
    """Return the URL with which to open a SQLite file for reading: with the given mode, or as an immutable file.

    To read a database in WAL mode, SQLite creates files next to it. That fails in a read-only folder. It is also wrong for a
    database that this user may only read, because the owner could not write the new files. In both cases, a database without a
    `-wal` file is opened as immutable: no process is writing it.
    """
    own = os.access(file.parent, os.W_OK) and os.access(file, os.W_OK)
    sealed = not own and not Path(f"{file}-wal").exists()
    return f"file:{quote(str(file))}?{'mode=ro&immutable=1' if sealed else f'mode={mode}'}"


def read_sqlite(connection: sqlite3.Connection, sql: str, limit: int, over: Over, size: int = MAX_ANSWER) -> Table:
    """Run one SELECT, and return its columns and at most `limit` rows with at most `size` characters and bytes in total.

    The connection cannot be used for other purposes afterwards.
    """
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, 4 * MAX_SQL)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(size, MAX_VALUE))
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000)  # a long match is one instruction, which nothing stops
    connection.set_authorizer(allow_reads)
    connection.set_progress_handler(over, STEP)
    cursor = connection.execute(sql)
    rows = collect_rows(cursor, limit, size)
    if cursor.description is None:
        raise no_rows_error()
    return [column[0] for column in cursor.description], rows


def allow_reads(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    """Tell SQLite whether an action is allowed: an authorizer that allows only reads."""
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in _ALLOWED_ACTIONS else sqlite3.SQLITE_DENY


@contextmanager
def translate_sqlite_errors(over: Over, stopped: AgentRLError, hint: str) -> Iterator[None]:
    """Convert errors of SQLite in the `with` block to errors of agentrl. If `over()` is true, a limit was exceeded, and the
    error is `stopped`. Otherwise, the error has SQLite's message and `hint`.
    """
    try:
        yield
    except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
        raise (stopped if over() else _sqlite_refusal(error, hint)) from error


def _sqlite_refusal(error: Exception, hint: str) -> AgentRLError:
    message = " ".join(str(error).split())
    if "one statement" in message:
        return several_statements_error()
    if any(phrase in message for phrase in ("not authorized", "authorization denied", "prohibited")):
        return write_error(message)
    if "too big" in message or "too large" in message:
        return AccessDenied(f"The query asks for too much: {message}.", "Ask for less at a time.")
    if any(phrase in message for phrase in _UNREADABLE):
        return ServiceError(f"The database cannot be read: {message}.", "Try again; `agentrl doctor`.")
    return ConfigError(f"Invalid query: {message}.", hint)


# errors of both databases


def no_rows_error() -> AccessDenied:
    """Return the error for a statement that returns no result."""
    return AccessDenied("The query gives no rows.", "Write one SELECT.")


def several_statements_error() -> AccessDenied:
    return AccessDenied("Only one statement is allowed.", "Write one SELECT.")


def write_error(message: str) -> AccessDenied:
    """Return the error for a statement that does more than read."""
    return AccessDenied(f"The query does more than read: {message}.", "Write one SELECT.")
