"""Supervision of a running program by its parent process: the program's output, its time, its end, and the resulting status.

The kernel's count decides whether a program has passed its limit on processor time. A program with n seconds of processor time
left needs at least n / cores seconds to use them up. So the next check happens within that time. The wall-clock limit is
extended while other programs need the cores too. A program that still passes the wall-clock limit was either starved or asleep.
By the kernel's count, a starved program waited for a core for at least half of its wall-clock time; this is a system failure. A
program that is asleep for longer than `Limits.asleep_seconds` is killed earlier.
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

from agentrl.workflow.errors import InfraError
from agentrl.workflow.sandbox import Limits, Status, proc
from agentrl.workflow.sandbox.cgroups import CgroupEvents
from agentrl.workflow.sandbox.launch import RunningSandbox

SHORTEST_LOOK_SECONDS, MAX_LOOK_SECONDS = 0.02, 0.5
CHUNK = 1 << 16
CROWD_PER_CORE = 8
"""The number of programs per core up to which the wall-clock limit is extended."""

STARVED_SHARE = 0.5
"""The share of the wall-clock time that a program must have waited for a core to count as starved. A program's own threads
cannot cause this: they make each other wait no longer than they run, and the wall-clock limit is at least four times the
limit on processor time.
"""
ASLEEP_SHARE = 0.02
"""The share of the time between two checks in which a program must use a core or wait for one. If the share is smaller, the
program was asleep.
"""

Overrun = Literal["timeout_cpu", "timeout_wall", "output_cap", "starved"]


@dataclass(frozen=True)
class Use:
    """What was observed while a program ran: the reason to kill it (None if it ended by itself), the output up to its limit,
    and times in seconds.
    """

    overrun: Overrun | None
    output: bytes
    wall_seconds: float
    waited_seconds: float = 0.0


class Clock:
    """The limits on a program's time, checked while it runs.

    Args:
        limits: the program's limits.
        running: returns the number of running programs of this process.
    """

    def __init__(self, limits: Limits, running: Callable[[], int]) -> None:
        self._limits, self._running, self._crowd = limits, running, 1
        self._began = self._seen = time.monotonic()
        self._busy = self._asleep = 0.0

    @property
    def elapsed(self) -> float:
        """The time since the program began, in seconds."""
        return time.monotonic() - self._began

    @property
    def remaining(self) -> float:
        """The time until the wall-clock limit, in seconds."""
        self._crowd = min(max(self._crowd, self._running(), _runnable()), CROWD_PER_CORE * (os.cpu_count() or 1))
        return self._limits.wall(self._crowd) - self.elapsed

    def look(self, cpu: float, waited: float) -> tuple[Overrun | None, float]:
        """Check the limits. Return the reason to kill the program now (None if there is no reason), and the time until the next
        check, in seconds. `cpu` is the program's processor time so far, in seconds. `waited` is the time that the program
        waited for a core so far, in seconds.
        """
        limits, now = self._limits, time.monotonic()
        if cpu + waited - self._busy < ASLEEP_SHARE * (now - self._seen):
            self._asleep += now - self._seen
        self._seen, self._busy = now, cpu + waited
        left, wall = self.remaining, now - self._began
        if cpu >= limits.cpu_seconds:
            return "timeout_cpu", 0.0
        if self._asleep >= limits.asleep_seconds:
            return "timeout_wall", 0.0
        if left <= 0:
            return "starved" if waited >= STARVED_SHARE * wall else "timeout_wall", 0.0
        soon = min(left, (limits.cpu_seconds - cpu) / (os.cpu_count() or 1), wall / 2, MAX_LOOK_SECONDS)
        return None, max(SHORTEST_LOOK_SECONDS, soon)


def watch(
    output: int,
    end: int,
    limits: Limits,
    spent: Callable[[], float],
    members: Callable[[], Set[int]],
    running: Callable[[], int],
) -> Use:
    """Read the program's output until the program has ended or must be killed.

    Args:
        output: the reading end of the program's stdout and stderr.
        end: a descriptor that becomes readable when the program has ended.
        spent, members: return the program's processor time so far, in seconds, and the ids of its processes.
        running: returns the number of running programs of this process.
    """
    os.set_blocking(output, False)
    poller = select.poll()
    poller.register(output, select.POLLIN)
    poller.register(end, select.POLLIN)
    clock, waits, printed = Clock(limits, running), proc.Waits(), bytearray()
    overrun: Overrun | None = None
    due = time.monotonic() + SHORTEST_LOOK_SECONDS
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
        if time.monotonic() >= due:
            overrun, left = clock.look(spent(), waits.look(members()))
            due = time.monotonic() + left
    if clock.elapsed > SHORTEST_LOOK_SECONDS:
        waits.look(members())
    if len(printed) > limits.output_bytes:
        overrun = "output_cap"
    return Use(overrun, bytes(printed[: limits.output_bytes]), clock.elapsed, waits.seconds)


def _read(file: int, into: bytearray, max_bytes: int) -> bool:
    """Read a chunk; return whether more may follow. One byte above `max_bytes` shows that the limit was passed."""
    try:
        part = os.read(file, CHUNK)
    except BlockingIOError:
        return False
    into += part[: max(0, max_bytes + 1 - len(into))]
    return bool(part)


def explain_error(error: InfraError, output: bytes) -> InfraError:
    """Return a copy of the error whose message also contains the output of the sandbox at its start."""
    return InfraError(f"{error.message} {decode_output(output).strip()}"[:1000])


def drain(file: int) -> bool:
    """Read and discard a chunk of output; return whether there was any output."""
    return _read(file, bytearray(), 0)


def _runnable() -> int:
    with suppress(OSError):
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return 1


def cpu_seconds_of(box: RunningSandbox, lasting: Set[int] = frozenset()) -> float:
    """Return the processor time that the programs in a sandbox have used so far, in seconds.

    If `box.cgroup` counts processor time, that count is returned; it covers all processes of the sandbox. Else the times of the
    living processes are added up. `lasting` has the ids of processes that belong to the sandbox itself; they are left out.
    """
    counted = box.cgroup.cpu_seconds()
    if counted is not None:
        return counted
    return sum(proc.processor_seconds(process) for process in box.members() - lasting)


def status(limits: Limits, overrun: Overrun | None, code: int | None, cpu: float, kernel: CgroupEvents) -> Status:
    """Return the status of a program that has ended.

    Args:
        limits: the program's limits.
        overrun: the reason why the program was killed from outside; None if it was not.
        code: the program's exit code, negative for a signal. It is ignored if the program was killed from outside.
        cpu: the program's processor time, in seconds.
        kernel: the kernel's interventions during the program's run.
    """
    if overrun in ("timeout_wall", "starved") and cpu >= limits.cpu_seconds:
        return "timeout_cpu"
    if overrun is not None:
        return "oom" if kernel.oom and overrun in ("timeout_wall", "starved") else overrun
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


def decode_output(output: bytes) -> str:
    """Decode the output; bytes that are not UTF-8 are escaped."""
    return output.decode(errors="backslashreplace")
