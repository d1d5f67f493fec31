"""The interface of a sandbox, which runs model-written code and survives it: requests, limits and results.

`find_sandbox(settings)` of `sandbox.find` returns the sandbox of this machine. `run` starts from nothing each time; a
`session` keeps the names that its cells define, and `call` calls one of them. A result holds what was observed from outside:
it never says "passed". It carries text, an exit code and plain data, which the caller compares itself.

Only the parent decides a status. Code inside can end by itself as `ok` or `error`; code that was killed is classified by the
kernel's counters (CPU seconds, memory, processes). `sandbox_fault` and `starved` are the system's failures: they are retried
and never become a reward of 0.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Status = Literal[
    "ok", "error", "timeout_cpu", "timeout_wall", "oom", "output_cap", "pids", "disk", "killed", "starved", "sandbox_fault"
]
"""How a piece of code ended.

ok, error        it ended by itself: exit code 0 or another, a cell or call that returned or raised
timeout_cpu      it used up the model's budget of processor time
timeout_wall     it slept, or waited for itself, until the limit on the clock
oom, output_cap, pids   it took more memory, printed more, started (or left) more processes than it may
disk         it wrote more files than it may, where that is not refused as it is written
killed           it died in another way: a signal, or a session's process that is gone
starved          it reached the limit on the clock after waiting for a core for half of that time or more
sandbox_fault    the sandbox did not start, or died before the code began
"""

WALL_BASE_SECONDS = 5.0
WALL_PER_CPU_SECOND = 4.0
WALL_PER_NEIGHBOUR = 1.25
"""Factor on the limit of the clock for each program that wants the same core: a fair share, and a quarter more."""
MIB = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """The resources that one piece of code may use.

    Args:
        cpu_seconds: processor time: the sum over its processes where the kernel counts them together, else of each process.
        wall_seconds: seconds on the clock; None: 5 + 4 x cpu_seconds x max(1, running / cores), so that busy neighbours do
            not decide the outcome.
        memory_bytes: resident memory of all its processes and of what it writes to /tmp.
        output_bytes: bytes kept of stdout and stderr together; code that prints more is ended.
        processes: processes and threads alive at once.
        tmp_bytes: the size of /tmp.
        asleep_seconds: seconds on the clock in which the code hardly uses a core, and waits for none.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float | None = None
    memory_bytes: int = 512 * MIB
    output_bytes: int = 64 * 1024
    processes: int = 48
    tmp_bytes: int = 32 * MIB
    asleep_seconds: float = 10.0

    def wall(self, running: int) -> float:
        """Return the limit on the clock while `running` processes want this machine's cores."""
        if self.wall_seconds is not None:
            return self.wall_seconds
        crowd = running / (os.cpu_count() or 1)
        return WALL_BASE_SECONDS + self.cpu_seconds * max(WALL_PER_CPU_SECOND, WALL_PER_NEIGHBOUR * crowd)


DEFAULTS = Limits()


@dataclass(frozen=True)
class CodeResult:
    """The outcome of a piece of code.

    Args:
        status: see `Status`.
        output: stdout and stderr in the order they were written; bytes that are not UTF-8 as backslash escapes.
        exit_code: the process's exit code, negative for a signal, or the one a cell would have ended with; None where it was
            killed from outside.
        cpu_seconds, wall_seconds: the time it used.
        kind: the sandbox's kind: bwrap, landlock, docker, unsafe.
        value: the value of a call that returned, as JSON text (see `sandbox.exact_json`); "" otherwise. The code inside may
            have forged it: only its length is checked, at most `exact_json.MAX_CHARACTERS`.
        left: processes and threads that a cell left running, which were then ended.
        waited_seconds: the part of its seconds on the clock in which it waited for a core, as far as was observed.
    """

    status: Status
    output: str
    exit_code: int | None
    cpu_seconds: float
    wall_seconds: float
    kind: str
    value: str = ""
    left: int = 0
    waited_seconds: float = 0.0


class Session(Protocol):
    """One long-lived interpreter. After a cell that died or was killed, the state is as it was before that cell.

    Objects outlast their cell; processes, threads and timers end with it. Between cells nothing runs. `random` begins with a
    fixed seed and strings hash alike, so that the same cells print the same in another session.
    """

    @property
    def alive(self) -> bool:
        """Whether it can run another cell, as far as is known."""
        ...

    def run(self, code: str, limits: Limits | None = None) -> CodeResult:
        """Run a cell; the value of a last expression is printed. `limits` replace the session's for this cell.

        Raises:
            ConfigError: `limits` change memory, processes or tmp, which belong to the whole session, or allow more processor
                time than the session's.
        """
        ...

    def call(
        self, function: str, args: Sequence[object] | str, limits: Limits | None = None, *, keeps: bool = True
    ) -> CodeResult:
        """Call a function that the cells defined, with plain data. How other values come out: see `sandbox.exact_json`.

        Args:
            args: a sequence of plain data, or the `exact_json` text of a list or tuple.
            keeps: False: the state stays as it was before the call, and everything the call started is ended.
        """
        ...

    def close(self) -> None:
        """End all of its processes, once a running cell has ended. Calling it twice is no error."""
        ...


class Sandbox(Protocol):
    """Where model-written code runs. Safe to use from many threads."""

    @property
    def kind(self) -> str:
        """bwrap, landlock, docker or unsafe."""
        ...

    def run(self, code: str, stdin: str = "", limits: Limits = DEFAULTS) -> CodeResult:
        """Run a program in a fresh interpreter with a fresh /tmp; nothing of it is left when this returns."""
        ...

    def session(self, limits: Limits = DEFAULTS, reads: Sequence[str] = ()) -> Session:
        """Open a session.

        Args:
            reads: further paths of this host that the session may read.

        Raises:
            InfraError: the session did not start.
            ConfigError: this kind of sandbox shows nothing of this host.
        """
        ...

    def close(self) -> None:
        """End whatever still runs. Calling it twice is no error."""
        ...
