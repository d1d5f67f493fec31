"""A stack whose workers and commands are forked from one process with everything imported: a start costs a third of a second.

No supervisor: who dies is forked again by the test. What is to be true of the embedded stack itself needs `real_stack`.
"""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.workers.stack import broker
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import leases
from bench.faults.fork_server import Child, Nursery
from tests.conftest import copy_store, missing
from tests.support.real_stack import Stack
from tests.support.user_shell import killed_on_error

TOGETHER = ("rollout,train", "tools", "control")
"""The workers of an embedded stack."""

PIDBOX = "agentrl._kombu.binding.celery.pidbox"
"""Celery's list of workers that take commands."""


class ForkedStack(Stack):
    """A data folder with a database, a Redis of its own that keeps nothing, and processes that are forked.

    Args:
        folder: an empty one, of a short path: a socket lies in it.
        nursery: who forks.
        migrated: a SQLite file to copy; None where the environment names another database.
    """

    def __init__(self, folder: Path, nursery: Nursery, migrated: Path | None, **environment: str) -> None:
        self.folder = folder
        self.socket = folder / "redis.sock"
        for name in ("home", "tmp"):
            (folder / name).mkdir(exist_ok=True)
        url = f"{broker.SOCKET_SCHEME}{self.socket}?virtual_host=0"
        super().__init__(folder / "home", **environment, AGENTRL_BROKER_URL=url)
        self.nursery = nursery
        self.environment["TMPDIR"] = str(folder / "tmp")
        self.children: list[Child] = []
        self._at_work: dict[str, Child] = {}
        if migrated:
            copy_store(self.home, migrated)
        self.redis = self.start_redis()

    def start_redis(self) -> "subprocess.Popen[bytes]":
        """A Redis that writes nothing to the disk."""
        binary = broker.find_server(Settings())
        if binary is None:
            missing("a Redis server")
        command = [str(binary), "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        with (self.folder / "redis.log").open("ab") as log:
            options: dict[str, Any] = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL, "process_group": 0}
            process = subprocess.Popen(command, cwd=self.folder, **options)
        with killed_on_error(process):
            self.wait(lambda: broker.is_answering(self.settings), "a Redis")
        return process

    def start(self, target: str, *arguments: Any, name: str = "other", **environment: str) -> Child:
        """A forked process of this stack."""
        log = self.folder / f"{name}.log"
        child = self.nursery.start(target, *arguments, log=log, environment=self.environment | environment)
        self.children.append(child)
        return child

    def fork(self, *roles: str, **environment: str) -> Child:
        """A worker."""
        child = self.start("bench.faults.fork_server:serve", list(roles), name="-".join(roles), **environment)
        self._at_work[",".join(roles)] = child
        return child

    def fork_each(self, workers: Sequence[str] = TOGETHER, **environment: str) -> dict[str, Child]:
        """Workers, each by its roles with a comma between."""
        return {roles: self.fork(*roles.split(","), **environment) for roles in workers}

    def are_ready(self) -> bool:
        """Whether the workers of an embedded stack are all at work: one that still begins has no answer to a signal."""
        with broker.connect_redis(self.settings) as connection:
            queues = connection.scard(PIDBOX)
        return queues == len(TOGETHER) - 1 and bool(leases.service_holder(self.database, "control"))

    def kill_worker(self, role: str, number: int = signal.SIGKILL) -> None:
        """Sends the newest worker of that role a signal, waits for its end, and forks another as a supervisor would."""
        self._at_work[role].kill(number)
        self.fork_after(role, 0 if number == signal.SIGTERM else -number)

    def fork_after(self, role: str, code: int) -> None:
        """Waits until the newest worker of that role ends with `code`, and forks another as a supervisor would."""
        assert self._at_work[role].end() == code, self.logs()
        self.fork(*role.split(","))

    def ask(self, query: str) -> Any:
        """One value from the rows."""
        with self.database.read() as tx:
            return tx.execute(text(query)).scalar_one()

    def stop(self) -> None:
        """Every process is told to stop, and does."""
        living = [child for child in self.children if child.exit_code() is None]
        for child in living:
            child.kill(signal.SIGTERM)
        assert [child.end() for child in living] == [0] * len(living), self.logs()

    def logs(self) -> str:
        """The ends of all logs, for a failing test."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def close(self) -> None:
        """Kills what is left."""
        for child in self.children:
            if child.exit_code() is None:
                child.kill()
                child.end()
        self.redis.send_signal(signal.SIGCONT)
        self.redis.kill()
        self.redis.wait()
        super().close()


@contextmanager
def forked_stack(folder: Path, nursery: Nursery, migrated: Path, **environment: str) -> Iterator[ForkedStack]:
    """A stack in `folder` with the workers of an embedded one, at work."""
    with closing(ForkedStack(folder, nursery, migrated, **environment)) as made:
        made.fork_each()
        made.wait(made.are_ready, "three workers at work")
        yield made


@pytest.fixture
def stack(short_folder: Path, forks: Nursery, migrated_file: Path) -> Iterator[ForkedStack]:
    """A stack of this test's own, at work."""
    with forked_stack(short_folder, forks, migrated_file) as made:
        yield made
