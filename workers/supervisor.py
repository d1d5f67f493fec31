"""The embedded stack: one supervisor process over a private Redis and three workers, for a machine where nothing runs yet.

`agentrl up` starts it, and so does `submit` where no broker is named; it restarts the dead with back-off, and one that `submit`
started stops some time after the last run. `AGENTRL_BROKER_URL` set, it leaves Redis out and supervises the workers alone.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from types import FrameType
from typing import IO

from workers import broker
from workers.main import SUPERVISOR, run_together, set_up_logging
from workers.process import database
from workflow.errors import ServiceError
from workflow.settings import Settings, settings
from workflow.store import observe

log = getLogger("agentrl.supervisor")
WORKERS = ("rollout,train", "tools", "control")
CALM_SECONDS = 30.0
"""A process that lived this long is started again at once; one that died sooner waits longer each time."""
MAX_BACKOFF = 30.0
START_SECONDS = 20.0
STOP_SECONDS = 40.0


@dataclass
class Child:
    """One supervised process and when it may be started again."""

    role: str
    process: "subprocess.Popen[bytes]"
    started: float
    backoff: float = 0.5
    restart_at: float | None = None


class Supervisor:
    """Keeps the children alive until told to stop, or until no run has been running for `idle_seconds`."""

    def __init__(self, where: Settings, idle_seconds: float | None) -> None:
        self.where = where
        self.idle_seconds = idle_seconds
        self.stopping = False
        self.busy_at = time.monotonic()
        self.children: list[Child] = []

    def run(self) -> None:
        """Starts everything, watches it, stops it. Redis first up and last down."""
        if broker.in_memory(self.where):
            log.warning("no Redis server was found: all in this process, over an in-memory broker")
            run_together(self._idle)
            return
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        roles = [*([] if self.where.broker_url else ["redis"]), *WORKERS]
        try:
            self.children = [Child(role, self._start(role), time.monotonic()) for role in roles]
            self._watch()
        finally:
            self._end()

    def _watch(self) -> None:
        checked = time.monotonic()
        while not self.stopping:
            time.sleep(0.2)
            for child in self.children:
                self._revive(child)
            if time.monotonic() - checked > 1.0:
                checked = time.monotonic()
                self.stopping = self.stopping or self._idle()

    def _idle(self) -> bool:
        """Whether no run has been running for long enough to stop."""
        if self.idle_seconds is None:
            return False
        if observe.unfinished_runs(database()):
            self.busy_at = time.monotonic()
        return time.monotonic() - self.busy_at > self.idle_seconds

    def _revive(self, child: Child) -> None:
        code = child.process.poll()
        now = time.monotonic()
        if code is None:
            return
        if child.restart_at is None:
            calm = now - child.started > CALM_SECONDS
            child.backoff = 0.5 if calm else min(2 * child.backoff, MAX_BACKOFF)
            child.restart_at = now + (0.0 if calm else child.backoff)
            log.warning("%s ended with %s; again in %.1f s", child.role, code, child.restart_at - now)
        if now >= child.restart_at:
            try:
                child.process, child.started, child.restart_at = self._start(child.role), now, None
            except ServiceError as error:
                child.restart_at = now + MAX_BACKOFF
                log.error("%s", error)

    def _start(self, role: str) -> "subprocess.Popen[bytes]":
        if role == "redis":
            return broker.start_server(self.where)
        command = [sys.executable, "-m", "workers.main", role]
        with log_file(self.where, role).open("ab") as output:
            environment = {**os.environ, SUPERVISOR: str(os.getpid())}
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _end(self) -> None:
        workers = [child for child in self.children if child.role != "redis"]
        for group in (workers, [child for child in self.children if child.role == "redis"]):
            for child in group:
                child.process.terminate()
            for child in group:
                try:
                    child.process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    child.process.kill()


def log_file(where: Settings, role: str) -> Path:
    """Where a process of the embedded stack writes its log."""
    return where.stack_dir / f"{role.replace(',', '-')}.log"


def running(where: Settings) -> int | None:
    """The pid of the supervisor of this data folder; None where there is none."""
    try:
        with (where.stack_dir / "supervisor.lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        state = where.stack_dir / "supervisor.json"
        return int(json.loads(state.read_text())["pid"]) if state.is_file() else 0


def ensure(where: Settings, stay: bool = False) -> bool:
    """Starts the embedded stack unless it runs; returns whether it was started.

    Args:
        stay: it stops only when told to.

    Raises:
        ServiceError: it does not come up.
    """
    if running(where) is not None:
        _await_broker(where, None)
        return False
    where.stack_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "workers.supervisor", *(["--stay"] if stay else [])]
    with log_file(where, "supervisor").open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    _await_broker(where, process)
    return True


def _await_broker(where: Settings, process: "subprocess.Popen[bytes] | None") -> None:
    deadline = time.monotonic() + START_SECONDS
    while not (broker.answers(where) and running(where) is not None):
        # Of several that start at once all but one end at once with 0.
        if (process is not None and process.poll()) or time.monotonic() > deadline:
            raise ServiceError("The embedded stack does not come up.", f"See {log_file(where, 'supervisor')}.")
        time.sleep(0.05)


def stop(where: Settings) -> bool:
    """Stops the embedded stack and waits for its end; False where none runs. Unfinished runs go on at the next start."""
    pid = running(where)
    if not pid:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS + 10
    while running(where) is not None:
        if time.monotonic() > deadline:
            raise ServiceError(f"The supervisor {pid} does not stop.", f"kill -9 {pid}")
        time.sleep(0.05)
    return True


def _hold_lock(where: Settings) -> IO[str] | None:
    file = (where.stack_dir / "supervisor.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    (where.stack_dir / "supervisor.json").write_text(json.dumps({"pid": os.getpid()}))
    return file


def main(stay: bool) -> None:
    """The supervisor process."""
    where = settings()
    where.stack_dir.mkdir(parents=True, exist_ok=True)
    set_up_logging()
    lock = _hold_lock(where)
    if lock is None:
        return
    with lock:
        Supervisor(where, None if stay else where.idle_stop_seconds).run()


if __name__ == "__main__":
    main("--stay" in sys.argv[1:])
