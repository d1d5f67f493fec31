"""The planner's statistics of a SQLite database, kept by whoever serves it (`agentrl worker control`); Postgres has autovacuum.

Nothing that agentrl itself asks needs them: its queries and views have one plan that is right. They are for the questions of
people, whose `agentrl sql` can only read.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from workflow.store.connect import Database
from workflow.views import VIEWS

ROWS = 400
"""How many entries of an index are looked at: a table of any size takes milliseconds, in which nobody else writes."""

BUSY_SECONDS = 1.0
"""How long it waits for who writes; then the next time will do."""


def refresh(database: Database) -> list[str]:
    """Counts anew the SQLite tables that have no statistics, or many more rows than then; says what it did.

    Each table in a transaction of its own. On Postgres, and while others write for long, it does nothing.
    """
    if not database.is_sqlite:
        return []
    file = Path(str(database.url.database))
    with closing(sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
        try:
            return _refresh(connection)
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                return []
            raise


def _refresh(connection: sqlite3.Connection) -> list[str]:
    connection.execute(f"PRAGMA analysis_limit={ROWS}")
    for view in VIEWS:  # SQLite judges the tables that this connection has planned with
        connection.execute(f"EXPLAIN SELECT * FROM {view}").close()
    outdated = [statement for (statement,) in connection.execute("PRAGMA optimize(-1)") if statement.startswith("ANALYZE")]
    for statement in outdated:
        connection.execute(statement)
    return outdated
