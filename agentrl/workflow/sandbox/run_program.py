"""Runs of single programs, each in a new sandbox (cold) or in a forked process of a warm sandbox.

In both cases the program gets a new interpreter, an empty /tmp and its limits. The fork costs about as much as the start of a
plain interpreter. The cold start costs three times as much.
"""

import json
import math
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.errors import InfraError
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.runtime.socket_pair import socket_pair
from agentrl.workflow.sandbox import CodeResult, Limits, spawn
from agentrl.workflow.sandbox.cgroups import SPARE_PROCESSES, CgroupEvents
from agentrl.workflow.sandbox.launch import Inside, Launch
from agentrl.workflow.sandbox.limits_watch import Use, cpu_seconds_of, decode_output, explain_error, status, watch

ADDRESS_BYTES = 4 << 30
"""The limit on the address space of each process, in bytes. It is far above the memory limit, because threads reserve much
memory that they never use.
"""


@dataclass(frozen=True)
class Program:
    """A program to run: the descriptors of its source and its standard input, and its limits."""

    source: int
    stdin: int
    limits: Limits


def whole_seconds(limits: Limits) -> int:
    """Return the limit on processor time, rounded up to whole seconds for rlimits; at least 1."""
    return max(1, math.ceil(limits.cpu_seconds))


def run_cold(launch: Launch, program: Program, running: Callable[[], int]) -> CodeResult:
    """Run a program in a new sandbox. Raise InfraError if the sandbox did not start."""
    limits = program.limits
    with ExitStack() as files:
        (printed, output), (ready_reader, ready) = os.pipe(), os.pipe()
        files.callback(os.close, printed)
        files.callback(os.close, ready_reader)
        numbers = (whole_seconds(limits), ADDRESS_BYTES, limits.processes + SPARE_PROCESSES)
        try:
            inside = Inside(("runner",), (program.source, ready), numbers, program.stdin, output)
            box = launch.start(limits, inside)
        except InfraError as error:
            raise explain_error(error, os.read(printed, 500) if spawn.wait_readable(printed, 0) else b"") from error
        finally:
            os.close(output)
            os.close(ready)
        try:
            faultpoint("program.begun")
            use = watch(printed, box.end_fd, limits, lambda: cpu_seconds_of(box), box.members, running)
            events, cpu = box.cgroup.events(), cpu_seconds_of(box)
        finally:
            code = box.close()
        cpu = max(cpu, box.cgroup.cpu_seconds() or 0.0)  # without a control group it is known only now
        if not os.read(ready_reader, 1):
            return CodeResult("sandbox_fault", decode_output(use.output), code, 0.0, use.wall_seconds, launch.kind)
        return _result(launch.kind, limits, use, code, cpu, events)


class Zygote:
    """A warm sandbox that runs programs one after the other.

    Raises:
        InfraError: the sandbox did not start.
    """

    def __init__(self, launch: Launch, limits: Limits) -> None:
        self._kind = launch.kind
        self._line, theirs = socket_pair()
        log = spawn.memory_file(b"")
        try:
            with open(os.devnull, "rb") as nothing, theirs:
                inside = Inside(("runner", "zygote"), (theirs.fileno(),), (), nothing.fileno(), log, zygote=True)
                self._box = launch.start(limits, inside)
            if not spawn.wait_readable(self._line.fileno(), spawn.START_SECONDS) or not self._line.recv(4096):
                self._box.close()
                raise InfraError("A warm sandbox did not start.")
        except InfraError as error:
            self._line.close()
            raise explain_error(error, os.pread(log, 500, 0)) from error
        finally:
            os.close(log)
        self._keepers = self._box.members()
        self.alive = True

    def run(self, program: Program, running: Callable[[], int]) -> CodeResult:
        """Run a program. Afterwards, `alive` says whether this warm sandbox can run another program."""
        limits, cgroup = program.limits, self._box.cgroup
        cgroup.set_limits(limits.memory_bytes, limits.processes)
        before, cpu_before = cgroup.events(), cpu_seconds_of(self._box, self._keepers)

        def used() -> float:
            return cpu_seconds_of(self._box, self._keepers) - cpu_before

        printed = self._begin(program)
        try:
            faultpoint("program.begun")
            use = watch(printed, self._line.fileno(), limits, used, lambda: self._box.members() - self._keepers, running)
        finally:
            os.close(printed)
        after, cpu = cgroup.events(), used()
        events = CgroupEvents(after.oom - before.oom, after.pids - before.pids)
        reply = b"" if use.overrun else self._line.recv(4096)
        report: dict[str, Any] = json.loads(reply) if reply else {"code": None, "cpu": 0.0}
        if report["code"] is None:
            self.close()
            if use.overrun is None and not events.oom:
                return CodeResult("sandbox_fault", decode_output(use.output), None, 0.0, use.wall_seconds, self._kind)
        return _result(self._kind, limits, use, report["code"], max(report["cpu"], cpu), events)

    def close(self) -> None:
        """End this sandbox and all of its processes."""
        self.alive = False
        self._box.close()
        self._line.close()

    def _begin(self, program: Program) -> int:
        """Send the program to the zygote; return the reading end of its output pipe."""
        limits = program.limits
        request = {
            "cpu": whole_seconds(limits),
            "address": ADDRESS_BYTES,
            "processes": limits.processes + SPARE_PROCESSES,
            "tmp": limits.tmp_bytes,
        }
        printed, output = os.pipe()
        try:
            with suppress(BrokenPipeError):  # the zygote is gone: the watch sees that
                socket.send_fds(self._line, [json.dumps(request).encode()], [program.source, program.stdin, output])
        finally:
            os.close(output)
        return printed


def _result(kind: str, limits: Limits, use: Use, code: int | None, cpu: float, events: CgroupEvents) -> CodeResult:
    came_to = status(limits, use.overrun, code, cpu, events)
    exit_code, waited = None if use.overrun else code, use.waited_seconds
    return CodeResult(came_to, decode_output(use.output), exit_code, cpu, use.wall_seconds, kind, waited_seconds=waited)
