"""A session's rules: cells are sent in, and messages from inside are trusted only as far as they can do no harm.

The lines that come back are from processes that run model-written code. They can claim that a cell ended, how, and with which
data; a malformed line ends the session. The kernel tells which process wrote a line. Only this side decides which process is
the next state, so that a cell that ends by itself while it is being killed counts as killed.

Between cells only the state, one process, exists, and it is stopped: whatever else a cell left is ended and counted (`freeze`).
So nothing uses a core unwatched, and the next cell finds room whatever the last one did.
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
"""A value is ASCII, and a line writes its quotation marks and backslashes as two."""
ANSWER_SECONDS = 10.0
"""Time for a state to fork or to report that its child was killed, for the rest of a line, and for killed processes to end."""
LOOK_SECONDS = 0.2
"""The interval between two looks at the processor time of a cell whose line has begun."""
OVERTIME_SECONDS = 0.5
"""Processor time beyond its limit that a cell may use before its end is noticed."""
EXIT_CODES = range(-64, 256)
GO = b"\n"
"""The byte that a cell waits for before it begins; its limits count from then on."""
CALLS_OF_A_STATE = 200
"""Calls with `keeps=False` before a state is renewed: each costs the same state the processor time of a fork."""
ENDED_TEXT = "The session has ended."
FULL_TEXT = "[nothing of this cell is kept: it left so many threads behind that there was no room to go on]"


class BrokenLine(Exception):
    """A message that breaks the protocol, or none at all."""


class Line(Protocol):
    """The connection to the processes of one session, whatever confines them.

    All methods raise BrokenLine, OSError or SettleError where the session's processes are gone or out of control.
    """

    def say(self, data: bytes) -> None:
        """Send data to the process that reads."""
        ...

    def part(self, seconds: float) -> tuple[bytes, int]:
        """Return (text, the process that wrote it): at most a line; empty where nothing came within `seconds`."""
        ...

    def forget(self) -> None:
        """Drop messages and output that came until now."""
        ...

    def watch(self, limits: Limits, running: Callable[[], int]) -> Use:
        """Wait until a message comes or a limit is passed."""
        ...

    def read_usage(self) -> tuple[CgroupEvents, float]:
        """Return (the kernel's interventions, processor seconds of the cell or of all cells so far)."""
        ...

    def settle(self, lasting: Set[int]) -> int:
        """End all processes of cells but the lasting ones, which it stops; return how many threads were ended."""
        ...

    def go_on(self) -> None:
        """Let the stopped processes go on."""
        ...

    def close(self) -> CgroupEvents:
        """End the session; return the kernel's interventions until then."""
        ...


class CellSession:
    """A `Session` over a line.

    Args:
        kind: the sandbox's kind.

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
            raise ConfigError(f"A cell's {changed[0]} differs from its session's.", "Open the session with that limit.")
        if limits.cpu_seconds > self._limits.cpu_seconds:
            raise ConfigError("A cell's cpu_seconds are more than its session's.", "Open the session with as many.")
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
        """Counts the calls that one state has served; after many, an empty cell makes another state."""
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
        """Ends the processes of a cell that had no room for its heir, and lets it try again; returns its message and sender."""
        self._line.settle({self._state, child})
        self._line.go_on()
        self._line.say(GO)
        return self._receive(ANSWER_SECONDS)

    def _undo(self, message: dict[str, Any], speaker: int) -> int:
        """Goes back to the state before the cell; returns how the cell's process died, as that state reports it."""
        if message and not (is_end(message.get("done")) or is_exit(message.get("died")) or "full" in message):
            raise BrokenLine("a cell's end was not told as it is")
        self._line.settle({self._state})
        if speaker != self._state:
            self._line.go_on()
            message, _ = self._receive(ANSWER_SECONDS, self._state)
            self._line.settle({self._state})
        code = message.get("died")
        if not is_exit(code):
            raise BrokenLine("a cell's end was not told as it is")
        return code

    def _receive(self, seconds: float, only: int | None = None, max_cpu: float = math.inf) -> tuple[dict[str, Any], int]:
        """(the next line, the process that wrote its end).

        Args:
            only: ignore lines of other processes.
            max_cpu: processor seconds as the line counts them; a line that is incomplete by then is returned empty.
        """
        now = time.monotonic()
        deadline, due, process, line = now + seconds, now + LOOK_SECONDS, 0, bytearray()
        while not line.endswith(b"\n"):
            if len(line) > MAX_LINE_BYTES:
                raise BrokenLine("a line was too long")
            if (now := time.monotonic()) >= deadline:
                raise BrokenLine("nothing was said in time")
            if now >= due:
                if self._line.read_usage()[1] > max_cpu:
                    return {}, 0
                due = now + LOOK_SECONDS
            part, process = self._line.part(min(deadline, due) - now)
            if only in (None, process):
                line += part
        return message_of(line), process


def message_of(line: bytes | bytearray) -> dict[str, Any]:
    """Return the object of a line, whoever wrote it.

    Raises:
        BrokenLine: the line holds no object.
    """
    try:
        message = json.loads(line.decode())  # given bytes, json would guess an encoding
    except (ValueError, RecursionError) as error:
        raise BrokenLine("what was said is no line") from error
    if not isinstance(message, dict):
        raise BrokenLine("what was said is no line")
    return message


def is_end(done: object) -> TypeGuard[dict[str, Any]]:
    """Return whether `done` can be the end of a cell: an exit code, and a value's text within its limit."""
    if not isinstance(done, dict) or not is_exit(done.get("code")):
        return False
    value = done.get("value")
    return type(value) is str and len(value) <= exact_json.MAX_CHARACTERS


def is_exit(code: object) -> TypeGuard[int]:
    """Return whether `code` can be an exit code, negative for a signal; it comes from a process that runs model-written
    code.
    """
    return type(code) is int and code in EXIT_CODES
