"""A session from outside: cells are sent in, and what the processes inside say is believed only as far as it can do no harm.

The lines on the socket come from processes that run model-written code. They can claim that a cell ended, how, and with which
data; a line that is none ends the session. Which process wrote it is the kernel's word: that is what is killed when a limit
is passed, together with all that the cell started, while the state from before the cell lives on. Which of the two is the next
state is decided out here alone, so that a cell that ends by itself as it is killed is killed.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeGuard

from workflow.errors import ConfigError, InfraError
from workflow.sandbox import Limits, Result, plain, spawn
from workflow.sandbox.cgroups import SPARE_PROCESSES, Events
from workflow.sandbox.launch import Inside, Launch
from workflow.sandbox.programs import ADDRESS_BYTES, whole_seconds
from workflow.sandbox.turns import Turns
from workflow.sandbox.watch import Use, drained, explained, spent, status, text, watch

MAX_LINE_BYTES = 2 * plain.MAX_CHARACTERS + 4096
"""A value is ASCII, and a line writes its quotation marks and backslashes as two."""
ANSWER_SECONDS = 10.0
"""For a line that has begun, and for a state to say that its child was killed."""
CREDENTIALS = 12  # a struct ucred: process, user, group
EXIT_CODES = range(-64, 256)
GO = b"\n"
"""A cell waits for it twice: before it begins, for its limits count from here on, and when it has ended, to be the state."""
ENDED = "The session has ended."


class Broken(Exception):
    """What came over the socket is no line of ours, or nothing came."""


class BoxedSession:
    """A `Session` in a sandbox of its own.

    Raises:
        InfraError: it did not come up.
    """

    def __init__(self, launch: Launch, limits: Limits, turns: Turns, reads: Sequence[str] = ()) -> None:
        self._kind = launch.kind
        self.alive = True
        self._limits = limits
        self._turns = turns
        self._lock = threading.Lock()
        self._line, theirs = socket.socketpair()
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._printed, output = os.pipe()
        numbers = (ADDRESS_BYTES, limits.processes + SPARE_PROCESSES)
        try:
            with open(os.devnull, "rb") as nothing, theirs:
                scripts = ("runner", "plain", "cells")
                inside = Inside(scripts, (theirs.fileno(),), numbers, nothing.fileno(), output, reads=tuple(reads))
                self._box = launch.start(limits, inside)
        except InfraError as error:
            self._line.close()
            said = os.read(self._printed, 500) if spawn.ready(self._printed, 0) else b""
            os.close(self._printed)
            raise explained(error, said) from error
        finally:
            os.close(output)
        self._state = self._opened()
        self._keepers = self._box.members() - {self._state}

    def run(self, code: str, limits: Limits | None = None) -> Result:
        """See `Session.run`."""
        return self._ask({"code": code}, limits or self._limits, True)

    def call(self, function: str, args: Sequence[object] | str, limits: Limits | None = None, *, keeps: bool = True) -> Result:
        """See `Session.call`."""
        told = args if isinstance(args, str) else plain.encode(list(args))
        result = self._ask({"call": function, "args": told}, limits or self._limits, keeps)
        return result if result.status == "ok" else replace(result, value="")

    def close(self) -> None:
        """See `Session.close`."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self.alive:
            self.alive = False
            self._box.close()
            self._line.close()
            os.close(self._printed)

    def _opened(self) -> int:
        try:
            _, process = self._heard(spawn.START_SECONDS)
        except Broken as error:
            said = os.read(self._printed, 500) if spawn.ready(self._printed, 0) else b""
            self._close()
            raise explained(InfraError(f"A session's sandbox did not come up: {error}."), said) from error
        return process

    def _ask(self, request: dict[str, Any], limits: Limits, keeps: bool) -> Result:
        fixed = ("memory_bytes", "processes", "tmp_bytes")
        if changed := [name for name in fixed if getattr(limits, name) != getattr(self._limits, name)]:
            raise ConfigError(f"{changed[0]} of a cell differs from its session's.", "Open the session with it.")
        with self._lock, self._turns.one():
            if not self.alive:
                return Result("killed", ENDED, None, 0.0, 0.0, self._kind)
            try:
                return self._answer({**request, "cpu": whole_seconds(limits)}, limits, keeps)
            except (Broken, OSError) as error:
                self._close()
                return Result("killed", f"{ENDED} ({error})", None, 0.0, 0.0, self._kind)
            except BaseException:
                self._close()  # the next line would answer this cell
                raise

    def _answer(self, request: dict[str, Any], limits: Limits, keeps: bool) -> Result:
        cgroup = self._box.cgroup
        lasting = self._keepers | {self._state}
        before, cpu_before = cgroup.events(), spent(self._box, lasting)
        self._line.settimeout(ANSWER_SECONDS)
        self._line.sendall(json.dumps(request).encode() + b"\n")
        _, child = self._heard(limits.wall(self._turns.running()))
        self._line.sendall(GO)

        def used() -> float:
            return spent(self._box, lasting) - cpu_before

        use = watch(self._printed, self._line.fileno(), limits, used, self._turns.running)
        cpu, after = used(), cgroup.events()
        events = Events(after.oom - before.oom, after.pids - before.pids)
        if use.overrun is not None:
            self._kill_cell()
        message, _ = self._heard(ANSWER_SECONDS)
        if use.overrun is not None and "done" in message:  # it said so, and was killed all the same
            message, _ = self._heard(ANSWER_SECONDS)
        return self._result(message, child if keeps else None, limits, use, cpu, events)

    def _result(
        self, message: dict[str, Any], heir: int | None, limits: Limits, use: Use, cpu: float, events: Events
    ) -> Result:
        """`heir`: the process that is the next state, where it ended by itself; None: the one from before stays."""
        output = text(use.output)
        code = message.get("died")
        if is_exit(code):
            self._kill_cell()  # what it started; a part of what it had printed may be in the pipe yet
            while drained(self._printed):
                pass
            came_to = status(limits, use.overrun, code, cpu, events)
            came_to = "killed" if came_to in ("ok", "error") else came_to
            return Result(came_to, output, None if use.overrun else code, cpu, use.wall_seconds, self._kind)
        done = message.get("done")
        if use.overrun is not None or not is_end(done):
            raise Broken("a cell's end was not told as it is")
        if heir is None:
            self._kill_cell()
            self._heard(ANSWER_SECONDS)  # the state says that its child died
        else:
            self._line.sendall(GO)
            self._state = heir
        came_to = status(limits, None, done["code"], cpu, events)
        return Result(came_to, output, done["code"], cpu, use.wall_seconds, self._kind, done["value"])

    def _kill_cell(self) -> None:
        """Kills all but the keepers and the state from before the cell."""
        lasting = self._keepers | {self._state}
        deadline = time.monotonic() + ANSWER_SECONDS
        while extra := self._box.members() - lasting:
            if time.monotonic() > deadline:
                raise Broken(f"{len(extra)} processes did not end")
            for process in extra:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.001)

    def _heard(self, seconds: float) -> tuple[dict[str, Any], int]:
        """The next line, and which process wrote its end."""
        deadline, process = time.monotonic() + seconds, 0
        said = bytearray()
        while not said.endswith(b"\n"):
            if len(said) > MAX_LINE_BYTES:
                raise Broken("a line was too long")
            if not spawn.ready(self._line.fileno(), deadline - time.monotonic()):
                raise Broken("nothing was said in time")
            part, told, _, _ = self._line.recvmsg(1 << 16, socket.CMSG_SPACE(CREDENTIALS))
            if not part:
                raise Broken("its processes are gone")
            said += part
            process = next((int.from_bytes(data[:4], "little") for _, kind, data in told if kind == socket.SCM_CREDENTIALS), 0)
        return message_of(said), process


def message_of(said: bytes | bytearray) -> dict[str, Any]:
    """The object of a line, whoever wrote it.

    Raises:
        Broken: it holds none.
    """
    try:
        message = json.loads(said.decode())  # bytes it would take for any encoding that they begin like
    except (ValueError, RecursionError) as error:
        raise Broken("what was said is no line") from error
    if not isinstance(message, dict):
        raise Broken("what was said is no line")
    return message


def is_exit(code: object) -> TypeGuard[int]:
    """Whether that can be an exit code, negative for a signal; it comes from a process that runs model-written code."""
    return type(code) is int and code in EXIT_CODES


def is_end(done: object) -> TypeGuard[dict[str, Any]]:
    """Whether that can be the end of a cell: an exit code, and the text of a value that is no longer than one may be."""
    if not isinstance(done, dict) or not is_exit(done.get("code")):
        return False
    value = done.get("value")
    return type(value) is str and len(value) <= plain.MAX_CHARACTERS
