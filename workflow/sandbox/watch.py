"""The parent's eye on a running program: what it prints, what it uses, when it ends, and what that makes of it.

The limit on processor time is the model's, so it is asked of the kernel: nobody can use up what is left of a budget in less
than that many seconds divided by the cores, so that is when the next look is due. The limit on the clock is the system's; it
moves away while others want the cores too.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workflow.errors import InfraError
from workflow.sandbox import Limits, Status, proc
from workflow.sandbox.cgroups import Events
from workflow.sandbox.launch import Started

SHORTEST_LOOK_SECONDS = 0.02
CHUNK = 1 << 16
CROWD_PER_CORE = 8
"""The clock's limit is not put off for more than that."""

Overrun = Literal["timeout_cpu", "timeout_wall", "output_cap"]


@dataclass(frozen=True)
class Use:
    """How a program's time passed: why it must be killed (None: it ended), and what it printed, at most its limit."""

    overrun: Overrun | None
    output: bytes
    wall_seconds: float


def watch(output: int, end: int, limits: Limits, spent: Callable[[], float], running: Callable[[], int]) -> Use:
    """Reads what is printed until the program has ended or must be killed.

    Args:
        output: the reading end of its stdout and stderr.
        end: a descriptor that can be read when it has ended.
        spent: its processor seconds so far.
        running: how many programs of ours run at this moment.
    """
    os.set_blocking(output, False)
    poller = select.poll()
    poller.register(output, select.POLLIN)
    poller.register(end, select.POLLIN)
    began, crowd, printed = time.monotonic(), 1, bytearray()
    overrun: Overrun | None = None
    due = began + SHORTEST_LOOK_SECONDS
    while overrun is None:
        events = dict(poller.poll(max(0.0, due - time.monotonic()) * 1000))
        if output in events and not _read(output, printed, limits.output_bytes):
            poller.unregister(output)
        if end in events:
            while _read(output, printed, limits.output_bytes) and len(printed) <= limits.output_bytes:
                pass
            break
        if len(printed) > limits.output_bytes:
            break
        if (now := time.monotonic()) >= due:
            crowd = min(max(crowd, running(), _runnable()), CROWD_PER_CORE * (os.cpu_count() or 1))
            overrun, left = _look(limits, spent(), now - began, crowd)
            due = now + left
    if len(printed) > limits.output_bytes:
        overrun = "output_cap"
    return Use(overrun, bytes(printed[: limits.output_bytes]), time.monotonic() - began)


def _look(limits: Limits, cpu: float, wall: float, crowd: int) -> tuple[Overrun | None, float]:
    """Why it must be killed now, if so; else in how many seconds to look again."""
    if cpu >= limits.cpu_seconds:
        return "timeout_cpu", 0.0
    left = limits.wall(crowd) - wall
    if left <= 0:
        return "timeout_wall", 0.0
    return None, max(SHORTEST_LOOK_SECONDS, min(left, (limits.cpu_seconds - cpu) / (os.cpu_count() or 1)))


def _read(file: int, into: bytearray, most: int) -> bool:
    """Whether there may be more to read now or later; of what is over the limit, one byte is enough to know."""
    try:
        part = os.read(file, CHUNK)
    except BlockingIOError:
        return False
    into += part[: max(0, most + 1 - len(into))]
    return bool(part)


def explained(error: InfraError, said: bytes) -> InfraError:
    """The error with what was printed as the sandbox came up."""
    return InfraError(f"{error.message} {text(said).strip()}"[:1000])


def drained(file: int) -> bool:
    """Whether something was there to be thrown away."""
    return _read(file, bytearray(), 0)


def _runnable() -> int:
    """How many threads of the whole machine want a core at this moment."""
    with suppress(OSError):
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return 1


def spent(box: Started, lasting: Set[int] = frozenset()) -> float:
    """Processor seconds of what runs in a sandbox so far; where no control group counts them, of its living processes.

    Args:
        lasting: processes of the sandbox itself, which are not counted where each is looked at.
    """
    counted = box.cgroup.cpu_seconds()
    if counted is not None:
        return counted
    return sum(proc.processor_seconds(process) for process in box.members() - lasting)


def status(limits: Limits, overrun: Overrun | None, code: int | None, cpu: float, kernel: Events) -> Status:
    """What became of a program.

    Args:
        overrun: why it was killed from outside.
        code: its exit code otherwise, negative for a signal.
        kernel: what the kernel did to keep the limits while it ran.
    """
    if overrun == "timeout_wall" and cpu >= limits.cpu_seconds:
        return "timeout_cpu"
    if overrun is not None:
        return "oom" if kernel.oom and overrun == "timeout_wall" else overrun
    if code == 0:
        return "ok"
    if kernel.oom:
        return "oom"
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= limits.cpu_seconds):
        return "timeout_cpu"
    if kernel.disk:
        return "disk"
    if kernel.pids:
        return "pids"
    return "killed" if code is None or code < 0 else "error"


def text(output: bytes) -> str:
    """What was printed, with what is no UTF-8 escaped."""
    return output.decode(errors="backslashreplace")
