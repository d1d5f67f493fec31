"""The sessions of the tool server's callers: in each, the names of tools that keep them last from one call to the next.

The calls of a session run one after another, in the order in which they came; those of different sessions side by side. A
session ends when it is closed, when it was not used for long, when its interpreter is lost, or with the server: there are no
rows from which it could be made anew, and whoever calls in it then is told so.

Who has which session is decided in the server's event loop alone, so that it takes no lock; only what may last is done in
threads.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from secrets import token_urlsafe
from typing import TypeVar

from agentrl.workers.jobs.interpreters import MAX_SESSIONS
from agentrl.workflow.errors import NotFoundError, StateError
from agentrl.workflow.tools.python import Notebook

Answer = TypeVar("Answer")
IDLE_SECONDS = 600.0
"""After so long without a call a session ends. Longer than a tools worker's, which makes its own anew."""

NAME_BYTES = 16
"""Random bytes in a session's name: who was not told it does not guess it."""


@dataclass(eq=False)
class _CallerSession:
    """One session. `calls` run or wait for their turn; `rest` ends it where none comes."""

    notebook: Notebook = field(default_factory=Notebook)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # who asked first has it first
    calls: int = 0
    closed: bool = False
    rest: asyncio.TimerHandle | None = None


class ServedSessions:
    """The sessions of one server. To be used in its event loop, but for `end`."""

    def __init__(self, most: int = MAX_SESSIONS, idle_seconds: float = IDLE_SECONDS) -> None:
        self.most, self.idle_seconds = most, idle_seconds
        self._sessions: dict[str, _CallerSession] = {}
        self._ending: set[asyncio.Task[None]] = set()  # asyncio itself would forget them
        self._threads = ThreadPoolExecutor(most, "session")  # cells that wait for a core are in nobody else's way

    def open(self) -> str:
        """A new session's name.

        Raises:
            StateError: there are as many as there may be.
        """
        if len(self._sessions) >= self.most:
            idle = f"wait until one was not used for {self.idle_seconds:g} s"
            raise StateError(f"{self.most} sessions are open, and no more are kept.", f"Close one, or {idle}.")
        name = token_urlsafe(NAME_BYTES)
        self._sessions[name] = _CallerSession()
        self._start_idle_timer(name)
        return name

    async def run(self, name: str, call: Callable[[Notebook], Answer]) -> Answer:
        """What the call comes to, in a thread, after those that came before it.

        Raises:
            NotFoundError: no session of that name is open, or no more when it is the call's turn.
        """
        session = self._find(name)
        session.calls += 1
        self._stop_idle_timer(session)
        try:
            async with session.turn:
                if session.closed:
                    raise self._unknown_session_error(name)
                try:
                    return await self._in_thread(call, session.notebook)
                finally:
                    if not (session.closed or session.notebook.alive):
                        self._put_away(name)
        finally:
            session.calls -= 1
            if not session.calls and not session.closed:
                self._start_idle_timer(name)

    async def close(self, name: str) -> None:
        """Ends the session, after the call that runs in it; those that wait find it closed.

        Raises:
            NotFoundError: none of that name is open.
        """
        session = self._find(name)
        session.closed = True
        self._stop_idle_timer(session)
        await self._end_session(name)

    def end(self) -> None:
        """Ends them all, where the event loop is over."""
        for session in self._sessions.values():
            session.notebook.close()

    def _find(self, name: str) -> _CallerSession:
        session = self._sessions.get(name)
        if session is None or session.closed:
            raise self._unknown_session_error(name)
        return session

    def _start_idle_timer(self, name: str) -> None:
        self._sessions[name].rest = asyncio.get_running_loop().call_later(self.idle_seconds, self._put_away, name)

    @staticmethod
    def _stop_idle_timer(session: _CallerSession) -> None:
        if session.rest is not None:
            session.rest.cancel()

    def _put_away(self, name: str) -> None:
        self._sessions[name].closed = True
        task = asyncio.get_running_loop().create_task(self._end_session(name))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_session(self, name: str) -> None:
        session = self._sessions[name]
        async with session.turn:
            await self._in_thread(Notebook.close, session.notebook)
        del self._sessions[name]  # until here it counts, and `end` sees it

    async def _in_thread(self, call: Callable[[Notebook], Answer], notebook: Notebook) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, notebook)

    def _unknown_session_error(self, name: str) -> NotFoundError:
        ways = f"it was closed, not used for {self.idle_seconds:g} s, lost its interpreter, or never was"
        return NotFoundError(f"No session {name[:100]!r} is open: {ways}.", "POST /sessions opens one.")
