"""One experiment: a run through real workers, a real Redis and a real database, with one fault in it, and what came of it.

It must be called in a process of its own that was forked from one with everything imported and nothing begun: no thread, no
connection. Its workers are forked from it in turn, so that a start costs a third of a second instead of five.
"""

import ctypes
import os
import shutil
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.faults import world

LEASE_SECONDS = 1.0
TICK_SECONDS = 0.2
ASLEEP_SECONDS = 3.5 * LEASE_SECONDS
"""Past a lease and the longest limit of the plain world's tools, after which a call is sent again."""
DEADLINE_SECONDS = 150.0
POLL_SECONDS = 0.05
"""Each look at the run's status opens the database: more of them cost a tenth of an experiment."""
STOP_SECONDS = 15.0
MAX_DEATHS = 20
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ELSEWHERE = ("AGENTRL_DATABASE_URL", "AGENTRL_BROKER_URL", "AGENTRL_CHECKPOINTS", "AGENTRL_SUPERVISOR")
ROLES = (("rollout", "train"), ("tools",), ("control",))
FOR_AGENTS = (("endpoint",), ("agents",))


@dataclass
class Experiment:
    """A data folder, its processes, and how they fared.

    Args:
        folder: an empty one, of a short path: a socket lies in it.
        model, migrated: the model folder, and a migrated SQLite file to copy.
        seed: of the run.
        env: which world of `world.py` it is in.
        fault: as AGENTRL_FAULT takes it; empty for an undisturbed run.
    """

    folder: Path
    model: Path
    migrated: Path
    seed: int
    env: str = "world"
    fault: str = ""
    deaths: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    _processes: dict[int, Sequence[str]] = field(default_factory=dict)
    _asleep: set[int] = field(default_factory=set)
    _stopping: bool = False

    @property
    def home(self) -> Path:
        """The data folder of the run."""
        return self.folder / "home"

    def run(self) -> float:
        """Plays it to its end; returns the seconds from the submission to the run's end."""
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # not without the processes and the Redis
        self._prepare()
        from agentrl.workers.stack import broker
        from agentrl.workflow.settings import settings

        redis = broker.start_server(settings())
        try:
            started = time.monotonic()
            self._start(["submit"])
            for roles in (*ROLES, *(FOR_AGENTS if self.env == "agent" else ())):
                self._start(roles)
            self._follow()
            seconds = time.monotonic() - started
            self._settle()
            self._stop()
        finally:
            for pid in self._processes:
                os.kill(pid, signal.SIGKILL)
            redis.kill()
            redis.wait()
        self._find_orphans()
        return seconds

    def _prepare(self) -> None:
        for name in ("home", "hits", "tmp"):
            (self.folder / name).mkdir()
        shutil.copy(self.migrated, self.home / "agentrl.db")
        for name in ELSEWHERE:
            os.environ.pop(name, None)
        os.environ |= {
            "AGENTRL_HOME": str(self.home),
            "AGENTRL_LEASE_SECONDS": str(LEASE_SECONDS),
            "AGENTRL_TICK_SECONDS": str(TICK_SECONDS),
            "AGENTRL_FAULT_DIR": str(self.folder / "hits"),
            "AGENTRL_FAULT": self.fault,
            "AGENTRL_FAULT_SLEEP": str(ASLEEP_SECONDS),
            "TMPDIR": str(self.folder / "tmp"),
        }
        if self.env == "agent":
            self._listen()
        # Who loses its parent becomes ours, and is found.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

    def _listen(self) -> None:
        """Owns the endpoint's socket, as the supervisor does: who calls while no endpoint lives waits for the next one."""
        from agentrl.workers.stack.listening import LISTENER, LOOPBACK, bind

        os.environ[LISTENER] = str(bind(LOOPBACK, 0).detach())

    def _start(self, roles: Sequence[str]) -> None:
        work = self._submit if roles == ["submit"] else lambda: _work(list(roles))
        self._processes[forked(work, self.folder / f"{'-'.join(roles)}.log")] = roles

    def _submit(self) -> None:
        from agentrl.workers.requests.submit import prepare, submit
        from agentrl.workflow.settings import settings
        from agentrl.workflow.store.migrate import open_database

        database = open_database(settings().database)
        submit(database, prepare(database, world.config(self.model, self.seed, self.env)))
        database.close()

    def _follow(self) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (status := self.status()) != "done":
            if status in ("failed", "paused") or time.monotonic() > deadline or len(self.deaths) > MAX_DEATHS:
                self.violations.append(f"I1: the run is {status or 'not there'}\n{self.logs()}")
                return
            self._mind()
            time.sleep(POLL_SECONDS)

    def _mind(self) -> None:
        """Starts again who died, and another one for who fell asleep."""
        while self._processes:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            roles = self._processes.get(pid)
            if roles is None:
                continue
            if os.WIFSTOPPED(status):
                self._asleep.add(pid)
                self.deaths.append(f"{'-'.join(roles)} asleep")
            else:
                del self._processes[pid]
                if os.waitstatus_to_exitcode(status) == 0 and roles == ["submit"]:
                    continue
                if not self._stopping:
                    self.deaths.append(f"{'-'.join(roles)} {os.waitstatus_to_exitcode(status)}")
            if not self._stopping and self.status() != "done":
                self._start(roles)

    def _settle(self) -> None:
        """The run is done; the jobs that ended it may still have something to do, and somebody may be asleep."""
        before, since = self._hits(), time.monotonic()
        while time.monotonic() - since < 0.15 or self._sleeping():
            time.sleep(0.02)
            self._mind()
            if self._hits() != before:
                before, since = self._hits(), time.monotonic()

    def _hits(self) -> int:
        """Of all points but those that the clock brings about."""
        clocks = ("take_service_lease", "extend_lease", "extend_agents", "publish_service")
        return sum(file.stat().st_size for file in (self.folder / "hits").iterdir() if not file.name.startswith(clocks))

    def _sleeping(self) -> bool:
        self._asleep = {pid for pid in self._asleep & self._processes.keys() if _state(pid) == "T"}
        return bool(self._asleep)

    def _stop(self) -> None:
        self._stopping = True
        for pid in self._processes:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while self._processes and time.monotonic() < deadline:
            self._mind()
            time.sleep(0.01)
        self.violations += [f"I5: {'-'.join(roles)} did not stop" for roles in self._processes.values()]

    def _find_orphans(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS  # what the kernel ends with its parent takes a moment to be gone
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0 and time.monotonic() > deadline:
                self.violations.append("I5: a process is left over")
                return
            time.sleep(0.01)

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"== {file.name}\n{file.read_text()[-2000:]}" for file in sorted(self.folder.glob("*.log")))

    def status(self) -> str:
        """The run's status; empty before it is there. Through a connection that is closed before anybody is forked."""
        connection = sqlite3.connect(f"file:{self.home / 'agentrl.db'}?mode=ro", uri=True, timeout=30)
        try:
            row = connection.execute("SELECT status FROM runs WHERE name = ?", [world.RUN]).fetchone()
        finally:
            connection.close()
        return str(row[0]) if row else ""


def forked(work: Callable[[], object], log: Path) -> int:
    """Runs `work` in a child process that writes to `log`, and exits with 1 if it raises; returns the child's pid."""
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # who loses interest in a child takes it along
    code = 1
    try:
        with log.open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        work()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:  # noqa: BLE001 - the parent's stack lies below this one, and is not ours to unwind
        traceback.print_exc()
    finally:
        os._exit(code)


def _work(roles: list[str]) -> None:
    from agentrl.workers.stack.worker import run

    run(roles)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
