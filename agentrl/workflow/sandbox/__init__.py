"""The interface of a sandbox, which runs model-written code: requests, limits and results.

`find_sandbox(settings)` in `sandbox.find` returns the sandbox of this machine. `run` starts a new interpreter for each program.
A `session` runs pieces of code, called cells, in one interpreter that keeps the names they define; its `call` calls a function
that a cell defined. A result contains only what was observed from outside: text, an exit code and plain data. A result never
says whether the code passed a test; the caller compares the data itself.

Only the parent process decides a status. Code that ends by itself is `ok` or `error`. Code that was killed is classified by the
kernel's counters (CPU seconds, memory, processes). `sandbox_fault` and `starved` are system failures. The caller retries them,
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

- ok, error: a program ended by itself, with exit code 0 (ok) or another exit code (error). A cell or call returned (ok) or
    raised (error).
- timeout_cpu: the code used up its processor time.
- timeout_wall: the code slept, or waited for its own processes, until the wall-clock limit.
- oom, output_cap, pids: the code used more memory, printed more, or started more processes than allowed.
- disk: the code wrote more files than allowed, in a sandbox that does not refuse the write itself.
- killed: the code died in another way, by a signal or because a session's process is gone.
- starved: the code reached the wall-clock limit, and waited for a core for at least half of that time.
- sandbox_fault: the sandbox did not start, or died before the code began.
"""

WALL_BASE_SECONDS = 5.0
WALL_PER_CPU_SECOND = 4.0
WALL_PER_NEIGHBOUR = 1.25
"""The factor by which the wall-clock limit grows with the number of running programs per core. It is a fair share (1) and a
quarter more.
"""
MIB = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """The resources that one piece of code may use.

    Args:
        cpu_seconds: the processor time, in seconds. The limit applies to all processes of the code together if the kernel
            counts them together, else to each process alone.
        wall_seconds: the wall-clock limit, in seconds. None means 5 + cpu_seconds x max(4, 1.25 x running / cores), where
            `running` is the number of programs that share the cores. So other programs on the machine do not decide the
            outcome.
        memory_bytes: the limit on the resident memory of all processes of the code plus the size of its files in /tmp, in
            bytes.
        output_bytes: the maximum size of stdout and stderr together, in bytes. Code that prints more is killed.
        processes: the maximum number of processes and threads at a time.
        tmp_bytes: the size of /tmp, in bytes.
        asleep_seconds: the wall-clock time that the code may be asleep, in seconds. Code is asleep while it
            uses almost no processor time, although a core is free for it.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float | None = None
    memory_bytes: int = 512 * MIB
    output_bytes: int = 64 * 1024
    processes: int = 48
    tmp_bytes: int = 32 * MIB
    asleep_seconds: float = 10.0

    def wall(self, running: int) -> float:
        """Return the wall-clock limit, in seconds, for the case that `running` programs share this machine's cores."""
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
        output: stdout and stderr in the order of writing. Bytes that are not UTF-8 are backslash escapes.
        exit_code: the exit code of the process or the cell, negative if a signal ended it; None if it was killed from outside.
        cpu_seconds, wall_seconds: the processor time and the wall-clock time that the code used, in seconds.
        kind: the sandbox's kind: bwrap, landlock, docker, unsafe.
        value: the return value of a call, as JSON text (see `sandbox.exact_json`); empty if there is no return value. The code
            inside may have forged this text. Only the length of the text is checked: at most `exact_json.MAX_CHARACTERS`
            characters.
        left: the number of processes and threads that a cell left running and that were then killed.
        waited_seconds: the part of the wall-clock time in which the code waited for a core, in seconds, as far as observed.
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
    """A long-lived interpreter that runs pieces of code, called cells. If a cell dies or is killed, the session returns to its
    state before that cell.

    Objects remain after their cell has ended; processes, threads and timers end with their cell. Between cells nothing runs.
    `random` has a fixed seed and strings have fixed hashes, so the same cells print the same text in another session.
    """

    @property
    def alive(self) -> bool:
        """False if the session is known to have ended."""
        ...

    def run(self, code: str, limits: Limits | None = None) -> CodeResult:
        """Run a cell. If the last statement is an expression, print its value. `limits` replaces the session's limits for this
        cell. Raise ConfigError if `limits` differs from the session's limits in memory, processes or /tmp, or allows more
        processor time.
        """
        ...

    def call(
        self, function: str, args: Sequence[object] | str, limits: Limits | None = None, *, keeps: bool = True
    ) -> CodeResult:
        """Call a function that a cell defined, with plain data. `sandbox.exact_json` says how the return value is encoded.
        `args` is a sequence of plain data, or the `exact_json` text of a list or tuple. If `keeps` is False, the session
        returns to its state before the call when the call has ended, and all processes that the call started are killed.
        """
        ...

    def close(self) -> None:
        """Wait for a running cell, then kill all processes of the session. Idempotent."""
        ...


class Sandbox(Protocol):
    """An environment that runs model-written code with limits. Thread-safe."""

    @property
    def kind(self) -> str:
        """The kind of the sandbox: bwrap, landlock, docker or unsafe."""
        ...

    def run(self, code: str, stdin: str = "", limits: Limits = DEFAULTS) -> CodeResult:
        """Run a program in a new interpreter. Afterwards all of its processes and files are gone."""
        ...

    def session(self, limits: Limits = DEFAULTS, reads: Sequence[str] = ()) -> Session:
        """Open a session. `reads` lists additional paths of this host that the session may read. Raise InfraError if the
        session did not start. Raise ConfigError if this kind of sandbox cannot give access to paths of the host.
        """
        ...

    def close(self) -> None:
        """Kill all running programs and sessions. Idempotent."""
        ...
