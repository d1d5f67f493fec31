"""Databases that a model may read: a SQLite file, a .sql script or a postgresql:// URL.

A script creates a database in memory, which is the same for every query. A Postgres login must be read-only: a superuser, or a
login that may write any table, is refused.

The work of SQLite is limited by instructions and not by time, so a busy machine returns the same results. Work that is not
counted as instructions is stopped by `sql.query_process`.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import psycopg

from agentrl.workflow.errors import AccessDenied, AgentRLError, ConfigError, ServiceError
from agentrl.workflow.settings import is_url
from agentrl.workflow.sql.readonly import Table, instructions, open_sqlite, read_sqlite, translate_sqlite_errors
from agentrl.workflow.sql.readonly_postgres import read_postgres

SECONDS = 5.0
INSTRUCTIONS = 20_000_000
"""The most SQLite instructions of a query. They take about a second."""

MAX_BYTES = 4_000_000
"""The most bytes of a result, and of a value in SQLite."""

HINT = "Set AGENTRL_SQL_DATABASE to a SQLite file, a .sql script or a postgresql:// URL."
TABLES = "SELECT sql FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%' ORDER BY name"
COLUMNS = """
SELECT table_schema, table_name, string_agg(column_name || ' ' || data_type, ', ' ORDER BY ordinal_position) AS columns
FROM information_schema.columns WHERE table_schema NOT IN ('pg_catalog', 'information_schema') GROUP BY 1, 2 ORDER BY 1, 2
"""
MIGHTY_ROLES = ("pg_execute_server_program", "pg_read_server_files", "pg_write_server_files")
MAY_WRITE = """
SELECT current_setting('is_superuser') = 'on'
OR (SELECT bool_or(pg_has_role(current_user, oid, 'MEMBER')) FROM pg_roles WHERE rolname = ANY(%s))
OR EXISTS (
    SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p', 'v', 'f') AND n.nspname NOT IN ('pg_catalog', 'information_schema')
    AND (has_table_privilege(c.oid, 'DELETE, TRUNCATE') OR has_any_column_privilege(c.oid, 'INSERT, UPDATE'))
)
"""


def check(database: str) -> None:
    """Check that the database exists and that the login can only read it. Raise ConfigError if the database does not exist.
    Raise ServiceError if the database does not respond, or if its login has more rights than reading.
    """
    if not database:
        raise ConfigError("The tool sql has no database.", HINT)
    if is_url(database):
        with _postgres(database):
            return
    if not Path(database).expanduser().is_file():
        raise ConfigError(f"There is no database {database!r}.", HINT)


def prepare(database: str) -> None:
    """Prepare the database, outside of a query's limits. Raise ServiceError if the script is invalid."""
    if Path(database).suffix == ".sql" and not is_url(database):
        _database_image(Path(database))


def read_here(database: str, query: str, limit: int) -> Table:
    """Run one SELECT in this process, and return its columns and at most `limit` rows. If `query` is empty, return the tables.
    Raise AccessDenied if the query does more than read, or exceeds the limits. Raise ConfigError if the query is invalid. Raise
    ServiceError if the database does not respond, or if its login has more rights than reading.
    """
    if is_url(database):
        stopped = AccessDenied(f"The query took longer than {SECONDS:g} s and was stopped.", "Narrow it.")
        with _postgres(database) as connection:
            return read_postgres(connection, query.strip() or COLUMNS, limit, SECONDS, stopped, "", MAX_BYTES)
    over = instructions(INSTRUCTIONS)
    stopped = AccessDenied("The query takes too much work and was stopped.", "Narrow it.")
    with translate_sqlite_errors(over, stopped, ""), closing(_sqlite(Path(database))) as connection:
        connection.execute("PRAGMA temp_store = MEMORY")  # memory is limited, the disk is not
        return read_sqlite(connection, query.strip() or TABLES, limit, over, MAX_BYTES)


def _sqlite(file: Path) -> sqlite3.Connection:
    if file.suffix != ".sql":
        return open_sqlite(file)
    connection = sqlite3.connect(":memory:")
    connection.deserialize(_database_image(file))
    return connection


def _database_image(script: Path) -> bytes:
    return _make_database(script, script.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _make_database(script: Path, changed: int) -> bytes:
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.executescript(script.read_text(encoding="utf-8"))
            return connection.serialize()
    except (sqlite3.Error, ValueError) as error:
        raise ServiceError(f"{str(script)!r} is not a SQLite script: {error}.", HINT) from error


@contextmanager
def _postgres(url: str) -> "Iterator[psycopg.Connection[tuple[Any, ...]]]":
    options = f"-c default_transaction_read_only=on -c statement_timeout={int(SECONDS * 1000)}"
    try:
        connection = psycopg.connect(
            url.replace("postgresql+psycopg://", "postgresql://"), connect_timeout=5, options=options, client_encoding="utf8"
        )
    except psycopg.Error as error:
        problem = " ".join(str(error).split())
        raise ServiceError(f"The database of the tool sql does not answer: {problem}.", HINT) from error
    with connection:
        if connection.info.parameter_status("server_encoding") == "SQL_ASCII":
            connection.execute("SET client_encoding TO SQL_ASCII")  # so that the server sends bytes that are not UTF-8
            connection.commit()
        row = connection.execute(MAY_WRITE, [list(MIGHTY_ROLES)]).fetchone()
        connection.rollback()
        if row is None or row[0]:
            raise _too_mighty_error()
        yield connection


def _too_mighty_error() -> AgentRLError:
    return ServiceError("The login of the tool sql may do more than read.", "Use a login that may only SELECT.")
