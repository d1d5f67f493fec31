"""`agentrl sql`: run a user's SELECT on a connection that can only read (see `sql.readonly`).

SQLite runs in a separate process, which can be killed, because a single long SQLite instruction cannot be interrupted. On
Postgres only the reader role is used: with a more powerful login, a query could end the read-only transaction by a `commit` and
then write. On both databases a query has a timeout and a maximum number of rows.

On both databases, `rl_i4(blob)` and `rl_f4(blob)` return the packed int32 and float32 values of `step_tokens` as a JSON array.
"""

import itertools
import json
import math
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.workflow.errors import AccessDenied, ConfigError, NotFoundError, ServiceError, suggest
from agentrl.workflow.runtime.limited_process import limit_processor_time
from agentrl.workflow.runtime.warm_processes import Warm
from agentrl.workflow.settings import Settings
from agentrl.workflow.sql.query_process import QueryProcess, serve
from agentrl.workflow.sql.readonly import (
    Table,
    check_text,
    deadline,
    open_sqlite,
    read_sqlite,
    translate_sqlite_errors,
)
from agentrl.workflow.store.driver_reader import connect_postgres, sqlite_path
from agentrl.workflow.store.row_codecs import unpack
from agentrl.workflow.tables.views import VIEWS

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import URL

READER = "agentrl_reader"
LOCK_SECONDS = 2.0
"""The longest wait for SQLite while another process has locked the whole database, in seconds."""
_LOGIN_REFUSED = ("authentication failed", "no password supplied", "does not exist", "pg_hba.conf", "not permitted to log in")
_UNKNOWN_NAME = re.compile(r"no such (table|column): ([\w.]*\w)|(relation|column) \"?([\w.]+)\"? does not exist")
"""The pattern of the messages of SQLite and Postgres for an unknown name."""
_VIEWS_HINT = "List the views: agentrl sql --schema"


MAX_CHARACTERS = 32_000_000
"""The maximum size of a result from SQLite, in characters of texts and bytes of blobs."""
GRACE_SECONDS = 2.0
"""The time between a query's deadline and the kill of its process, in seconds. A query stops by itself at its deadline, unless
it is in one long instruction.
"""
readers = Warm(lambda: QueryProcess("agentrl.workflow.store.reads.user_sql"))
"""The pool of processes that query SQLite. Each of them runs this file."""


def run_query(settings: Settings, sql: str, limit: int = 10_000, seconds: float = 5.0) -> Table:
    """Run one SELECT; return its columns and at most `limit` rows.

    Raises:
        AccessDenied: the text is not one plain SELECT, is too long, or runs longer than `seconds`; or there is no reader login.
        ConfigError: the database rejects the SQL.
        NotFoundError: there is no SQLite database yet.
        ServiceError: Postgres does not answer.
    """
    check_text(sql)
    file = sqlite_file(settings)
    try:
        if file is None:
            columns, rows = _query_postgres(settings, sql, limit, seconds)
        else:
            columns, rows = _ask_process(file, sql, limit, seconds)
    except ConfigError as error:
        raise ConfigError(error.message, _nearest_name_hint(sql, error.message) or error.hint) from error
    return _number_duplicates(columns), rows


def _nearest_name_hint(sql: str, message: str) -> str:
    """Return a hint that suggests the view or column whose name is similar to the unknown name, or the views that have a column
    of this name; empty if there is none.
    """
    unknown = _UNKNOWN_NAME.search(message)
    if unknown is None:
        return ""
    kind, name = (part for part in unknown.groups() if part)
    sql_words = set(re.findall(r"\w+", sql.lower()))
    candidates = (
        {column for view in sql_words & VIEWS.keys() for column in VIEWS[view].COLUMNS} if kind == "column" else set(VIEWS)
    )
    name = name.rpartition(".")[2][:100]
    if hint := suggest(name, candidates):
        return hint
    elsewhere = [view for view, row in VIEWS.items() if kind == "column" and candidates and name in row.COLUMNS]
    return f"The column {name} is in {', '.join(elsewhere)}: agentrl sql --schema {elsewhere[0]}" if elsewhere else ""


def _number_duplicates(columns: list[str]) -> list[str]:
    """Rename duplicate columns: `a, a` becomes `a, a_2`. Each row becomes a JSON object, which needs distinct names."""
    unique: list[str] = []
    for column in columns:
        count = next(n for n in itertools.count(1) if (column if n == 1 else f"{column}_{n}") not in unique)
        unique.append(column if count == 1 else f"{column}_{count}")
    return unique


