"""`agentrl sql`: somebody's own SELECT, on a connection that can do nothing else.

SQLite is opened read-only with an authorizer that allows reading alone (`mode=ro` by itself lets ATTACH and VACUUM INTO write
files). Postgres is reached only as the reader role, one statement over the extended protocol in a read-only transaction (a
read-only transaction of a mightier login is left with `commit; ...`). Both have a deadline and a limit of rows.

`rl_i4(blob)` and `rl_f4(blob)` give the packed int32 and float32 of `step_tokens` as a JSON array, on both databases.
"""

import itertools
import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from sqlalchemy import URL

from workflow.errors import AccessDenied, AgentRLError, ConfigError, NotFoundError, ServiceError
from workflow.settings import Settings
from workflow.store.connect import PLANNING, database_url
from workflow.store.rows import unpack

READER = "agentrl_reader"
MAX_SQL = 100_000
MAX_VALUE = 64 * 1024 * 1024
MAX_ANSWER = 256 * 1024 * 1024
"""Longest query in characters; longest value that SQLite may build, in bytes; longest answer in characters and bytes."""

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_FORBIDDEN_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
_UNREADABLE = ("locked", "unable to open", "readonly", "not a database", "disk I/O", "image is malformed")
_LOGIN_REFUSED = ("authentication failed", "no password supplied", "does not exist", "pg_hba.conf", "not permitted to log in")

Table = tuple[list[str], list[tuple[Any, ...]]]


def query(settings: Settings, sql: str, limit: int = 10_000, seconds: float = 5.0) -> Table:
    """The columns and at most `limit` rows of one SELECT.

    Raises:
        AccessDenied: anything but one plain read, one that is too long or takes longer than `seconds`, or no reader login.
        ConfigError: SQL that the database does not understand.
        NotFoundError: no SQLite database yet.
        ServiceError: Postgres does not answer.
    """
    if len(sql) > MAX_SQL:
        raise AccessDenied(f"The query has {len(sql)} characters, and {MAX_SQL} are allowed.", "Ask for less at a time.")
    if "\0" in sql:
        raise AccessDenied("The query holds a NUL character.", "Leave it out.")
    if any("\ud800" <= letter <= "\udfff" for letter in sql):
        raise ConfigError("The query holds half a surrogate pair, which is no text.", "Leave it out.")
    file = sqlite_file(settings)
    columns, rows = _postgres(settings, sql, limit, seconds) if file is None else _sqlite(file, sql, limit, seconds)
    return _numbered(columns), rows


def _numbered(columns: list[str]) -> list[str]:
    """`a, a` as `a, a_2`: no two of one name, so that a row is a JSON object."""
    told: list[str] = []
    for column in columns:
        count = next(n for n in itertools.count(1) if (column if n == 1 else f"{column}_{n}") not in told)
        told.append(column if count == 1 else f"{column}_{count}")
    return told


def _collect(rows: Iterable[tuple[Any, ...]], limit: int) -> list[tuple[Any, ...]]:
    found, size = [], 0
    for row in itertools.islice(rows, limit):
        found.append(row)
        size += sum(len(value) for value in row if isinstance(value, str | bytes))
        if size > MAX_ANSWER:
            raise AccessDenied(f"The answer is longer than {MAX_ANSWER} characters.", "Ask for fewer rows or columns.")
    return found


def sqlite_file(settings: Settings) -> Path | None:
    """The SQLite file in force, there or not; None for another database."""
    url = database_url(settings.database)
    return Path(url.database or "") if url.get_backend_name() == "sqlite" else None


def rl_i4(blob: bytes | None) -> str | None:
    """Packed int32 as a JSON array."""
    return None if blob is None else json.dumps(unpack("i", blob))


def rl_f4(blob: bytes | None) -> str | None:
    """Packed float32 as a JSON array; NaN and infinity as null."""
    return None if blob is None else json.dumps([value if math.isfinite(value) else None for value in unpack("f", blob)])


# SQLite


def _sqlite(file: Path, sql: str, limit: int, seconds: float) -> Table:
    if not file.exists():
        raise NotFoundError(f"There is no database {str(file)!r} yet.", "Make a first run: agentrl submit --help")
    deadline = time.monotonic() + seconds
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file))}?{_access(file)}", uri=True, timeout=seconds)) as connection:
            _guard(connection, deadline)
            cursor = connection.execute(sql)
            rows = _collect(cursor, limit)
    except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
        raise _sqlite_refusal(error, time.monotonic() > deadline, seconds) from error
    if cursor.description is None:
        raise AccessDenied("The query gives no rows.", "Write one SELECT.")
    return [column[0] for column in cursor.description], rows


def _access(file: Path) -> str:
    """WAL mode wants to make files beside the database. Where it may not, and none is there, nobody writes either."""
    sealed = not os.access(file.parent, os.W_OK) and not Path(f"{file}-wal").exists()
    return "immutable=1" if sealed else "mode=ro"


