"""A sandbox made of processes on this host. It runs single programs and sessions, with any mechanism that confines processes
(bwrap, Landlock or none).

The number of programs that run at once is at most the number of cores. The others wait in a queue; the waiting time does not
count towards their limits. A zygote (a warm interpreter that forks a process for each program) runs one program at a time, so
the zygote's control group and user id count only that program. Killing a program also kills its zygote, and the next program
gets a new zygote.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from logging import getLogger

from agentrl.workflow.errors import InfraError
from agentrl.workflow.sandbox import DEFAULTS, CodeResult, Limits, spawn
from agentrl.workflow.sandbox.boxed_session import open_session
from agentrl.workflow.sandbox.fair_semaphore import FairSemaphore
from agentrl.workflow.sandbox.launch import Launch
from agentrl.workflow.sandbox.run_program import Program, Zygote, run_cold
from agentrl.workflow.sandbox.session import CellSession

log = getLogger("agentrl.sandbox")


class Boxed:
    """A `Sandbox` that runs each program as a process of this host.

    Create one for each worker process: its semaphore limits how many programs run at once.
    """

    def __init__(self, launch: Launch) -> None:
        self.kind = launch.kind
        self.launch = launch
        self._turns = FairSemaphore(os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._idle: list[Zygote] = []
        self._closed = False
        self._sessions: set[CellSession] = set()

    def run(self, code: str, stdin: str = "", limits: Limits = DEFAULTS) -> CodeResult:
        """See `Sandbox.run`."""
        with self._turns.hold():
            try:
                return self._run(code, stdin, limits)
            except InfraError as error:
                message = str(error)
            except Exception as error:  # no descriptor, no memory, a bug of ours: never the program's mistake
                log.exception("a sandbox failed")
                message = f"{type(error).__name__}: {error}"
            return CodeResult("sandbox_fault", message, None, 0.0, 0.0, self.kind)

    def session(self, limits: Limits = DEFAULTS, reads: Sequence[str] = ()) -> CellSession:
        """See `Sandbox.session`."""
        session = open_session(self.launch, limits, self._turns, reads)
        with self._lock:
            self._sessions = {other for other in self._sessions if other.alive} | {session}
        return session

    def close(self) -> None:
        """See `Sandbox.close`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            sessions, self._sessions = self._sessions, set()
        for zygote in idle:
            zygote.close()
        for session in sessions:
            session.close()

    def _run(self, code: str, stdin: str, limits: Limits) -> CodeResult:
        with ExitStack() as files:
            source, typed = (spawn.memory_file(text.encode(errors="surrogateescape")) for text in (code, stdin))
            for file in (source, typed):
                files.callback(os.close, file)
            program = Program(source, typed, limits)
            return self._run_warm(program) if self.launch.nests else run_cold(self.launch, program, self._turns.running)

    def _run_warm(self, program: Program) -> CodeResult:
        with self._lock:
            zygote = self._idle.pop() if self._idle else None
        if zygote is None:
            zygote = Zygote(self.launch, program.limits)
        try:
            return zygote.run(program, self._turns.running)
        except BaseException:
            zygote.close()
            raise
        finally:
            self._keep(zygote)

    def _keep(self, zygote: Zygote) -> None:
        with self._lock:
            if zygote.alive and not self._closed:
                self._idle.append(zygote)
                return
        if zygote.alive:
            zygote.close()
