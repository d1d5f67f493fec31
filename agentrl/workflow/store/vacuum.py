"""`agentrl vacuum`: free the space of deleted rows. On Postgres, also update the planner's statistics.

SQLite gets no statistics. Each query and view is written so that SQLite chooses the right plan without them. With statistics,
SQLite's planner ignores the LIMIT, and sorts whole tables to show a page.

The command is safe at any time. SQLite compacts in one transaction. On Postgres, other processes can read and write meanwhile.
"""

import os
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import func, select, text
from sqlalchemy.exc import OperationalError

from agentrl.workflow.errors import ServiceError
from agentrl.workflow.store.connect import Database
from agentrl.workflow.tables import schema

BUSY_SECONDS = 5.0
"""The longest wait for other processes, in seconds."""


@dataclass(frozen=True, slots=True)
class VacuumResult:
    """The database's sizes before and after, in bytes. `left` is True if SQLite could not empty its write-ahead log, because
    another process was reading.
    """

    before: int
    after: int
    left: bool = False


def vacuum(database: Database) -> VacuumResult:
    """Compact the database while others use it, and update the planner's statistics on Postgres. Raise ServiceError if another
    process writes, or locks a table, for too long, or if the disk has too little space for SQLite's copy.
    """
    return _vacuum_sqlite(Path(str(database.url.database))) if database.is_sqlite else _vacuum_postgres(database)


def _vacuum_sqlite(file: Path) -> VacuumResult:
    before = _sqlite_bytes(file)
    with closing(sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
        _check_room(file, connection)
        try:
            connection.execute("VACUUM")
            (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.OperationalError as error:
            if "full" in str(error):
                raise ServiceError(f"{_no_room(file)}: it was not changed.", "Free some space, then try again.") from error
            if "locked" in str(error) or "busy" in str(error):
                message = f"The database {str(file)!r} is being written to: it was not changed."
                raise ServiceError(message, "Try again later, or `agentrl pause` the runs first.") from error
            raise
    return VacuumResult(before, _sqlite_bytes(file), bool(busy))


def _check_room(file: Path, connection: sqlite3.Connection) -> None:
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    copy, temporary = (pages - free) * size, _sqlite_temp_folder()
    shared = temporary.stat().st_dev == file.parent.stat().st_dev
    for place, needed_bytes in ((file.parent, copy * (2 if shared else 1)), (temporary, copy)):
        free_bytes = shutil.disk_usage(place).free
        if free_bytes < needed_bytes:
            raise ServiceError(
                f"{_no_room(file)}: {str(place)!r} has {free_bytes / 2**20:.0f} MiB free, "
                f"and {needed_bytes / 2**20:.0f} MiB are needed.",
                "Free some space (`agentrl gc`), then try again.",
            )


def _sqlite_temp_folder() -> Path:
    """Return the folder of SQLite's temporary files: the first folder of SQLite's candidates that is writable."""
    candidates = (os.environ.get("SQLITE_TMPDIR"), os.environ.get("TMPDIR"), "/var/tmp", "/usr/tmp", "/tmp")
    return next((Path(place) for place in candidates if place and os.access(place, os.W_OK)), Path())


def _no_room(file: Path) -> str:
    return f"Not enough disk space to compact {str(file)!r}"


def _sqlite_bytes(file: Path) -> int:
    parts = [file, Path(f"{file}-wal")]
    return sum(part.stat().st_size for part in parts if part.exists())


def _vacuum_postgres(database: Database) -> VacuumResult:
    names = ", ".join(schema.metadata.tables)
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        size = select(func.pg_database_size(func.current_database()))
        before = connection.execute(size).scalar_one()
        connection.execute(text(f"SET lock_timeout = '{BUSY_SECONDS:.0f}s'"))
        try:
            connection.execute(text(f"VACUUM (ANALYZE) {names}"))
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) != "55P03":
                raise
            message = "Another process has locked a table: the database was not changed."
            raise ServiceError(message, "Try again later.") from error
        finally:
            connection.execute(text("RESET lock_timeout"))
        return VacuumResult(before, connection.execute(size).scalar_one())
