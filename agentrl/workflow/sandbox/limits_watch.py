"""The parent's watch over a running program: its output, its time, its end, and the resulting status.

The limit on processor time is the model's, so the kernel's count decides. A program with n seconds left needs at least n /
cores seconds to use them up, so the next check is due by then. The wall-clock limit is extended while other programs want the
cores too. If a program still passes it, there are two cases. It was starved, a system failure, if the kernel says that it
waited for a core for at least half of that time. Else it slept. A program that does nothing but sleep is killed earlier.
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
"""The maximum number of programs per core for which the wall-clock limit is extended."""

STARVED_SHARE = 0.5
"""The minimum share of its wall-clock time that a starved program waited for a core. The wall-clock limit is at least four
times the limit on processor time, and a program's own threads make each other wait no longer than they run.
"""
ASLEEP_SHARE = 0.02
"""The share of the time between two checks that a program must spend on a core or waiting for one. With a smaller share it was
asleep.
"""

Overrun = Literal["timeout_cpu", "timeout_wall", "output_cap", "starved"]


@dataclass(frozen=True)
class Use:
    """A program's run: the reason to kill it (None if it ended), its output up to the limit, and its times in seconds."""

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
        """Check the limits; return (the reason to kill the program now, or None; the seconds until the next check).

        Args:
            cpu: the program's processor time so far, in seconds.
            waited: the time that it waited for a core so far, in seconds.
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
    """Read the program's output until it has ended or must be killed.

    Args:
        output: the reading end of its stdout and stderr.
        end: a descriptor that becomes readable when it has ended.
        limits: its limits.
        spent: returns its processor time so far, in seconds.
        members: returns its processes.
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
    """Read a chunk; return whether more may follow. One byte beyond the limit is kept, to show that the limit was passed."""
    try:
        part = os.read(file, CHUNK)
    except BlockingIOError:
        return False
    into += part[: max(0, max_bytes + 1 - len(into))]
    return bool(part)


def explain_error(error: InfraError, output: bytes) -> InfraError:
    """Return the error with the sandbox's startup output added."""
    return InfraError(f"{error.message} {decode_output(output).strip()}"[:1000])


def drain(file: int) -> bool:
    """Read and discard a chunk of output; return whether there was any."""
    return _read(file, bytearray(), 0)


def _runnable() -> int:
    """Return the number of threads on the machine that want a core now."""
    with suppress(OSError):
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return 1


def cpu_seconds_of(box: RunningSandbox, lasting: Set[int] = frozenset()) -> float:
    """Return the processor time used in a sandbox so far, in seconds; without a control group, that of its living processes.

    Args:
        lasting: the processes of the sandbox itself, which do not count without a control group.
    """
    counted = box.cgroup.cpu_seconds()
    if counted is not None:
        return counted
    return sum(proc.processor_seconds(process) for process in box.members() - lasting)


def status(limits: Limits, overrun: Overrun | None, code: int | None, cpu: float, kernel: CgroupEvents) -> Status:
    """Return the status of a program that ended.

    Args:
        limits: its limits.
        overrun: the reason that it was killed from outside; None if it was not.
        code: its exit code if it was not killed from outside, negative for a signal.
        cpu: its processor time, in seconds.
        kernel: the kernel's interventions during its run.
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
