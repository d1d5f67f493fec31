"""Runs the real program: `agentrl` in processes of its own, on a data folder of the test's own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.workers.stack import broker, embedded
from agentrl.workflow.settings import Settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import open_database
from agentrl.workflow.store.reads import run_rows
from tests.conftest import missing

DEADLINE_SECONDS = 240.0

SIZES = ("--epochs", "1", "--group-size", "4", "--tasks-per-iteration", "4", "--max-new-tokens", "12")
TURNS = ("--max-steps", "2")
LUCKY = ("-s", "hooks=[tests.support.parity_hook:Lucky]")
SMALL = (*SIZES, *TURNS, *LUCKY)
"""Options of a run that takes seconds, and has something to learn. A run of an agent takes no `TURNS`."""


@contextmanager
def embedded_stack(folder: Path, idle_seconds: str) -> "Iterator[Stack]":
    """Yield the embedded stack of a data folder in `folder`, not started yet, that stops when idle for so long."""
    if broker.find_server(Settings(home=folder)) is None:
        missing("a Redis server")
    made = Stack(folder / "home", AGENTRL_IDLE_STOP_SECONDS=idle_seconds)
    try:
        yield made
    finally:
        made.close()


class Stack:
    """A data folder, the environment that points to it, and what runs there."""

    def __init__(self, home: Path, **environment: str) -> None:
        self.home = home
        self.environment = {
            **os.environ,
            "AGENTRL_HOME": str(home),
            "AGENTRL_LEASE_SECONDS": "5",
            "AGENTRL_TICK_SECONDS": "0.5",
            "AGENTRL_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **environment,
        }
        given = {key.removeprefix("AGENTRL_").lower(): value for key, value in environment.items()}
        self.settings = Settings(home=home, **given)  # type: ignore[arg-type]
        self._database: Database | None = None
        self._workers: list[subprocess.Popen[bytes]] = []

    @property
    def database(self) -> Database:
        """The database that the workers write."""
        if self._database is None:
            self._database = open_database(self.settings.database)
        return self._database

    def agentrl(self, *arguments: str, code: int = 0) -> str:
        """Run a command to its end; return its stdout. Fail the test unless it exits with `code`."""
        done = self.command(*arguments)
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def command(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end."""
        command = [sys.executable, "-m", "agentrl.cli", *words]
        environment, seconds = self.environment, DEADLINE_SECONDS
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)

    def worker(self, roles: str, **environment: str) -> "subprocess.Popen[bytes]":
        """Starts one worker process. `environment` has variables that only this worker gets."""
        log = self.home / f"{roles.replace(',', '-')}.{len(self._workers)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            command = [sys.executable, "-m", "agentrl.cli", "worker", roles]
            process = subprocess.Popen(command, env={**self.environment, **environment}, stdout=output, stderr=output)
        self._workers.append(process)
        return process

    def wait(self, met: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
        """Waits until the condition is met, or fails the test with the logs."""
        deadline = time.monotonic() + seconds
        while not met():
            assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s\n{self.logs()}"
            time.sleep(0.05)

    def wait_for(self, run: str, status: str = "done") -> None:
        """Waits until the run has the status."""
        self.wait(lambda: run_rows.describe_run(self.database, run)["status"] == status, f"{run} being {status}")

    def kill_worker(self, role: str, number: int = signal.SIGKILL) -> None:
        """Sends the stack's worker of that role, as soon as there is one, a signal: kill -9 unless another is asked for."""
        self.wait(lambda: bool(self.workers(role)), f"a worker {role}")
        for pid in self.workers(role):
            os.kill(pid, number)

    def workers(self, role: str) -> set[int]:
        """Return the pids of the embedded stack's workers of that role: the supervisor's children that write to its log."""
        supervisor = embedded.find_supervisor(self.settings)
        log = str(embedded.log_file(self.settings, role))
        return {pid for pid in children_of(supervisor) if _stdout(pid) == log} if supervisor else set()

    def logs(self) -> str:
        """The ends of all logs, for a failing test."""
        files = [*self.home.glob("*.log"), *self.home.glob("stack/*.log")]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in sorted(files))

    def close(self) -> None:
        """Stops everything."""
        embedded.stop(self.settings)
        for process in self._workers:
            process.terminate()
        for process in self._workers:
            process.wait(30)
        if self._database is not None:
            self._database.close()


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:  # it has just ended
        return []


def _stdout(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""
