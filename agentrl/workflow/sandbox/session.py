"""The protocol of a session, seen from the host. The host sends cells, and trusts messages from inside only where a false
message does no harm.

The lines that the host receives come from processes that run model-written code. They can claim that a cell ended, how it
ended, and with which data. An invalid line ends the session. The kernel says which process wrote a line. Only the host decides
which process becomes the next state. So a cell that ends by itself while it is being killed counts as killed.

Between cells only one process exists, the state, and it is stopped. All other processes that a cell left are killed and counted
(`freeze`). So no process uses a core without supervision, and every cell starts with the same limits.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any, Protocol, TypeGuard

from agentrl.workflow.errors import ConfigError, InfraError
from agentrl.workflow.sandbox import CodeResult, Limits, Status, exact_json
from agentrl.workflow.sandbox.cgroups import CgroupEvents
from agentrl.workflow.sandbox.fair_semaphore import FairSemaphore
from agentrl.workflow.sandbox.freeze import SettleError
from agentrl.workflow.sandbox.limits_watch import Use, decode_output, status
from agentrl.workflow.sandbox.run_program import whole_seconds

MAX_LINE_BYTES = 2 * exact_json.MAX_CHARACTERS + 4096
"""The maximum length of a line, in bytes. An encoded value is ASCII; in a line, each of its quotation marks and backslashes
needs a second byte.
"""
ANSWER_SECONDS = 10.0
"""The timeout of three waits, in seconds: until a state forks or reports that its child was killed, until a line is complete,
and until killed processes have ended.
"""
LOOK_SECONDS = 0.2
"""The interval between two checks of a cell's processor time while the end of its line is missing, in seconds."""
OVERTIME_SECONDS = 0.5
"""The processor time that a cell may use beyond its limit before its end is noticed, in seconds."""
EXIT_CODES = range(-64, 256)
GO = b"\n"
"""The byte that starts a cell. The cell's limits are measured from then on."""
CALLS_OF_A_STATE = 200
"""The number of calls with `keeps=False` after which the state is replaced by a new one. For each call the state itself uses
the processor time of a fork, and its processor time is limited.
"""
ENDED_TEXT = "The session has ended."
FULL_TEXT = "[nothing of this cell is kept: it left so many threads behind that there was no room to go on]"


class BrokenLine(Exception):
    """The error if a message from inside is missing or violates the protocol."""


class Line(Protocol):
    """The connection to the processes of one session, in any kind of sandbox.

    All methods raise BrokenLine, OSError or SettleError if the session's processes are gone or cannot be controlled.
    """

    def say(self, data: bytes) -> None:
        """Send data to the session's process that reads requests."""
        ...

    def part(self, seconds: float) -> tuple[bytes, int]:
        """Wait up to `seconds` for a line from inside, or a part of a line. Return this data, and the id of the process that
        wrote it.
        """
        ...

    def forget(self) -> None:
        """Discard the messages and output that have arrived."""
        ...

    def watch(self, limits: Limits, running: Callable[[], int]) -> Use:
        """Wait until a message arrives or a limit is passed."""
        ...

    def read_usage(self) -> tuple[CgroupEvents, float]:
        """Return the kernel's interventions and the processor time, in seconds. Only differences between two calls have a
        meaning.
        """
        ...

    def settle(self, lasting: Set[int]) -> int:
        """Kill all processes that cells started, except `lasting`, which stay stopped. Return the number of threads that were
        ended.
        """
        ...

    def go_on(self) -> None:
        """Continue the stopped processes."""
        ...

    def close(self) -> CgroupEvents:
        """End the session; return how often the kernel enforced a limit up to its end."""
        ...


