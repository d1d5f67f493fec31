"""The supervisor: one process that runs a private Redis and the workers on this machine.

The supervisor restarts dead processes with back-off, and sends the calls of a dead tools worker again. If `submit` started the
supervisor, it stops some time after the last run has ended. If `AGENTRL_BROKER_URL` is set, it starts no Redis. Rollout and
train share one process and one copy of the base, except with `--separate`.

If a run has an agent, the supervisor also starts an endpoint and, unless the agent runs elsewhere, an agents worker. The
supervisor owns the endpoint's listening socket, so clients of a restarted endpoint wait in the backlog.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from queue import Queue
from types import FrameType

from agentrl.workers.stack import broker, embedded, listening, oom_kills
from agentrl.workers.stack.process import database
from agentrl.workers.stack.worker import FOR_AGENTS, SUPERVISOR, run_together, set_up_logging
from agentrl.workflow.errors import DeviceLost, ServiceError
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.store import control_reads, endpoint_reads
from agentrl.workflow.store.leases import OOM_HINT, record_loss, record_oom

log = getLogger("agentrl.supervisor")
WORKERS = ("rollout,train", "tools", "control")
SEPARATE = ("rollout", "train", "tools", "control")
CALM_SECONDS = 30.0
"""The shortest time, in seconds, for which a process must have run to be restarted without a wait. If it ran for a shorter
time, the wait doubles each time.
"""
CALM_SECONDS_OF_ENDPOINT = 1.0
"""The same limit for the endpoint, in seconds. The limit is lower because the endpoint starts quickly and agents wait for it.
"""
MAX_BACKOFF = 30.0
"""The longest wait before a restart, in seconds. If half a lease is shorter, the longest wait is half a lease, because other
workers can take over the claims of the dead process after a lease.
"""


@dataclass
class SupervisedProcess:
    """A supervised process.

    Attributes:
        role: the role of the worker, or `redis`.
        process: the process; None before its first start.
        started: the time of its start, in seconds of the monotonic clock.
        backoff: the wait before its next restart, in seconds.
        restart_at: the earliest time of its restart, on the monotonic clock; None while it is running.
        kills: the number of out-of-memory kills before its start.
    """

    role: str
    process: "subprocess.Popen[bytes] | None"
    started: float
    backoff: float = 0.5
    restart_at: float | None = None
    kills: int = field(default_factory=oom_kills.count_kills)


class Supervisor:
    """The parent of the workers. It restarts them until it is stopped. If the file `stay` does not exist, it also stops after
    it was idle for long.
    """

    def __init__(self, where: Settings, separate: bool = False) -> None:
        self.where = where
        self.separate = separate
        self.stopping = False
        self.busy_at = time.monotonic()
        self.children: list[SupervisedProcess] = []
        self.listener: socket.socket | None = None
        self.news: Queue[Callable[[], None]] = Queue()
        threading.Thread(target=self._record_losses, name="news", daemon=True).start()

    def run(self) -> None:
        """Start and watch all child processes, and stop them at the end. Redis starts first and stops last."""
        if broker.is_in_memory(self.where):
            log.warning("no Redis server was found: running all workers in this process with an in-memory broker")
            try:
                run_together(self._is_idle, partial(self._tend_agents, ["endpoint"]))
            finally:
                self._end()
            return
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        embedded.agents_file(self.where).unlink(missing_ok=True)  # another stack's
        roles = [*([] if self.where.broker_url else ["redis"]), *(SEPARATE if self.separate else WORKERS)]
        try:
            self.children = [SupervisedProcess(role, self._start(role), time.monotonic()) for role in roles]
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
                self._tend_agents(FOR_AGENTS)
                self.stopping = self.stopping or self._is_idle()

    def _tend_agents(self, roles: Sequence[str]) -> bool:
        running_roles = {child.role for child in self.children}
        for child in self.children if broker.is_in_memory(self.where) else ():
            self._restart_ended(child)
        if running_roles.issuperset(roles):
            return True
        is_asked = embedded.agents_file(self.where).exists()
        if not (is_asked or _some_run_has_agent()):
            return False
        for role in roles:
            if role in running_roles or (role == "agents" and not (is_asked or _some_run_has_agent(elsewhere=False))):
                continue
            self.children.append(SupervisedProcess(role, None, time.monotonic(), restart_at=0.0))
            self._restart_ended(self.children[-1])
        return True

    def _is_idle(self) -> bool:
        """Return whether no run was active for `idle_stop_seconds`. If so, write first that the stack is stopping."""
        if not self._is_quiet():
            return False
        embedded.write_state(self.where, stopping=True, separate=self.separate)
        if self._is_quiet():  # a command that asked before the file was written uses this stack; a later one waits for its end
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
            log.warning("the runs cannot be counted, so the stack counts as busy: %s", error)
            return True

    def _restart_ended(self, child: SupervisedProcess) -> None:
        code = child.process.poll() if child.process else 0
        now = time.monotonic()
        if code is None:
            return
        if child.restart_at is None and child.process:
            calm = now - child.started > (CALM_SECONDS_OF_ENDPOINT if child.role == "endpoint" else CALM_SECONDS)
            child.backoff = 0.5 if calm else min(2 * child.backoff, MAX_BACKOFF, self.where.lease_seconds / 2)
            child.restart_at = now + (0.0 if calm else child.backoff)
            log.warning("%s ended with %s; restarting in %.1f s", child.role, code, child.restart_at - now)
            out_of_memory = code == -signal.SIGKILL and oom_kills.count_kills() > child.kills
            if code != DeviceLost.exit_code:  # that process has recorded its end itself
                self.news.put(partial(_record_loss, child.role, child.process.pid, code, out_of_memory))
            if child.role == "tools":
                self.news.put(_send_calls_again)
        if child.restart_at is not None and now >= child.restart_at:
            try:
                child.process, child.started, child.restart_at = self._start(child.role), now, None
                child.kills = oom_kills.count_kills()
            except ServiceError as error:
                child.restart_at = now + MAX_BACKOFF
                log.error("%s", error)

    def _record_losses(self) -> None:
        """Record lost processes, in a separate thread, so that a slow database delays neither restarts nor the stop."""
        while True:
            tell = self.news.get()
            try:
                tell()
            except Exception as error:  # noqa: BLE001 - nothing that the database does is a reason to tell no more
                log.warning("a lost process could not be recorded: %s", error)
            self.news.task_done()

    def _start(self, role: str) -> "subprocess.Popen[bytes]":
        if role == "redis":
            return broker.start_server(self.where)
        command = [sys.executable, "-P", "-m", "agentrl.workers.stack.worker", role]
        environment, handed = {**os.environ, SUPERVISOR: str(os.getpid())}, []
        if role == "endpoint":
            self.listener = self.listener or listening.bind(listening.LOOPBACK, self.where.endpoint_port)
            handed = [self.listener.fileno()]
            environment[listening.LISTENER] = str(handed[0])
        with embedded.log_file(self.where, role).open("ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, pass_fds=handed
            )

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _end(self) -> None:
        embedded.write_state(self.where, stopping=True, separate=self.separate)
        started = [(child.role == "redis", child.process) for child in self.children if child.process]
        for redis in (False, True):
            group = [process for is_redis, process in started if is_redis == redis]
            for process in group:
                process.terminate()
            for process in group:
                try:
                    process.wait(embedded.STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    with suppress(subprocess.TimeoutExpired):  # the kernel may hold a process whose device or disk hangs
                        process.wait(embedded.STOP_SECONDS)


def _record_loss(role: str, pid: int, code: int, out_of_memory: bool) -> None:
    """Record in the events of the runs which process was lost and how it ended."""
    name = f"{socket.gethostname()}:{pid}"
    if out_of_memory:
        log.error("%s was killed by the kernel, out of memory. %s", role, OOM_HINT)
        record_oom(database(), name, role)
    else:
        record_loss(database(), name, role, _describe_exit(code))


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _send_calls_again() -> None:
    """Send the calls of a dead tools worker again at once, instead of after a lease and the tool's time limit."""
    from agentrl.workers.stack.dispatch import send_calls_again

    send_calls_again(database())  # if that fails, the rollouts do it later


def _is_some_run_overlapping() -> bool:
    try:
        return control_reads.some_run_overlaps(database())
    except Exception as error:  # noqa: BLE001 - nothing that the database does is a reason to start no workers
        log.warning("the runs cannot be read, so none counts as overlapping: %s", error)
        return False


def _some_run_has_agent(elsewhere: bool = True) -> bool:
    try:
        return endpoint_reads.some_run_has_agent(database(), elsewhere)
    except Exception as error:  # noqa: BLE001 - nothing that the database does is a reason to end the workers
        log.warning("cannot read which runs have an agent; no agents worker is started for them: %s", error)
        return False


def main(stay: bool, separate: bool = False) -> None:
    """Run the supervisor unless another one is running. `stay` and `separate` are the options of `agentrl up`."""
    where = settings()
    where.stack_dir.mkdir(parents=True, exist_ok=True)
    set_up_logging()
    lock = embedded.hold_lock(where)
    if lock is None:
        return
    with lock:
        (where.stack_dir / "supervisor.json").unlink(missing_ok=True)  # left by a killed supervisor
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
