"""The interpreters of this tools worker: one for each episode that uses a tool with a session.

A call must run in the worker that has its episode's session. Each tools worker reads the queue `tools` and a second queue that
no other worker reads. If a call belongs to another worker's session, the worker forwards the call to that worker's queue. If no
worker has the session, a worker rebuilds it by running the episode's cells again, in order. So a session survives long pauses
and the end of its worker or sandbox. The cells of one turn run in order even if their messages arrive in another order: a
worker that receives a cell first runs the cells before it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from logging import getLogger

from agentrl.workers.stack.process import stopping, worker_name
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.runtime.wait_budget import Patience
from agentrl.workflow.sandbox import Session
from agentrl.workflow.store import tool_calls, tool_sessions
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.tool_sessions import Cell, SessionKey
from agentrl.workflow.tools.python import CodeTool
from agentrl.workflow.trajectory import ToolResult, storable

log = getLogger("agentrl.sessions")
MAX_SESSIONS = 64
"""The most interpreters at once. If a further one is needed, the one that has been idle longest is closed, and rebuilt at its
next call.
"""

IDLE_SECONDS = 120.0
"""The time without a call after which an interpreter is closed, in seconds."""

FULL_SECONDS = 0.05
"""The pause between two searches for an idle interpreter while all are in use, in seconds."""

RERUN_NOTE = "[the session was lost and its cells were run again: one of them did not come to the same as before]\n"


@dataclass(eq=False)
class _LiveSession:
    """An interpreter and the calls that it has run. `users` is the number of threads that use it or wait for it."""

    key: SessionKey
    lock: threading.Lock = field(default_factory=threading.Lock)
    session: Session | None = None
    seen: list[int] = field(default_factory=list)
    users: int = 0
    used: float = 0.0


class Sessions:
    """The sessions of this process. Thread-safe. `owner` is the name of the queue that only this process reads. `failed` is the
    function that turns an exception of a call into the result for the model; it raises InfraError if the system failed.
    """

    def __init__(
        self,
        db: Database,
        owner: str,
        lease_seconds: float,
        failed: Callable[[CodeTool, BaseException], ToolResult],
        max_sessions: int = MAX_SESSIONS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._db, self.owner, self._lease, self._failed = db, owner, lease_seconds, failed
        self._idle_seconds = idle_seconds
        self._places = threading.Semaphore(max_sessions)
        self._lock = threading.Lock()
        self._lives: dict[SessionKey, _LiveSession] = {}

    def start(self) -> None:
        """Start the daemon thread that renews leases."""
        threading.Thread(target=self._beat, name="sessions", daemon=True).start()

    def answer(self, key: SessionKey, call: int, tool: CodeTool) -> str:
        """Run the call, after all earlier calls of its session, and record its result. If the system fails, raise InfraError.
        The call then has no result.

        Returns:
            The queue of the worker that has the session. If this is the queue of another worker, the call was not run here, and
                the caller must forward it.
        """
        ended: set[int] = set()
        with self._hold(key) as live:
            while True:
                cells = tool_sessions.load_cells_until(self._db, key, call)
                requested = next((cell for cell in cells if cell.result is None), None)
                if requested is None:
                    return self.owner
                past = [cell for cell in cells[: cells.index(requested)] if cell.result and cell.result.exit]
                if not self._is_prefix(live, past):
                    owner = tool_sessions.take(self._db, key, self.owner, self._lease)
                    if owner != self.owner:
                        self._put_away(live)
                        return owner
                    self._open_session(live, tool)
                if not self._run_cells(live, tool, past, requested, last=requested.id in ended):
                    ended.add(requested.id)

    def close(self) -> None:
        """Close all interpreters that are not in use by a call."""
        while self._put_away_oldest(lambda live: True):
            pass

    # cells

    def _run_cells(self, live: _LiveSession, tool: CodeTool, past: Sequence[Cell], requested: Cell, last: bool) -> bool:
        """Run the `past` cells that the interpreter has not run, then the requested cell, and record its result.

        Return False, without a record, if the sandbox ended meanwhile. The caller then runs the cell once more with `last`: if
        the sandbox ends again, the cell caused it, and the result is recorded.
        """
        try:
            note = "" if self._run_past_cells(live, tool, past) else RERUN_NOTE
            started = datetime.now(UTC)
            result = self._run_cell(live, tool, requested, note)
            if not (last or (live.session and live.session.alive)):
                return False
            recorded = tool_calls.record_result(self._db, requested.id, result, started, worker_name())
        except BaseException:
            self._put_away(live)  # the interpreter may have seen a cell that is not recorded
            raise
        if not recorded:  # another worker's recorded result may differ from the one here
            self._put_away(live)
        return True

    @staticmethod
    def _is_prefix(live: _LiveSession, past: Sequence[Cell]) -> bool:
        """Return whether the interpreter is alive and has run only the first cells of `past`, or all of them."""
        if live.session is None or not live.session.alive:
            return False
        return live.seen == [cell.id for cell in past[: len(live.seen)]]

    def _run_past_cells(self, live: _LiveSession, tool: CodeTool, past: Sequence[Cell]) -> bool:
        """Run the cells of `past` that the interpreter has not run. Return whether their results equal the recorded ones."""
        same = True
        for cell in past[len(live.seen) :]:
            assert live.session is not None
            assert cell.result is not None
            seen = cell.result.exit
            if seen is None or seen.code is None or seen.code < 0 or seen.status == "killed":
                live.session.run("pass")  # the cell died, and only its number counts
            else:
                result = self._run_code(tool, live.session, cell)
                same = self._compare(live.key, cell, result) and same
            live.seen.append(cell.id)
        return same

    def _compare(self, key: SessionKey, cell: Cell, result: ToolResult) -> bool:
        assert cell.result is not None
        before = (cell.result.content.removeprefix(RERUN_NOTE), cell.result.error_class)
        if before == (storable(result.content), result.error_class):
            return True
        difference = f"call {cell.id} came to {result.error_class or 'ok'} {result.content[:300]!r}, not {before[1] or 'ok'}"
        log.warning("episode %d: %s", key.episode, difference)
        tool_sessions.taint(self._db, key, storable(f"{difference} {before[0][:300]!r}"))
        return False

    def _run_cell(self, live: _LiveSession, tool: CodeTool, cell: Cell, note: str) -> ToolResult:
        assert live.session is not None
        patience = Patience()
        faultpoint("run_tool.before")
        with patience.hold():
            result = self._run_code(tool, live.session, cell)
        faultpoint("run_tool.after")
        if result.exit:
            live.seen.append(cell.id)
        return replace(result, content=note + result.content, seconds=patience.own_seconds)

    def _run_code(self, tool: CodeTool, session: Session, cell: Cell) -> ToolResult:
        try:
            return tool.cell(session, cell.arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's tool; failures of the system are raised again
            return self._failed(tool, error)

    # interpreters

    @contextmanager
    def _hold(self, key: SessionKey) -> Iterator[_LiveSession]:
        with self._lock:
            live = self._lives.setdefault(key, _LiveSession(key))
            live.users += 1
        try:
            with live.lock:
                yield live
        finally:
            with self._lock:
                live.users -= 1
                live.used = time.monotonic()
                if not live.users and live.session is None:
                    del self._lives[key]

    def _open_session(self, live: _LiveSession, tool: CodeTool) -> None:
        self._put_away(live)
        while not self._places.acquire(blocking=False):
            if not self._put_away_oldest(lambda other: True):
                time.sleep(FULL_SECONDS)
        try:
            live.session = tool.open()
        except Exception as error:
            self._places.release()
            self._failed(tool, error)
            raise

    def _put_away(self, live: _LiveSession) -> None:
        session, live.session, live.seen = live.session, None, []
        if session is not None:
            session.close()
            self._places.release()

    def _put_away_oldest(self, chosen: Callable[[_LiveSession], bool]) -> bool:
        """Close the interpreter that has been unused longest among those for which `chosen` is true."""
        with self._lock:
            idle = [live for live in self._lives.values() if live.session and not live.users and chosen(live)]
            if not idle:
                return False
            live = min(idle, key=lambda live: live.used)
            del self._lives[live.key]  # so that no other call gets it
        self._put_away(live)
        return True

    def _beat(self) -> None:
        while not stopping.wait(self._lease / 3):
            try:
                self.renew_and_clean()
            except Exception:
                log.exception("the upkeep of sessions failed")
        try:
            tool_sessions.leave(self._db, self.owner)
        except ServiceError as error:
            log.warning("sessions could not be released; other workers wait for this worker's leases to end: %s", error)

    def renew_and_clean(self) -> None:
        """Renew the leases. Close each interpreter that was idle for long, whose lease another worker holds, or whose episode
        is over.
        """
        with self._lock:
            there = set(self._lives)
        held = tool_sessions.keep(self._db, self.owner, self._lease)
        long_ago = time.monotonic() - self._idle_seconds
        while self._put_away_oldest(lambda live: live.used < long_ago or (live.key in there and live.key not in held)):
            pass
