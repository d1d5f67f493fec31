"""The supervisor: one process over a private Redis and three workers, for a machine where nothing runs yet.

`agentrl up` starts it, and so does `submit` where no broker is named; it restarts the dead with back-off, sends again what a
dead tools worker may have had, and one that `submit` started stops some time after the last run, unless `up` was said since.
`AGENTRL_BROKER_URL` set, it leaves Redis out and supervises the workers alone. Rollout and train share a process, and one copy
of the base, unless they are asked to be separate or an unfinished run wants rollouts to go on during updates.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from queue import Queue
from types import FrameType

from agentrl.workers.stack import broker, embedded, oom_kills
from agentrl.workers.stack.process import database
from agentrl.workers.stack.worker import SUPERVISOR, run_together, set_up_logging
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.store import control_reads
from agentrl.workflow.store.lost_workers import OOM_HINT, record_loss, record_oom

log = getLogger("agentrl.supervisor")
WORKERS = ("rollout,train", "tools", "control")
SEPARATE = ("rollout", "train", "tools", "control")
CALM_SECONDS = 30.0
"""A process that lived this long is started again at once; one that died sooner waits longer each time."""
MAX_BACKOFF = 30.0
"""Nor longer than half a lease: what the dead process held waits that long anyway, and must not wait for the living."""


@dataclass
class Child:
    """One supervised process, when it may be started again, and how often the out-of-memory killer had struck before it."""

    role: str
    process: "subprocess.Popen[bytes]"
    started: float
    backoff: float = 0.5
    restart_at: float | None = None
    kills: int = field(default_factory=oom_kills.count_kills)


class Supervisor:
    """Keeps the children alive until told to stop, or until no run has been running for a while and nobody said `up`."""

    def __init__(self, where: Settings, separate: bool = False) -> None:
        self.where = where
        self.separate = separate
        self.stopping = False
        self.busy_at = time.monotonic()
        self.children: list[Child] = []
        self.news: Queue[Callable[[], None]] = Queue()
        threading.Thread(target=self._record_losses, name="news", daemon=True).start()

    def run(self) -> None:
        """Starts everything, watches it, stops it. Redis first up and last down."""
        if broker.is_in_memory(self.where):
            log.warning("no Redis server was found: all in this process, over an in-memory broker")
            run_together(self._is_idle)
            return
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        roles = [*([] if self.where.broker_url else ["redis"]), *(SEPARATE if self.separate else WORKERS)]
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
                self._restart_ended(child)
            if time.monotonic() - checked > 1.0:
                checked = time.monotonic()
                self.stopping = self.stopping or self._is_idle()

    def _is_idle(self) -> bool:
        """Whether no run has been running for long enough to stop; if so, the state file says so before anybody is stopped."""
        if not self._is_quiet():
            return False
        embedded.write_state(self.where, stopping=True, separate=self.separate)
        if self._is_quiet():  # who asked before the file was written relies on this stack, who asks later waits for its end
            return True
        embedded.write_state(self.where, stopping=False, separate=self.separate)
        return False

    def _is_quiet(self) -> bool:
        if embedded.stay_file(self.where).exists() or embedded.was_asked_lately(self.where) or self._is_busy():
            self.busy_at = time.monotonic()
            return False
        return time.monotonic() - self.busy_at > self.where.idle_stop_seconds

    def _is_busy(self) -> bool:
        try:
            return control_reads.count_running_runs(database()) > 0
        except Exception as error:  # noqa: BLE001 - nothing that the database does is a reason to end the workers
            log.warning("taken for busy: %s", error)
            return True

    def _restart_ended(self, child: Child) -> None:
        code = child.process.poll()
        now = time.monotonic()
        if code is None:
            return
        if child.restart_at is None:
            calm = now - child.started > CALM_SECONDS
            child.backoff = 0.5 if calm else min(2 * child.backoff, MAX_BACKOFF, self.where.lease_seconds / 2)
            child.restart_at = now + (0.0 if calm else child.backoff)
            log.warning("%s ended with %s; again in %.1f s", child.role, code, child.restart_at - now)
            out_of_memory = code == -signal.SIGKILL and oom_kills.count_kills() > child.kills
            self.news.put(partial(_record_loss, child.role, child.process.pid, code, out_of_memory))
            if child.role == "tools":
                self.news.put(_send_calls_again)
        if now >= child.restart_at:
            try:
                child.process, child.started, child.restart_at = self._start(child.role), now, None
                child.kills = oom_kills.count_kills()
            except ServiceError as error:
                child.restart_at = now + MAX_BACKOFF
                log.error("%s", error)

    def _record_losses(self) -> None:
        """Beside the watch: a database that is away delays no restart, and no stop."""
        while True:
            tell = self.news.get()
            try:
                tell()
            except Exception as error:  # noqa: BLE001 - nothing that the database does is a reason to tell no more
                log.warning("not told: %s", error)
            self.news.task_done()

    def _start(self, role: str) -> "subprocess.Popen[bytes]":
        if role == "redis":
            return broker.start_server(self.where)
        command = [sys.executable, "-P", "-m", "agentrl.workers.stack.worker", role]
        with embedded.log_file(self.where, role).open("ab") as output:
            environment = {**os.environ, SUPERVISOR: str(os.getpid())}
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _end(self) -> None:
        embedded.write_state(self.where, stopping=True, separate=self.separate)
        workers = [child for child in self.children if child.role != "redis"]
        for group in (workers, [child for child in self.children if child.role == "redis"]):
            for child in group:
                child.process.terminate()
            for child in group:
                try:
                    child.process.wait(embedded.STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    child.process.kill()


def _record_loss(role: str, pid: int, code: int, out_of_memory: bool) -> None:
    """Tells the runs' events who is gone, and how it ended."""
    name = f"{socket.gethostname()}:{pid}"
    if out_of_memory:
        log.error("%s was killed by the kernel, out of memory. %s", role, OOM_HINT)
        record_oom(database(), name, role)
    else:
        record_loss(database(), name, role, _describe_exit(code))


def _describe_exit(code: int) -> str:
    """How a process with that code ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _send_calls_again() -> None:
    """So that nobody waits until a lease and a tool's time limit have passed for what the dead tools worker had begun."""
    from agentrl.workers.stack.dispatch import send_calls_again

    send_calls_again(database())  # where that fails, the rollouts do it, later


def _is_some_run_overlapping() -> bool:
    try:
        return control_reads.some_run_overlaps(database())
    except Exception as error:  # noqa: BLE001 - nothing that the database does is a reason to start no workers
        log.warning("taken for no: %s", error)
        return False


def main(stay: bool, separate: bool = False) -> None:
    """The supervisor process.

    Args:
        stay: it stops only when told to.
        separate: rollout and train are processes of their own.
    """
    where = settings()
    where.stack_dir.mkdir(parents=True, exist_ok=True)
    set_up_logging()
    lock = embedded.hold_lock(where)
    if lock is None:
        return
    with lock:
        (where.stack_dir / "supervisor.json").unlink(missing_ok=True)  # of one that was killed
        if stay:
            embedded.stay_file(where).touch()
        else:
            embedded.stay_file(where).unlink(missing_ok=True)
        separate = separate or (not broker.is_in_memory(where) and _is_some_run_overlapping())
        embedded.write_state(where, stopping=False, separate=separate)
        try:
            Supervisor(where, separate).run()
        finally:
            (where.stack_dir / "supervisor.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main(stay=False, separate="--separate" in sys.argv[1:])
