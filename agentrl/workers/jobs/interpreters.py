"""The interpreters of this tools worker: one for each episode that uses a tool with a session.

A call must run in the worker that has its episode's session. Each tools worker reads a queue of its own besides `tools`, and
forwards calls of other workers' sessions. If no worker has a session, it is rebuilt by running the episode's cells again, in
order. So a session survives the end of its worker, of its sandbox, and long pauses. The cells of one turn run in order,
whichever is delivered first; the first worker to receive one runs them.
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
"""The most interpreters at once. The one that has been idle longest is closed, and rebuilt at its next call."""

IDLE_SECONDS = 120.0
"""Seconds without a call after which an interpreter is closed."""

FULL_SECONDS = 0.05
"""The longest wait for an idle interpreter if all are in use."""

RERUN_NOTE = "[the session was lost and its cells were run again: one of them did not come to the same as before]\n"


@dataclass(eq=False)
class _LiveSession:
    """An interpreter and the calls that it has run; `users` are the threads that use it or wait for it."""

    key: SessionKey
    lock: threading.Lock = field(default_factory=threading.Lock)
    session: Session | None = None
    seen: list[int] = field(default_factory=list)
    users: int = 0
    used: float = 0.0


class Sessions:
    """The sessions of this process. Thread-safe.

    Args:
        owner: the queue that this process reads.
        failed: turns an exception of a call into the model's result; raises if the system failed.
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
        """Run the call after those before it. If another worker has the session, only return that worker's queue.

        Raises:
            InfraError: the system failed the call, which stays without a result.
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
        """Close all interpreters that no call is using."""
        while self._put_away_oldest(lambda live: True):
            pass

    # cells

    def _run_cells(self, live: _LiveSession, tool: CodeTool, past: Sequence[Cell], requested: Cell, last: bool) -> bool:
        """Run the cells that the interpreter has not run, then the requested one, and record its result.

        Return False if the whole sandbox ended meanwhile. A second run (`last`) then shows whether the cell caused that.
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
        """Return whether the interpreter is alive and has run only a prefix of these cells."""
        if live.session is None or not live.session.alive:
            return False
        return live.seen == [cell.id for cell in past[: len(live.seen)]]

    def _run_past_cells(self, live: _LiveSession, tool: CodeTool, past: Sequence[Cell]) -> bool:
        """Run the cells that the interpreter has not run; return whether their results equal the recorded ones."""
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
        """Close the unused interpreter that was used longest ago; return False if there is none."""
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
        """Renew the leases; close interpreters that were idle for long, or whose episode is over or leased to another
        worker.
        """
        with self._lock:
            there = set(self._lives)
        held = tool_sessions.keep(self._db, self.owner, self._lease)
        long_ago = time.monotonic() - self._idle_seconds
        while self._put_away_oldest(lambda live: live.used < long_ago or (live.key in there and live.key not in held)):
            pass
