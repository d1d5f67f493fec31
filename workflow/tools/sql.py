"""sql: one SELECT on a database that the model can read and nothing else; an empty query tells what tables there are.

The database is a SQLite file, a .sql script (a database of its own in memory, the same for every call), or a postgresql://
URL. By its plain name the tool reads what AGENTRL_SQL_DATABASE names; `sql_over(...)` makes one for an env's own. A Postgres
login must be one that may only read: a superuser, or one that may write any table, is refused.

SQLite's work is limited by its instructions and not by the clock, so that a busy machine gives the same answers.
"""

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Loader

from workflow.errors import AccessDenied, AgentRLError, ConfigError, ServiceError, ToolFailure
from workflow.readonly import Table, check_text, instructions, open_sqlite, read_postgres, read_sqlite, refusing_sqlite
from workflow.settings import is_url, settings
from workflow.tools import Tool

SECONDS = 5.0
INSTRUCTIONS = 20_000_000
"""About a second of SQLite's work."""

MAX_ROWS = 50
MAX_CELL = 200
MAX_BYTES = 4_000_000
MAX_CHARACTERS = 8000
CREATE = re.compile(r"\s*CREATE\s", re.IGNORECASE)
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


class AnyText(Loader):
    """Text of a database that is kept in SQL_ASCII may be any bytes: what is no UTF-8 is escaped."""

    def load(self, data: Buffer) -> str:
        """The text."""
        return bytes(data).decode(errors="backslashreplace")


def sql_over(database: str | Path) -> Tool:
    """The tool over a SQLite file, a .sql script or a Postgres database."""
    return _tool(lambda: str(database))


def _tool(named: Callable[[], str], variables: tuple[str, ...] = ()) -> Tool:
    def sql(query: str = "") -> str:
        """Runs one SELECT on the database and returns its rows. Without a query it lists the tables and their columns."""
        try:
            return written(read(named(), query))
        except (AccessDenied, ConfigError) as error:
            raise ToolFailure(error.message) from error

    return Tool(sql, timeout_seconds=15.0, max_characters=MAX_CHARACTERS, needs=lambda: check(named()), variables=variables)


def check(database: str) -> None:
    """Whether there is such a database, and none that could be written.

    Raises:
        ConfigError: there is none.
        ServiceError: it does not answer, or its login may do more than read.
    """
    if not database:
        raise ConfigError("There is no database to ask: none is named.", HINT)
    if is_url(database):
        with _postgres(database):
            return
    if not Path(database).expanduser().is_file():
        raise ConfigError(f"There is no database {database!r}.", HINT)


def read(database: str, query: str, limit: int = MAX_ROWS + 1) -> Table:
    """The columns and at most `limit` rows of one SELECT; without a query, what tables there are.

    Raises:
        AccessDenied: it does more than read, or asks for too much.
        ConfigError: it does not work.
        ServiceError: the database does not answer, or is not to be trusted to it.
    """
    check_text(query)
    if is_url(database):
        stopped = AccessDenied(f"The query took longer than {SECONDS:g} s and was stopped.", "Narrow it.")
        with _postgres(database) as connection:
            return read_postgres(connection, query.strip() or COLUMNS, limit, SECONDS, stopped, "")
    if not (database and Path(database).expanduser().is_file()):
        raise ServiceError(f"There is no database {database!r}.", HINT)
    over = instructions(INSTRUCTIONS)
    stopped = AccessDenied("The query takes too much work and was stopped.", "Narrow it.")
    with refusing_sqlite(over, stopped, ""), closing(_sqlite(Path(database).expanduser())) as connection:
        return read_sqlite(connection, query.strip() or TABLES, limit, over, MAX_BYTES)


def _sqlite(file: Path) -> sqlite3.Connection:
    if file.suffix != ".sql":
        return open_sqlite(file)
    connection = sqlite3.connect(":memory:")
    connection.deserialize(_made(file, file.stat().st_mtime_ns))
    return connection


@lru_cache(maxsize=16)
def _made(script: Path, changed: int) -> bytes:
    """The database that a script makes; `changed` is when the file was."""
    try:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.executescript(script.read_text(encoding="utf-8"))
            return connection.serialize()
    except (sqlite3.Error, ValueError) as error:
        raise ServiceError(f"{str(script)!r} is no script of SQLite: {error}.", HINT) from error


@contextmanager
def _postgres(url: str) -> "Iterator[psycopg.Connection[tuple[Any, ...]]]":
    options = f"-c default_transaction_read_only=on -c statement_timeout={int(SECONDS * 1000)}"
    try:
        connection = psycopg.connect(
            url.replace("postgresql+psycopg://", "postgresql://"), connect_timeout=5, options=options, client_encoding="utf8"
        )
    except psycopg.Error as error:
        said = " ".join(str(error).split())
        raise ServiceError(f"The database of the tool sql does not answer: {said}.", HINT) from error
    with connection:
        if connection.info.parameter_status("server_encoding") == "SQL_ASCII":
            for kind in ("text", "varchar", "bpchar", "name"):
                connection.adapters.register_loader(kind, AnyText)
            connection.execute("SET client_encoding TO SQL_ASCII")  # else the server refuses what is no UTF-8
            connection.commit()
        row = connection.execute(MAY_WRITE, [list(MIGHTY_ROLES)]).fetchone()
        connection.rollback()
        if row is None or row[0]:
            raise _mighty()
        yield connection


def _mighty() -> AgentRLError:
    return ServiceError("The login of the tool sql may do more than read.", "Name one in its URL that may only SELECT.")


def written(table: Table) -> str:
    """The rows as text, a line each: `a | b`."""
    columns, rows = table
    lines = [" | ".join(map(_cell, row)) for row in (columns, *rows[:MAX_ROWS])]
    more = (
        f"more than {MAX_ROWS} rows; these are the first"
        if len(rows) > MAX_ROWS
        else f"{len(rows)} row{'s' * (len(rows) != 1)}"
    )
    return "\n".join([*lines, f"({more})"])


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    text = f"x'{value[:MAX_CELL].hex()}'" if isinstance(value, bytes) else str(value)
    return text if len(text) <= MAX_CELL or CREATE.match(text) else f"{text[:MAX_CELL]}..."


sql = _tool(lambda: settings().sql_database, ("AGENTRL_SQL_DATABASE",))
