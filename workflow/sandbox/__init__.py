"""Run model-written code and survive it: what may be asked of a sandbox, and what it answers.

`find_sandbox(settings)` of `sandbox.find` gives the one this machine has. `run` starts from nothing each time; a
`session` keeps the names that its cells define, and `call` calls one of them. What comes back is what was seen from outside:
a result never says "passed", it carries text, an exit code and plain data that whoever asked compares itself.

Only the parent decides a status. Code that is inside can end as `ok` or `error` by itself; what was killed is classified by
what the kernel counted (CPU seconds, memory, processes). `sandbox_fault` and `starved` are the system's failures: retried,
never a reward of 0.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Status = Literal[
    "ok", "error", "timeout_cpu", "timeout_wall", "oom", "output_cap", "pids", "disk", "killed", "starved", "sandbox_fault"
]
"""How a piece of code ended.

ok, error        by itself: exit code 0 or another, a cell or call that returned or raised
timeout_cpu      it used up the model's budget of processor time
timeout_wall     it slept, or waited for itself, until the limit on the clock
oom, output_cap, pids   it took more memory, printed more, started (or left) more processes than it may
disk         it wrote more files than it may, where that is not refused as it is written
killed           it died otherwise: a signal, or a session's process that is gone
starved          the limit on the clock passed while it waited for a core, half of the time or more
sandbox_fault    the sandbox did not come up, or died before the code began
"""

WALL_BASE_SECONDS = 5.0
WALL_PER_CPU_SECOND = 4.0
WALL_PER_NEIGHBOUR = 1.25
"""Times as much on the clock for each program that wants the same core: what a fair share takes, and a quarter."""
MIB = 1024 * 1024


@dataclass(frozen=True)
class Limits:
    """What one piece of code may use.

    Args:
        cpu_seconds: processor time, summed over its processes where the kernel counts them together, else of each.
        wall_seconds: seconds on the clock; None: 5 + 4 x cpu_seconds x max(1, running / cores), so that what neighbours do
            does not decide.
        memory_bytes: resident memory of all its processes and of what it writes to /tmp.
        output_bytes: what is kept of stdout and stderr together; printing more ends it.
        processes: processes and threads at once.
        tmp_bytes: the size of /tmp.
        asleep_seconds: seconds on the clock in which it uses next to no processor, and waits for none.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float | None = None
    memory_bytes: int = 512 * MIB
    output_bytes: int = 64 * 1024
    processes: int = 48
    tmp_bytes: int = 32 * MIB
    asleep_seconds: float = 10.0

    def wall(self, running: int) -> float:
        """The limit on the clock while `running` processes want this machine's cores."""
        if self.wall_seconds is not None:
            return self.wall_seconds
        crowd = running / (os.cpu_count() or 1)
        return WALL_BASE_SECONDS + self.cpu_seconds * max(WALL_PER_CPU_SECOND, WALL_PER_NEIGHBOUR * crowd)


DEFAULTS = Limits()


@dataclass(frozen=True)
class Result:
    """What became of a piece of code.

    Args:
        status: see `Status`.
        output: stdout and stderr in the order they were written; bytes that are no UTF-8 as backslash escapes.
        exit_code: of the process, negative for a signal, or what a cell would have ended with; None where it was killed from
            outside.
        cpu_seconds, wall_seconds: what it used.
        kind: of the sandbox: bwrap, landlock, docker, unsafe.
        value: of a call that returned: its value as JSON text (see `sandbox.exact_json`), or what the code inside would
            have one take for it: at most `plain.MAX_CHARACTERS`, and not looked into; else "".
        left: processes and threads that a cell left running, which were ended with it.
        waited_seconds: how long it waited for a core, of its seconds on the clock, as far as was seen.
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
    """One long-lived interpreter. A cell that dies or is killed leaves the state as it was before the cell.

    Objects outlast their cell; processes, threads and timers end with it. Between cells nothing runs. `random` begins with a
    fixed seed and strings hash alike, so that the same cells print the same in another session.
    """

    @property
    def alive(self) -> bool:
        """Whether it can run another cell, as far as is known."""
        ...

    def run(self, code: str, limits: Limits | None = None) -> Result:
        """Runs a cell; the value of a last expression is printed. `limits` replace the session's for this cell.

        Raises:
            ConfigError: they change its memory, processes or tmp, which are the whole session's, or are more processor time
                than the session's.
        """
        ...

    def call(self, function: str, args: Sequence[object] | str, limits: Limits | None = None, *, keeps: bool = True) -> Result:
        """Calls a function that the cells defined with plain data; a value that is no plain data is an `error`.

        Args:
            args: plain data, or the text of a list or tuple of them.
            keeps: False: the state stays as it was before the call, which is ended with all that it started.
        """
        ...

    def close(self) -> None:
        """Ends all of its processes, once a cell that runs has ended. Twice is no error."""
        ...


class Sandbox(Protocol):
    """Where model-written code runs. Safe to use from many threads."""

    @property
    def kind(self) -> str:
        """bwrap, landlock, docker or unsafe."""
        ...

    def run(self, code: str, stdin: str = "", limits: Limits = DEFAULTS) -> Result:
        """Runs a program from nothing: a fresh interpreter, a fresh /tmp; nothing of it is left when this returns."""
        ...

    def session(self, limits: Limits = DEFAULTS, reads: Sequence[str] = ()) -> Session:
        """Opens a session.

        Args:
            reads: paths of this host that it may read too.

        Raises:
            InfraError: it did not come up.
            ConfigError: this kind shows nothing of this host.
        """
        ...

    def close(self) -> None:
        """Ends whatever still runs. Twice is no error."""
        ...
