"""A session in a sandbox of this host. It provides the socket, the output and the processes that `session.CellSession` uses."""

import os
import socket
from collections.abc import Callable, Sequence, Set
from contextlib import suppress

from agentrl.workflow.errors import InfraError
from agentrl.workflow.runtime.socket_pair import socket_pair
from agentrl.workflow.sandbox import Limits, freeze, spawn
from agentrl.workflow.sandbox.cgroups import SPARE_PROCESSES, CgroupEvents
from agentrl.workflow.sandbox.fair_semaphore import FairSemaphore
from agentrl.workflow.sandbox.launch import Inside, Launch
from agentrl.workflow.sandbox.limits_watch import Use, cpu_seconds_of, drain, explain_error, watch
from agentrl.workflow.sandbox.run_program import ADDRESS_BYTES, whole_seconds
from agentrl.workflow.sandbox.session import ANSWER_SECONDS, BrokenLine, CellSession

CREDENTIALS = 12  # a struct ucred: process, user, group
CHUNK = 1 << 16


class BoxedLine:
    """A `Line` to a session on this host.

    Raises:
        InfraError: the sandbox did not start.
    """

    def __init__(self, launch: Launch, limits: Limits, reads: Sequence[str]) -> None:
        self._socket, theirs = socket_pair()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._printed, output = os.pipe()
        os.set_blocking(self._printed, False)
        numbers = (whole_seconds(limits), ADDRESS_BYTES, limits.processes + SPARE_PROCESSES)
        scripts = ("runner", "exact_json", "cells")
        try:
            with open(os.devnull, "rb") as nothing, theirs:
                inside = Inside(scripts, (theirs.fileno(),), numbers, nothing.fileno(), output, True, reads=tuple(reads))
                self._box = launch.start(limits, inside)
        except InfraError as error:
            text = self.take_output()
            self._socket.close()
            os.close(self._printed)
            raise explain_error(error, text) from error
        finally:
            os.close(output)
        self._state: Set[int] = set()
        self._keepers: Set[int] = set()

    def take_output(self) -> bytes:
        """Read and return up to 500 bytes of the output so far; empty if there is no output."""
        with suppress(BlockingIOError):
            return os.read(self._printed, 500)
        return b""

    def say(self, data: bytes) -> None:
        """See `Line.say`."""
        self._socket.settimeout(ANSWER_SECONDS)
        self._socket.sendall(data)

    def part(self, seconds: float) -> tuple[bytes, int]:
        """See `Line.part`."""
        if not spawn.wait_readable(self._socket.fileno(), seconds):
            return b"", 0
        return self._receive()

    def forget(self) -> None:
        """Discard the messages and the output that have arrived."""
        while drain(self._printed):
            pass
        while spawn.wait_readable(self._socket.fileno(), 0):
            self._receive()

    def watch(self, limits: Limits, running: Callable[[], int]) -> Use:
        """See `Line.watch`."""
        before = self._cpu_seconds()
        spent_now, members = lambda: self._cpu_seconds() - before, lambda: self._box.members() - self._keepers - self._state
        return watch(self._printed, self._socket.fileno(), limits, spent_now, members, running)

    def read_usage(self) -> tuple[CgroupEvents, float]:
        """See `Line.read_usage`."""
        return self._box.cgroup.events(), self._cpu_seconds()

    def settle(self, lasting: Set[int]) -> int:
        """See `Line.settle`. At the first call, all processes except `lasting` belong to the sandbox itself; from then on these
        are never killed.
        """
        if not self._keepers:
            self._keepers = self._box.members() - lasting
        ended = freeze.settle(self._box.stop, lambda: self._box.members() - self._keepers, lasting, ANSWER_SECONDS)
        self._state = lasting
        return ended

    def go_on(self) -> None:
        """See `Line.go_on`."""
        self._box.go_on()

    def close(self) -> CgroupEvents:
        """See `Line.close`."""
        before = self._box.cgroup.events()
        self._box.close()
        after = self._box.cgroup.events()  # by now a control group is gone, and a keeper has reported
        self._socket.close()
        os.close(self._printed)
        return CgroupEvents(max(before.oom, after.oom), max(before.pids, after.pids), max(before.disk, after.disk))

    def _cpu_seconds(self) -> float:
        return cpu_seconds_of(self._box, self._keepers | self._state)

    def _receive(self) -> tuple[bytes, int]:
        part, ancillary, _, _ = self._socket.recvmsg(CHUNK, socket.CMSG_SPACE(CREDENTIALS))
        if not part:
            raise BrokenLine("the session's processes are gone")
        process = next((int.from_bytes(data[:4], "little") for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS), 0)
        return part, process


def open_session(launch: Launch, limits: Limits, turns: FairSemaphore, reads: Sequence[str] = ()) -> CellSession:
    """Start a new sandbox on this host, and open a session in it. Raise InfraError if the session did not start."""
    line = BoxedLine(launch, limits, reads)
    try:
        return CellSession(line, launch.kind, limits, turns, spawn.START_SECONDS)
    except (BrokenLine, freeze.SettleError, OSError) as error:
        output = line.take_output()
        line.close()
        raise explain_error(InfraError(f"A session's sandbox did not start: {error}."), output) from error