def _guard(connection: sqlite3.Connection, deadline: float) -> None:
    connection.create_function("rl_i4", 1, rl_i4, deterministic=True)
    connection.create_function("rl_f4", 1, rl_f4, deterministic=True)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, 4 * MAX_SQL)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000)  # no deadline reaches into a long match
    connection.set_authorizer(_authorize)
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 1000)


def _authorize(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _sqlite_refusal(error: Exception, late: bool, seconds: float) -> AgentRLError:
    message = " ".join(str(error).split())
    if late:
        return _too_slow(seconds)
    if "one statement" in message:
        return AccessDenied("Only one statement is allowed.", "Write one SELECT.")
    if any(words in message for words in ("not authorized", "authorization denied", "prohibited")):
        return AccessDenied(f"The query does more than read: {message}.", "Write one SELECT.")
    if "too big" in message or "too large" in message:
        return AccessDenied(f"The query asks for too much: {message}.", "Ask for less at a time.")
    if any(words in message for words in _UNREADABLE):
        return ServiceError(f"The database cannot be read: {message}.", "Try again; `agentrl doctor`.")
    return ConfigError(f"The query does not work: {message}.", "The views are v_runs, v_iterations, v_episodes, v_steps, ...")


def _too_slow(seconds: float) -> AccessDenied:
    return AccessDenied(f"The query took longer than {seconds:g} s and was stopped.", "Narrow it: WHERE run = '...', LIMIT.")


# Postgres


def _postgres(settings: Settings, sql: str, limit: int, seconds: float) -> Table:
    with _reader(settings, seconds) as connection:
        _check_harmless(connection)
        # The server's own deadline, and one that needs no help from it.
        timer = threading.Timer(seconds + 0.5, connection.cancel)
        timer.start()
        try:
            cursor = connection.cursor()
            rows = _collect(cursor.stream(sql), limit)  # the extended protocol: one statement
            if cursor.description is None:  # an empty stream does not name its columns
                cursor.execute(sql, prepare=True)
        except psycopg.Error as error:
            raise _postgres_refusal(error, seconds) from error
        finally:
            timer.cancel()
            connection.rollback()
        if cursor.description is None:
            raise AccessDenied("The query gives no rows.", "Write one SELECT.")
        return [column.name for column in cursor.description], rows


def reader_url(settings: Settings) -> URL:
    """Where `agentrl sql` logs in: AGENTRL_DATABASE_READER_URL, or the database's URL with the reader role's name."""
    if settings.database_reader_url:
        url = database_url(settings.database_reader_url)
    else:
        url = database_url(settings.database).set(username=READER, password=settings.reader_password or None)
    return url.set(drivername="postgresql")


def _reader(settings: Settings, seconds: float) -> "psycopg.Connection[tuple[Any, ...]]":
    url = reader_url(settings)
    chosen = {"default_transaction_read_only": "on", "statement_timeout": int(seconds * 1000), **PLANNING}
    options = " ".join(f"-c {name}={value}" for name, value in chosen.items())
    try:
        return psycopg.connect(**_parts(url), connect_timeout=5, options=options)
    except psycopg.OperationalError as error:
        message = " ".join(str(error).split())
        shown = url.render_as_string(hide_password=True)
        if any(words in message for words in _LOGIN_REFUSED):
            raise AccessDenied(
                f"No reader login: {shown} was refused ({message}).",
                "Run `agentrl db upgrade` with AGENTRL_READER_PASSWORD, or set AGENTRL_DATABASE_READER_URL.",
            ) from error
        raise ServiceError(f"The database {shown} does not answer: {message}.", "Check AGENTRL_DATABASE_URL.") from error


def _parts(url: URL) -> dict[str, Any]:
    # Not as one text: libpq and SQLAlchemy quote a password differently.
    return {**url.translate_connect_args(username="user", database="dbname"), **url.query}


def _check_harmless(connection: "psycopg.Connection[tuple[Any, ...]]") -> None:
    writes = "SELECT current_setting('is_superuser') = 'on' OR has_table_privilege(to_regclass('runs'), 'INSERT')"
    row = connection.execute(writes).fetchone()
    connection.rollback()
    if row is not None and row[0]:
        raise AccessDenied("The reader login may write.", "Set AGENTRL_DATABASE_READER_URL to a login that may only SELECT.")


def _postgres_refusal(error: psycopg.Error, seconds: float) -> AgentRLError:
    message = " ".join((error.diag.message_primary or str(error)).split())
    state = error.sqlstate or ""
    if isinstance(error, psycopg.errors.QueryCanceled):
        return _too_slow(seconds)
    if "multiple commands" in message:
        return AccessDenied("Only one statement is allowed.", "Write one SELECT.")
    if state in ("42501", "25006") or state == "" or state.startswith(("0A", "2D")):
        return AccessDenied(f"The query does more than read: {message}.", "Write one SELECT.")
    if state.startswith(("08", "53", "57")):
        return ServiceError(f"The database stopped answering: {message}.", "Try again; `agentrl doctor`.")
    return ConfigError(f"The query does not work: {message}.", "The views are v_runs, v_iterations, v_episodes, v_steps, ...")
