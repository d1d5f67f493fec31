"""A run's whole surroundings, quick to set up and easy to break: a Redis that keeps nothing, a database, forked workers."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.workers.stack import broker
from agentrl.workers.stack.celery_app import QUEUES
from bench.faults import record, world
from bench.faults.fork_server import DEADLINE_SECONDS, Child, Nursery
from tests.conftest import forbidden
from tests.support.forked_stack import ForkedStack

ROLES = ("rollout", "train", "tools", "control")


class Crew(ForkedStack):
    """A forked stack with short leases; the run is that of `fault_plugins`.

    Args:
        folder: an empty one, of a short path: a socket lies in it.
        nursery, model: who forks, and what is trained.
        migrated: a SQLite file to copy; None where the environment names another database.
    """

    def __init__(self, folder: Path, nursery: Nursery, model: Path, migrated: Path | None, **environment: str) -> None:
        self.model = model
        (folder / "hits").mkdir(exist_ok=True)
        super().__init__(
            folder, nursery, migrated, **{"AGENTRL_LEASE_SECONDS": "2", "AGENTRL_TICK_SECONDS": "0.2", **environment}
        )
        self.environment["AGENTRL_FAULT_DIR"] = str(folder / "hits")

    def fork_all(self, **environment: str) -> dict[str, Child]:
        """A worker of each kind."""
        return self.fork_each(ROLES, **environment)

    def asleep(self) -> Child | None:
        """The child that a fault has stopped, until `wake`."""
        return next((child for child in self.children if _state(child.pid) == "T"), None)

    def wake(self, child: Child) -> None:
        """Ends the sleep of a stopped child's own alarm clock."""
        # A forked child's other child is its fork server.
        (clock,) = (each for each in _children(child.pid) if b"kill -CONT" in Path(f"/proc/{each}/cmdline").read_bytes())
        for sleep in _children(clock):
            os.kill(sleep, signal.SIGTERM)

    def submit(self, **changes: Any) -> None:
        """Sends the run; `a__b=1` changes `a.b`."""
        wanted = {name.replace("__", "."): value for name, value in changes.items()}
        child = self.start("bench.faults.fault_plugins:submit", str(self.model), wanted, name="submit")
        assert child.end() == 0, self.logs()

    def count(self, query: str) -> int:
        """One number from the rows."""
        return int(self.ask(query) or 0)

    def rows(self, query: str) -> set[tuple[Any, ...]]:
        """All rows."""
        with self.database.read() as tx:
            return {tuple(row) for row in tx.execute(text(query))}

    def waiting(self) -> int:
        """How many messages nobody took yet."""
        with broker.connect_redis(self.settings) as connection:
            return sum(connection.llen(f"agentrl.{queue}") for queue in QUEUES)

    def refused(self, *words: str, code: int) -> str:
        """What a command says that exits with `code`."""
        done = self.command(*words)
        assert done.returncode == code, done.stderr + self.logs()
        return done.stderr

    def reason(self) -> str:
        """Why the run stopped."""
        return str(self.ask("SELECT reason FROM runs"))

    def wait_for(self, run: str = world.RUN, status: str = "done") -> None:
        """Waits until the run has the status."""
        query = f"SELECT status FROM runs WHERE name = '{run}'"
        self.wait(lambda: self.ask(query) == status, f"{run} {status}", DEADLINE_SECONDS)

    def assert_whole(self) -> None:
        """The run in SQLite is done and violates none of the fault loop's invariants."""
        self.wait_for()
        self.stop()
        found = record.read(self.home)
        assert found["wrong"] == [], found["wrong"]
        assert [kind for kind, *_ in found["policies"].values()] == ["base", *["trained"] * world.ITERATIONS]


def _state(pid: int) -> str:
    """One letter, as Linux has it; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(child) for child in found.stdout.split()]


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size at the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        forbidden("the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the room that is left."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
    return ballast


@pytest.fixture
def crew(short_folder: Path, forks: Nursery, world_model: Path, migrated_file: Path) -> Iterator[Crew]:
    """A Redis and a SQLite database; nobody works yet."""
    made = Crew(short_folder, forks, world_model, migrated_file)
    yield made
    made.close()
