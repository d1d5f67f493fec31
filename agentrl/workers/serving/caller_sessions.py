"""The sessions of the tool server's clients, for tools whose variables last from one call to the next.

The calls of one session run one after another, in the order of their arrival. Calls of different sessions run in parallel. A
session ends when it is closed, when it was idle for IDLE_SECONDS, when its interpreter is lost, or when the server ends. The
calls of a session are not stored, so a lost session cannot be rebuilt. A later call in it gets an error that says so.

Only the server's event loop uses the table of sessions, so the table needs no lock. Slow work is done in threads.
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
"""The time without a call after which a session ends, in seconds. This time is longer than that of a tools worker, because a
tools worker can rebuild its sessions.
"""

NAME_BYTES = 16
"""The number of random bytes in a session's name. They make the name impossible to guess."""


@dataclass(eq=False)
class _CallerSession:
    """One session of a client. `calls` is the number of calls that run or wait; `rest` is the timer that ends the session when
    it is idle.
    """

    notebook: Notebook = field(default_factory=Notebook)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # granted in the order of requests
    calls: int = 0
    closed: bool = False
    rest: asyncio.TimerHandle | None = None


class ServedSessions:
    """The sessions of one server. Use it only in the server's event loop, except for `end`."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, idle_seconds: float = IDLE_SECONDS) -> None:
        self.max_sessions, self.idle_seconds = max_sessions, idle_seconds
        self._sessions: dict[str, _CallerSession] = {}
        self._ending: set[asyncio.Task[None]] = set()  # asyncio keeps only weak references to tasks
        # One thread per session: cells that wait for a core block no other session.
        self._threads = ThreadPoolExecutor(max_sessions, "session")

    def open(self) -> str:
        """Open a session and return its name.

        Raises:
            StateError: too many sessions are open.
        """
        if len(self._sessions) >= self.max_sessions:
            idle = f"wait until one has been idle for {self.idle_seconds:g} s"
            raise StateError(f"{self.max_sessions} sessions are open, which is the limit.", f"Close one, or {idle}.")
        name = token_urlsafe(NAME_BYTES)
        self._sessions[name] = _CallerSession()
        self._start_idle_timer(name)
        return name

    async def run(self, name: str, call: Callable[[Notebook], Answer]) -> Answer:
        """Run the call in a thread, after the session's earlier calls, and return its result.

        Raises:
            NotFoundError: no session of that name is open, or the session was closed while the call waited.
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
        """End the session after the call that is running in it. Calls that still wait in it fail.

        Raises:
            NotFoundError: no session of that name is open.
        """
        session = self._find(name)
        session.closed = True
        self._stop_idle_timer(session)
        await self._end_session(name)

    def end(self) -> None:
        """End all sessions. Call this after the event loop has ended."""
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
        del self._sessions[name]  # only now: until here it counts, and `end` must see it

    async def _in_thread(self, call: Callable[[Notebook], Answer], notebook: Notebook) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, notebook)

    def _unknown_session_error(self, name: str) -> NotFoundError:
        ways = f"it was closed, was idle for {self.idle_seconds:g} s, lost its interpreter, or never existed"
        return NotFoundError(f"No session {name[:100]!r} is open: {ways}.", "Open one: POST /sessions")