def sqlite_file(settings: Settings) -> Path | None:
    """Return the path of the configured SQLite file, even if the file does not exist; None for another database."""
    if plain := sqlite_path(settings.database):
        return plain
    from agentrl.workflow.store.connect import database_url

    url = database_url(settings.database)
    return Path(url.database or "") if url.get_backend_name() == "sqlite" else None


def rl_i4(blob: bytes | None) -> str | None:
    """Convert packed int32 values to a JSON array."""
    return None if blob is None else json.dumps(unpack("i", blob))


def rl_f4(blob: bytes | None) -> str | None:
    """Convert packed float32 values to a JSON array. NaN and infinity become null."""
    return None if blob is None else json.dumps([value if math.isfinite(value) else None for value in unpack("f", blob)])


# SQLite


def _ask_process(file: Path, sql: str, limit: int, seconds: float) -> Table:
    if not file.exists():
        raise NotFoundError(f"There is no database {str(file)!r} yet.", "Create it with any other command: agentrl runs")
    request = {"file": str(file.absolute()), "sql": sql, "limit": limit, "seconds": seconds}
    with readers.one() as reader:
        return reader.ask(request, seconds + GRACE_SECONDS)


def _answer(file: str, sql: str, limit: int, seconds: float) -> Table:
    """Run the query of one request. This is called in the separate process."""
    limit_processor_time(int(seconds) + 1)
    return _query_sqlite(Path(file), sql, limit, seconds)


def _query_sqlite(file: Path, sql: str, limit: int, seconds: float) -> Table:
    late = deadline(seconds)
    with (
        translate_sqlite_errors(late, _too_slow_error(seconds), _VIEWS_HINT),
        closing(open_sqlite(file, min(seconds, LOCK_SECONDS))) as connection,
    ):
        connection.create_function("rl_i4", 1, rl_i4, deterministic=True)
        connection.create_function("rl_f4", 1, rl_f4, deterministic=True)
        return read_sqlite(connection, sql, limit, late, MAX_CHARACTERS)


def _too_slow_error(seconds: float) -> AccessDenied:
    return AccessDenied(f"The query took longer than {seconds:g} s and was stopped.", "Narrow it: WHERE run = '...', LIMIT.")


# Postgres


def _query_postgres(settings: Settings, sql: str, limit: int, seconds: float) -> Table:
    from agentrl.workflow.sql.readonly_postgres import read_postgres

    with _connect_reader(settings, seconds) as connection:
        _check_harmless(connection)
        return read_postgres(connection, sql, limit, seconds, _too_slow_error(seconds), _VIEWS_HINT)


def reader_url(settings: Settings) -> "URL":
    """Return the login URL of `agentrl sql`: AGENTRL_DATABASE_READER_URL, or the database's URL with the reader role's name."""
    from agentrl.workflow.store.connect import database_url

    if settings.database_reader_url:
        url = database_url(settings.database_reader_url)
    else:
        url = database_url(settings.database).set(username=READER, password=settings.reader_password or None)
    return url.set(drivername="postgresql")


def _connect_reader(settings: Settings, seconds: float) -> "psycopg.Connection[tuple[Any, ...]]":
    import psycopg

    url = reader_url(settings)
    limits = {"default_transaction_read_only": "on", "statement_timeout": int(seconds * 1000)}
    try:
        return connect_postgres(connection_parts(url) | {"connect_timeout": 5}, limits)
    except psycopg.OperationalError as error:
        message = " ".join(str(error).split())
        address = url.render_as_string(hide_password=True)
        if any(phrase in message for phrase in _LOGIN_REFUSED):
            raise AccessDenied(
                f"No reader login: {address} was refused ({message}).",
                "Run `agentrl db upgrade` with AGENTRL_READER_PASSWORD, or set AGENTRL_DATABASE_READER_URL.",
            ) from error
        raise ServiceError(f"The database {address} does not answer: {message}.", "Check AGENTRL_DATABASE_URL.") from error


def connection_parts(url: "URL") -> dict[str, Any]:
    """Return the parts of a database URL as arguments of `psycopg.connect`. The URL itself cannot be passed, because libpq and
    SQLAlchemy quote a password differently.
    """
    return {**url.translate_connect_args(username="user", database="dbname"), **url.query}


def _check_harmless(connection: "psycopg.Connection[tuple[Any, ...]]") -> None:
    writes = "SELECT current_setting('is_superuser') = 'on' OR has_table_privilege(to_regclass('runs'), 'INSERT')"
    row = connection.execute(writes).fetchone()
    connection.rollback()
    if row is not None and row[0]:
        raise AccessDenied(
            "The reader login has the right to write.", "Set AGENTRL_DATABASE_READER_URL to a login that may only SELECT."
        )


if __name__ == "__main__":
    serve(_answer)
