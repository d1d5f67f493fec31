"""A session in a container: the rules of `session.BoxedSession`, with the bridge's eyes and hands inside.

The bridge says which process spoke and kills what a cell started; what was spoken comes from processes that run model-written
code. They can claim that a cell ended, how, and with which data; what is no line of ours ends the session.
"""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workflow.errors import InfraError
from workflow.sandbox import Limits, Result, plain
from workflow.sandbox.cgroups import Events
from workflow.sandbox.container import KIND, START_SECONDS, Container, Counted
from workflow.sandbox.programs import whole_seconds
from workflow.sandbox.session import ANSWER_SECONDS, ENDED, GO, MAX_LINE_BYTES, Broken, is_end, is_exit, message_of
from workflow.sandbox.turns import Turns
from workflow.sandbox.watch import Use, status, text

PROCESS_BYTES = 4


class ContainerSession:
    """A `Session`.

    Raises:
        InfraError: it did not come up.
    """

    def __init__(self, container: Container, limits: Limits, turns: Turns) -> None:
        self.alive = True
        self._container = container
        self._limits = limits
        self._turns = turns
        self._lock = threading.Lock()
        self._messages: list[tuple[int, dict[str, Any]]] = []
        self._unread = b""
        try:
            self._state, _ = self._next(START_SECONDS)
        except (Broken, EOFError) as error:
            raise InfraError(
                f"A session's container did not come up: {container.close() or error}", "See `agentrl doctor`."
            ) from error

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
            self._container.close()

    def _ask(self, request: dict[str, Any], limits: Limits, keeps: bool) -> Result:
        with self._lock, self._turns.one():
            if not self.alive:
                return Result("killed", ENDED, None, 0.0, 0.0, KIND)
            try:
                return self._answer({**request, "cpu": whole_seconds(limits)}, limits, keeps)
            except (Broken, EOFError) as error:
                self._close()
                return Result("killed", f"{ENDED} ({error or 'its processes are gone'})", None, 0.0, 0.0, KIND)

    def _answer(self, request: dict[str, Any], limits: Limits, keeps: bool) -> Result:
        before = self._container.count()
        self._say(request)
        child, _ = self._next(limits.wall(self._turns.running()))
        self._container.ask(b"C", GO)
        use = self._container.follow(limits, self._turns.running, self._hears)
        if use.overrun is not None:
            self._kill_cell()
        _, message = self._next(ANSWER_SECONDS)
        if use.overrun is not None and "done" in message:  # it said so, and was killed all the same
            _, message = self._next(ANSWER_SECONDS)
        return self._result(message, child if keeps else None, limits, use, before)

    def _result(self, message: dict[str, Any], heir: int | None, limits: Limits, use: Use, before: Counted) -> Result:
        """`heir`: the process that is the next state, where it ended by itself; None: the one from before stays."""
        died, done = message.get("died"), message.get("done")
        if is_exit(died):
            self._kill_cell()  # what it started
        elif use.overrun is not None or not is_end(done):
            raise Broken("a cell's end was not told as it is")
        elif heir is None:
            self._kill_cell()
            self._next(ANSWER_SECONDS)  # the state says that its child died
        else:
            self._container.ask(b"C", GO)
            self._state = heir
        after = self._container.count()
        cpu = after.cpu_seconds - before.cpu_seconds
        events = Events(after.events.oom - before.events.oom, after.events.pids - before.events.pids)
        if is_exit(died):
            came_to = status(limits, use.overrun, died, cpu, events)
            came_to = "killed" if came_to in ("ok", "error") else came_to
            return Result(came_to, text(use.output), died, cpu, use.wall_seconds, KIND)
        assert isinstance(done, dict)
        came_to = status(limits, None, done["code"], cpu, events)
        return Result(came_to, text(use.output), done["code"], cpu, use.wall_seconds, KIND, done["value"])

    def _kill_cell(self) -> None:
        """All but the keeper and the state from before the cell; done before the bridge answers anything else."""
        self._container.ask(b"K", self._state.to_bytes(4, "little"))

    def _say(self, message: dict[str, Any]) -> None:
        self._container.ask(b"C", json.dumps(message).encode() + b"\n")

    def _next(self, seconds: float) -> tuple[int, dict[str, Any]]:
        """The next message, and which process wrote its end."""
        deadline = time.monotonic() + seconds
        while not self._messages:
            if time.monotonic() > deadline:
                raise Broken("nothing was said in time")
            for kind, data in self._container.frames(deadline - time.monotonic()):
                self._hears(kind, data)
        return self._messages.pop(0)

    def _hears(self, kind: bytes, data: bytes) -> bool:
        """Takes a frame; whether a message is whole now."""
        if kind == b"X" or (kind == b"C" and len(data) == PROCESS_BYTES):
            raise EOFError
        if kind != b"C":
            return False
        self._unread += data[PROCESS_BYTES:]
        if len(self._unread) > MAX_LINE_BYTES:
            raise Broken("a line was too long")
        if not self._unread.endswith(b"\n"):
            return False
        said, self._unread = self._unread, b""
        self._messages.append((int.from_bytes(data[:PROCESS_BYTES], "little"), message_of(said)))
        return True
