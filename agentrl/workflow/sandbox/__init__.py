"""The interface of a sandbox, which runs model-written code: requests, limits and results.

`find_sandbox(settings)` of `sandbox.find` returns the sandbox of this machine. `run` starts a new interpreter each time. A
`session` keeps the names that its cells define, and `call` calls one of these functions. A result contains only what was
observed from outside: text, an exit code and plain data. It never says "passed"; the caller compares the data itself.

Only the parent process decides a status. Code that ends by itself is `ok` or `error`. Code that was killed is classified by the
kernel's counters (CPU seconds, memory, processes). `sandbox_fault` and `starved` are system failures: the caller retries them,
and they never become a reward of 0.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Status = Literal[
    "ok", "error", "timeout_cpu", "timeout_wall", "oom", "output_cap", "pids", "disk", "killed", "starved", "sandbox_fault"
]
"""The way in which a piece of code ended.

- ok, error: it ended by itself, with exit code 0 or another; or a cell or call returned or raised.
- timeout_cpu: it used up its budget of processor time.
- timeout_wall: it slept, or waited for itself, until the wall-clock limit.
- oom, output_cap, pids: it used more memory, printed more, or started more processes than allowed.
- disk: it wrote more files than allowed, in a sandbox that does not refuse the write itself.
- killed: it died in another way: by a signal, or because a session's process is gone.
- starved: it reached the wall-clock limit, and waited for a core for at least half of that time.
- sandbox_fault: the sandbox did not start, or died before the code began.
"""

WALL_BASE_SECONDS = 5.0
WALL_PER_CPU_SECOND = 4.0
WALL_PER_NEIGHBOUR = 1.25
"""The factor on the wall-clock limit for each program that uses the same core: a fair share and a quarter more."""
MIB = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """The resources that one piece of code may use.

    Args:
        cpu_seconds: the processor time, in seconds: of all of its processes together if the kernel counts them together, else
            of each process.
        wall_seconds: the wall-clock limit, in seconds; None for 5 + cpu_seconds x max(4, 1.25 x running / cores), so other
            programs on the machine do not decide the outcome.
        memory_bytes: the resident memory of all of its processes, and of its files in /tmp.
        output_bytes: the maximum size of stdout and stderr together; code that prints more is killed.
        processes: the maximum number of processes and threads at a time.
        tmp_bytes: the size of /tmp, in bytes.
        asleep_seconds: the wall-clock time that the code may spend asleep, in seconds: it hardly uses a core, and waits for
            none.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float | None = None
    memory_bytes: int = 512 * MIB
    output_bytes: int = 64 * 1024
    processes: int = 48
    tmp_bytes: int = 32 * MIB
    asleep_seconds: float = 10.0

    def wall(self, running: int) -> float:
        """Return the wall-clock limit in seconds while `running` programs share this machine's cores."""
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
        output: stdout and stderr in the order of writing; bytes that are not UTF-8 as backslash escapes.
        exit_code: the exit code of the process or the cell, negative if a signal ended it; None if it was killed from outside.
        cpu_seconds, wall_seconds: the processor time and the wall-clock time that it used, in seconds.
        kind: the sandbox's kind: bwrap, landlock, docker, unsafe.
        value: the return value of a call, as JSON text (see `sandbox.exact_json`); empty without one. The code inside may have
            forged it. Only its length is checked, at most `exact_json.MAX_CHARACTERS`.
        left: the number of processes and threads that a cell left running; they were killed.
        waited_seconds: the part of its wall-clock time in which it waited for a core, in seconds, as far as was observed.
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
    """A long-lived interpreter. If a cell dies or is killed, the session returns to the state before that cell.

    Objects outlast their cell; its processes, threads and timers end with it. Between cells nothing runs. `random` has a fixed
    seed and strings have fixed hashes, so the same cells print the same in another session.
    """

    @property
    def alive(self) -> bool:
        """True unless the session is known to have ended."""
        ...

    def run(self, code: str, limits: Limits | None = None) -> CodeResult:
        """Run a cell, and print the value of a last expression. `limits` replace the session's for this cell.

        Raises:
            ConfigError: `limits` change memory, processes or tmp, which are fixed for a session, or allow more processor time
                than the session's limits.
        """
        ...

    def call(
        self, function: str, args: Sequence[object] | str, limits: Limits | None = None, *, keeps: bool = True
    ) -> CodeResult:
        """Call a function that a cell defined, with plain data. `sandbox.exact_json` says how other values are returned.

        Args:
            args: a sequence of plain data, or the `exact_json` text of a list or tuple.
            keeps: False to restore the state from before the call afterwards, and kill everything that the call started.
        """
        ...

    def close(self) -> None:
        """Wait for a running cell, then kill all processes of the session. Idempotent."""
        ...


class Sandbox(Protocol):
    """A place to run model-written code. Thread-safe."""

    @property
    def kind(self) -> str:
        """The kind of the sandbox: bwrap, landlock, docker or unsafe."""
        ...

    def run(self, code: str, stdin: str = "", limits: Limits = DEFAULTS) -> CodeResult:
        """Run a program in a new interpreter with an empty /tmp. None of its processes or files are left when this returns."""
        ...

    def session(self, limits: Limits = DEFAULTS, reads: Sequence[str] = ()) -> Session:
        """Open a session.

        Args:
            reads: further paths of this host that the session may read.

        Raises:
            InfraError: the session did not start.
            ConfigError: this kind of sandbox cannot show paths of the host.
        """
        ...

    def close(self) -> None:
        """Kill everything that still runs. Idempotent."""
        ...
