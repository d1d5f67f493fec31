"""The parent's watch over a running program: its output, its use of time, its end, and the status that follows from these.

The limit on processor time is the model's, so the kernel's count decides. A program cannot use up what is left of its budget in
less than that many seconds divided by the cores, so the next look is due by then. The limit on the clock is extended while
others want the cores too. A program that passes it nevertheless was starved, which is the system's failure, if the kernel says
that it waited for a core half of the time or more; else it slept. A program that does nothing but sleep is ended sooner.
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
"""The most programs per core for which the limit on the clock is extended."""

STARVED_SHARE = 0.5
"""The share of its time on the clock that a starved program waited for a core. The limit on the clock is at least four times
that on processor time, and a program's threads keep one another waiting no longer than they run."""
ASLEEP_SHARE = 0.02
"""A program that used or waited for a core for a smaller share of the time between two looks was asleep."""

Overrun = Literal["timeout_cpu", "timeout_wall", "output_cap", "starved"]


@dataclass(frozen=True)
class Use:
    """A program's run: why it must be killed (None: it ended), its output up to the limit, and its times."""

    overrun: Overrun | None
    output: bytes
    wall_seconds: float
    waited_seconds: float = 0.0


class Clock:
    """The limits on a program's time, checked as it passes.

    Args:
        running: how many programs of ours run at this moment.
    """

    def __init__(self, limits: Limits, running: Callable[[], int]) -> None:
        self._limits, self._running, self._crowd = limits, running, 1
        self._began = self._seen = time.monotonic()
        self._busy = self._asleep = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    @property
    def remaining(self) -> float:
        """Seconds until the limit on the clock."""
        self._crowd = min(max(self._crowd, self._running(), _runnable()), CROWD_PER_CORE * (os.cpu_count() or 1))
        return self._limits.wall(self._crowd) - self.elapsed

    def look(self, cpu: float, waited: float) -> tuple[Overrun | None, float]:
        """Return (the reason to kill the program now, or None; the seconds until the next look).

        Args:
            cpu: the program's processor seconds so far.
            waited: the seconds that it waited for a core so far.
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
        spent: its processor seconds so far.
        members: its processes.
        running: how many programs of ours run at this moment.
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
    """Reads a chunk; whether more may come. Beyond the limit one byte is kept, which is enough to see that it was passed."""
    try:
        part = os.read(file, CHUNK)
    except BlockingIOError:
        return False
    into += part[: max(0, max_bytes + 1 - len(into))]
    return bool(part)


def explain_error(error: InfraError, output: bytes) -> InfraError:
    """Return the error, with the sandbox's output as it started."""
    return InfraError(f"{error.message} {decode_output(output).strip()}"[:1000])


def drain(file: int) -> bool:
    """Reads and drops a chunk of output; whether there was any."""
    return _read(file, bytearray(), 0)


def _runnable() -> int:
    """The number of threads of the whole machine that want a core now."""
    with suppress(OSError):
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return 1


def cpu_seconds_of(box: RunningSandbox, lasting: Set[int] = frozenset()) -> float:
    """Return processor seconds used in a sandbox so far; without a control group, those of its living processes.

    Args:
        lasting: processes of the sandbox itself, left out where there is no control group.
    """
    counted = box.cgroup.cpu_seconds()
    if counted is not None:
        return counted
    return sum(proc.processor_seconds(process) for process in box.members() - lasting)


def status(limits: Limits, overrun: Overrun | None, code: int | None, cpu: float, kernel: CgroupEvents) -> Status:
    """Return the status of a program that ended.

    Args:
        overrun: why it was killed from outside.
        code: its exit code if it was not, negative for a signal.
        kernel: the kernel's interventions while it ran.
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
    """Return the output as text; bytes that are not UTF-8 are escaped."""
    return output.decode(errors="backslashreplace")