class CellSession:
    """A `Session` that communicates over a `Line`.

    Args:
        line: the connection to the session's processes.
        kind: the sandbox's kind.
        turns: the semaphore that each cell acquires.
        seconds: the longest time for the start, in seconds.

    Raises:
        BrokenLine, OSError, SettleError: the session did not start.
    """

    def __init__(self, line: Line, kind: str, limits: Limits, turns: FairSemaphore, seconds: float) -> None:
        self.alive = True
        self._line = line
        self._kind = kind
        self._limits = limits
        self._turns = turns
        self._lock = threading.Lock()
        self._before = CgroupEvents()
        self._calls = 0
        self._state = self._receive(seconds)[1]
        self._line.settle({self._state})

    def run(self, code: str, limits: Limits | None = None) -> CodeResult:
        """See `Session.run`."""
        return self._ask({"code": code}, limits or self._limits, True)

    def call(
        self, function: str, args: Sequence[object] | str, limits: Limits | None = None, *, keeps: bool = True
    ) -> CodeResult:
        """See `Session.call`."""
        arguments = args if isinstance(args, str) else exact_json.encode(list(args))
        result = self._ask({"call": function, "args": arguments}, limits or self._limits, keeps)
        return result if result.status == "ok" else replace(result, value="")

    def close(self) -> None:
        """See `Session.close`."""
        with self._lock:
            self._close()

    def _close(self) -> CgroupEvents:
        if not self.alive:
            return CgroupEvents()
        self.alive = False
        return self._line.close()

    def _ask(self, request: dict[str, Any], limits: Limits, keeps: bool) -> CodeResult:
        fixed = ("memory_bytes", "processes", "tmp_bytes")
        if changed := [name for name in fixed if getattr(limits, name) != getattr(self._limits, name)]:
            raise ConfigError(f"A cell must have its session's {changed[0]}.", f"Open the session with this {changed[0]}.")
        if limits.cpu_seconds > self._limits.cpu_seconds:
            raise ConfigError(
                "A cell's cpu_seconds are more than its session's.",
                "Open the session with at least the cpu_seconds of the cell.",
            )
        with self._lock, self._turns.hold():
            if not self.alive:
                return CodeResult("killed", ENDED_TEXT, None, 0.0, 0.0, self._kind)
            try:
                self._count(keeps)
                return self._answer({**request, "cpu": whole_seconds(limits)}, limits, keeps)
            except (BrokenLine, SettleError, EOFError, OSError, InfraError) as error:
                done = self._close().since(self._before)
                came_to = status(limits, None, None, 0.0, done)
                return CodeResult(came_to, f"{ENDED_TEXT} ({error or 'its processes are gone'})", None, 0.0, 0.0, self._kind)
            except BaseException:
                self._close()  # the next line read would be this cell's answer
                raise

    def _count(self, keeps: bool) -> None:
        """Count the state's calls with `keeps=False`. At CALLS_OF_A_STATE, run an empty cell to get a new state."""
        self._calls = 0 if keeps else self._calls + 1
        if self._calls >= CALLS_OF_A_STATE:
            self._calls = 0
            self._answer({"code": "", "cpu": whole_seconds(self._limits)}, self._limits, True)

    def _answer(self, request: dict[str, Any], limits: Limits, keeps: bool) -> CodeResult:
        line = self._line
        line.forget()
        self._before, cpu_before = line.read_usage()
        line.go_on()
        line.say(json.dumps(request).encode() + b"\n")
        _, child = self._receive(ANSWER_SECONDS)
        line.say(GO)
        use = line.watch(limits, self._turns.running)
        max_cpu = cpu_before + limits.cpu_seconds + OVERTIME_SECONDS
        message, speaker = ({}, 0) if use.overrun else self._receive(ANSWER_SECONDS, max_cpu=max_cpu)
        full = use.overrun is None and "full" in message
        if full:
            message, speaker = self._retry(speaker)
        events, cpu = line.read_usage()
        if use.overrun is None and cpu > max_cpu:  # it claimed to have ended, and ran on
            use, message, speaker, full = replace(use, overrun="timeout_cpu"), {}, 0, False
        events, cpu = events.since(self._before), cpu - cpu_before
        done = message.get("done")
        if keeps and is_end(done):
            left = line.settle({speaker}) - len({self._state, child} - {speaker})
            self._state = speaker
            return self._ended_result(done, limits, use, cpu, events, max(0, left))
        code = self._undo(message, speaker)
        if is_end(done):
            return self._ended_result(done, limits, use, cpu, events, 0)
        came_to = "pids" if full else status(limits, use.overrun, code, cpu, events)
        came_to = "killed" if came_to in ("ok", "error") else came_to
        output = decode_output(use.output) + (FULL_TEXT if full else "")
        return self._result(came_to, output, None if use.overrun or full else code, cpu, use)

    def _ended_result(
        self, done: dict[str, Any], limits: Limits, use: Use, cpu: float, events: CgroupEvents, left: int
    ) -> CodeResult:
        came_to = status(limits, None, done["code"], cpu, events)
        return self._result(came_to, decode_output(use.output), done["code"], cpu, use, done["value"], left)

    def _result(
        self, came_to: Status, output: str, code: int | None, cpu: float, use: Use, value: str = "", left: int = 0
    ) -> CodeResult:
        return CodeResult(came_to, output, code, cpu, use.wall_seconds, self._kind, value, left, use.waited_seconds)

    def _retry(self, child: int) -> tuple[dict[str, Any], int]:
        """Let a cell fork its next state after there was no room for one more process. For this, kill the other processes that
        the cell started.

        Return the message that follows, and the id of the process that sent it. `child` is the id of the cell's process.
        """
        self._line.settle({self._state, child})
        self._line.go_on()
        self._line.say(GO)
        return self._receive(ANSWER_SECONDS)

    def _undo(self, message: dict[str, Any], speaker: int) -> int:
        """Return to the state before the cell. Return the exit code of the cell's process, which that state reports."""
        if message and not (is_end(message.get("done")) or is_exit(message.get("died")) or "full" in message):
            raise BrokenLine("the message about the end of a cell is invalid")
        self._line.settle({self._state})
        if speaker != self._state:
            self._line.go_on()
            message, _ = self._receive(ANSWER_SECONDS, self._state)
            self._line.settle({self._state})
        code = message.get("died")
        if not is_exit(code):
            raise BrokenLine("the message about the end of a cell is invalid")
        return code

    def _receive(self, seconds: float, only: int | None = None, max_cpu: float = math.inf) -> tuple[dict[str, Any], int]:
        """Return the next message, and the id of the process that wrote the end of its line.

        Args:
            seconds: the longest wait, in seconds.
            only: the id of a process; lines of other processes are ignored. None to accept all processes.
            max_cpu: a limit on the processor time that the `Line` counts, in seconds. If the limit is passed before the line is
                complete, return ({}, 0).
        """
        now = time.monotonic()
        deadline, due, process, line = now + seconds, now + LOOK_SECONDS, 0, bytearray()
        while not line.endswith(b"\n"):
            if len(line) > MAX_LINE_BYTES:
                raise BrokenLine("a message was too long")
            if (now := time.monotonic()) >= deadline:
                raise BrokenLine("no message arrived in time")
            if now >= due:
                if self._line.read_usage()[1] > max_cpu:
                    return {}, 0
                due = now + LOOK_SECONDS
            part, process = self._line.part(min(deadline, due) - now)
            if only in (None, process):
                line += part
        return message_of(line), process


def message_of(line: bytes | bytearray) -> dict[str, Any]:
    """Parse a line, which may come from model-written code. Raise BrokenLine if the line is not a JSON object."""
    try:
        message = json.loads(line.decode())  # given bytes, json would guess an encoding
    except (ValueError, RecursionError) as error:
        raise BrokenLine("a message is not valid JSON") from error
    if not isinstance(message, dict):
        raise BrokenLine("a message is not a JSON object")
    return message


def is_end(done: object) -> TypeGuard[dict[str, Any]]:
    """Return whether `done` reports a cell's end: an exit code, and a value whose text is not too long."""
    if not isinstance(done, dict) or not is_exit(done.get("code")):
        return False
    value = done.get("value")
    return type(value) is str and len(value) <= exact_json.MAX_CHARACTERS


def is_exit(code: object) -> TypeGuard[int]:
    """Return whether `code` is a valid exit code (negative for a signal). `code` comes from model-written code."""
    return type(code) is int and code in EXIT_CODES
