"""A session in a container. It provides the frames that `session.CellSession` uses. The bridge inside the container observes
and signals processes for the host.

The bridge reports which process sent a message, stops all processes, and kills the processes that a cell left. The messages
themselves come from processes that run model-written code.
"""

import json
import time
from collections.abc import Callable, Set

from agentrl.workflow.errors import InfraError
from agentrl.workflow.sandbox import Limits
from agentrl.workflow.sandbox.cgroups import CgroupEvents
from agentrl.workflow.sandbox.container import KIND, LOOK_SECONDS, START_SECONDS, Container
from agentrl.workflow.sandbox.fair_semaphore import FairSemaphore
from agentrl.workflow.sandbox.freeze import SettleError
from agentrl.workflow.sandbox.limits_watch import Use
from agentrl.workflow.sandbox.session import ANSWER_SECONDS, BrokenLine, CellSession

PROCESS_BYTES = 4


class ContainerLine:
    """A `Line` to a session in a container."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._parts: list[tuple[bytes, int]] = []
        self._settled: list[bytes] = []

    def say(self, data: bytes) -> None:
        """See `Line.say`."""
        self._container.ask(b"C", data)

    def part(self, seconds: float) -> tuple[bytes, int]:
        """See `Line.part`."""
        if not self._parts:
            for kind, data in self._container.frames(seconds):
                self._hears(kind, data)
        return self._parts.pop(0) if self._parts else (b"", 0)

    def forget(self) -> None:
        """Discard the messages and the output that have arrived.

        The container reports the end of `settle` after all messages and output, so none of them arrives later.
        """
        self._parts.clear()

    def watch(self, limits: Limits, running: Callable[[], int]) -> Use:
        """See `Line.watch`."""
        return self._container.follow(limits, running, self._hears)

    def read_usage(self) -> tuple[CgroupEvents, float]:
        """See `Line.read_usage`."""
        before = self._container.counted
        self._container.ask(b"E")
        deadline = time.monotonic() + ANSWER_SECONDS
        while self._container.counted is before and time.monotonic() < deadline:
            for kind, data in self._container.frames(LOOK_SECONDS):
                self._hears(kind, data)
        return self._container.counted.events, self._container.counted.cpu_seconds

    def settle(self, lasting: Set[int]) -> int:
        """See `Line.settle`."""
        self._container.ask(b"K", b"".join(process.to_bytes(PROCESS_BYTES, "little") for process in lasting))
        deadline = time.monotonic() + 2 * ANSWER_SECONDS
        while not self._settled:
            if time.monotonic() > deadline:
                raise BrokenLine("the bridge does not answer")
            for kind, data in self._container.frames(ANSWER_SECONDS):
                self._hears(kind, data)
        ended, problem = json.loads(self._settled.pop())
        if problem:
            raise SettleError(problem)
        return int(ended)

    def go_on(self) -> None:
        """See `Line.go_on`."""
        self._container.ask(b"G")

    def close(self) -> CgroupEvents:
        """See `Line.close`."""
        self._container.close()
        return self._container.counted.events

    def _hears(self, kind: bytes, data: bytes) -> bool:
        """Process a frame; return True if it is a message."""
        if kind == b"X" or (kind == b"C" and len(data) == PROCESS_BYTES):
            raise EOFError
        if kind == b"K":
            self._settled.append(data)
        if kind == b"C":
            self._parts.append((data[PROCESS_BYTES:], int.from_bytes(data[:PROCESS_BYTES], "little")))
        return kind == b"C"


def open_session(container: Container, limits: Limits, turns: FairSemaphore) -> CellSession:
    """Open a session in the container `container`. Raise InfraError if the session did not start."""
    try:
        return CellSession(ContainerLine(container), KIND, limits, turns, START_SECONDS)
    except (BrokenLine, SettleError, EOFError) as error:
        reason = container.close() or error
        raise InfraError(f"A session's container did not start: {reason}", "See `agentrl doctor`.") from error
