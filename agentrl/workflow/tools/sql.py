"""sql: runs one SELECT on a database that the model can only read. An empty query lists the tables.

If a run selects the tool by its plain name, it reads the database in AGENTRL_SQL_DATABASE. `sql_over(...)` creates a tool for
an env's own database. See `sql.databases` for the names of databases.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.workflow.errors import AccessDenied, ConfigError, ToolFailure
from agentrl.workflow.settings import settings
from agentrl.workflow.sql.databases import check
from agentrl.workflow.sql.query_process import read
from agentrl.workflow.sql.readonly import Table
from agentrl.workflow.tools import Tool

MAX_ROWS = 50
MAX_CELL = 200
MAX_CHARACTERS = 8000
CREATE = re.compile(r"\s*CREATE\s", re.IGNORECASE)


def sql_over(database: str | Path) -> Tool:
    """Create an SQL tool for a SQLite file, a .sql script or a Postgres database."""
    return _tool(lambda: str(database))


def _tool(locate: Callable[[], str], variables: tuple[str, ...] = ()) -> Tool:
    def sql(query: str = "") -> str:
        """Runs one SELECT on the database and returns its rows. Without a query it lists the tables and their columns."""
        try:
            return format_rows(read(locate(), query, MAX_ROWS + 1))
        except (AccessDenied, ConfigError) as error:
            raise ToolFailure(error.message) from error

    return Tool(sql, timeout_seconds=15.0, max_characters=MAX_CHARACTERS, needs=lambda: check(locate()), variables=variables)


def format_rows(table: Table) -> str:
    """Return the rows as text, one line each: `a | b`."""
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
