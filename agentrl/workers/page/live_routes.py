"""Live updates as server-sent events. Each watched run is read once per interval, and all clients that watch this run get the
result.

The id of an event contains the number of finished iterations and a hash of all other contents (`mark`). A browser that
reconnects sends the id, and receives the changes since that event.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from agentrl.workers.page.answers import plain, refuse
from agentrl.workers.page.read_only import Busy, ReadOnlyStore
from agentrl.workers.page.shown.whole_run import list_shown_runs
from agentrl.workflow.errors import AgentRLError, NotFoundError
from agentrl.workflow.store.driver_reader import DriverTransaction
from agentrl.workflow.store.reads import changes, curves, load_rows, run_rows

LOOK_SECONDS = 0.5
"""The time between two readings of a run, in seconds."""
WORK_SECONDS = 2.0
"""The shortest time, in seconds, between two events that are only about turns, calls and the load of hosts, because these
change often. Other changes are sent at once.
"""
COMMENT_SECONDS = 15.0
"""The time without an event, in seconds, after which a comment is sent. The comment makes proxies keep the connection open."""
RETRY_MS = 2000
MAX_LISTENERS = 64
MAX_ROWS = 1000
"""The most iterations in an event. A page that has missed more of them requests the curves again."""

_TOO_MANY = Busy(f"{MAX_LISTENERS} pages are already listening.", "Close some.")

router = APIRouter(prefix="/api", tags=["live"])


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a run, or of the list of runs, at one reading.

    Attributes:
        stamp: a hash that changes with the page's contents, except turns and calls (see `live_state`).
        work: a hash that changes with the turns and calls.
        closed: the number of finished iterations.
        machine: a text that changes with the load of the hosts.
        gone: True if the run does not exist any more.
        busy: the reason why the run could not be read; empty if it could.
    """

    stamp: str = ""
    work: str = ""
    closed: int = 0
    machine: str = ""
    gone: bool = False
    busy: str = ""

    @property
    def mark(self) -> str:
        """A hash of all contents except the iterations. It is a part of an event's id."""
        return self.stamp + self.work


@dataclass
class _Watch:
    """The watched state of one run, or of the list of runs. One task reads it for all listeners."""

    listeners: int = 0
    seen: Seen | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None
    read: "dict[tuple[str, int], asyncio.Task[Any]]" = field(default_factory=dict)
    """The running and finished reads of changes, by mark and number of finished iterations. All listeners that need the same
    read share it.
    """


class Live:
    """The watched runs of a service. A run is read only while it has listeners."""

    def __init__(self, store: ReadOnlyStore, is_ending: Callable[[], bool]) -> None:
        """Create the object without watching any run.

        Args:
            is_ending: returns whether the service is stopping.
        """
        self._store, self.is_ending = store, is_ending
        self._watches: dict[int | None, _Watch] = {}

    @property
    def listeners(self) -> int:
        """The number of listeners at present."""
        return sum(watch.listeners for watch in self._watches.values())

    async def listen(self, run: int | None) -> AsyncGenerator[Seen | None]:
        """Yield the state of the run whenever it changes, and None after COMMENT_SECONDS without a change. If `run` is None,
        yield the state of the list of runs.
        """
        watch = self._watches.setdefault(run, _Watch())
        watch.listeners += 1
        if watch.task is None:
            watch.task = asyncio.create_task(self._look(run, watch))
        last: Seen | None = None
        spoke = time.monotonic()
        try:
            while not self.is_ending():
                seen = await _next(watch, last)
                if seen is not None and seen != last:
                    last, spoke = seen, time.monotonic()
                    yield seen
                    if seen.gone:
                        return
                elif time.monotonic() - spoke > COMMENT_SECONDS:
                    spoke = time.monotonic()
                    yield None
        finally:
            watch.listeners -= 1
            if not watch.listeners:
                if watch.task is not None:
                    watch.task.cancel()
                self._watches.pop(run, None)

    async def changes(self, run: int, since: int, mark: str) -> dict[str, Any]:
        """Return the data that may have changed after `since` iterations. Listeners with the same `mark` share one read."""
        read = self._watches[run].read
        task = read.get((mark, since))
        if task is None:
            for old in [key for key in read if key[0] != mark]:
                del read[old]
            task = read[mark, since] = asyncio.create_task(asyncio.to_thread(_changes, self._store, run, since))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # a failed one is asked for again
        try:
            result: dict[str, Any] = await asyncio.shield(task)
        except Exception:
            read.pop((mark, since), None)
            raise
        return result

    async def _look(self, run: int | None, watch: _Watch) -> None:
        last_change = 0.0
        while True:
            seen = await asyncio.to_thread(_see, self._store, run)
            at = time.monotonic()
            only_work = watch.seen is not None and replace(seen, work=watch.seen.work, machine=watch.seen.machine) == watch.seen
            if seen != watch.seen and (not only_work or at - last_change >= WORK_SECONDS):
                last_change = at
                moved, watch.seen, watch.moved = watch.moved, seen, asyncio.Event()
                moved.set()
            await asyncio.sleep(LOOK_SECONDS)


async def _next(watch: _Watch, last: Seen | None) -> Seen | None:
    """Return the newest state. If it equals `last`, first wait until it changes or LOOK_SECONDS have passed."""
    if watch.seen in (None, last):
        with suppress(TimeoutError):
            await asyncio.wait_for(watch.moved.wait(), LOOK_SECONDS)
    return watch.seen


def _see(store: ReadOnlyStore, run: int | None) -> Seen:
    try:
        if run is None:
            return store.ask(lambda tx: Seen(_short(changes.find_list_stamp(tx)), machine=load_rows.mark_machines(tx)))
        state, machine = store.ask(lambda tx: (changes.find_state(tx, run), load_rows.mark_machines(tx)))
    except AgentRLError as error:
        return Seen(busy=error.message)
    except Exception as error:  # noqa: BLE001 - whoever listens is told, and the next look is taken
        return Seen(busy=f"The store cannot be read: {type(error).__name__}.")
    return Seen(gone=True) if state is None else Seen(_short(state.stamp), _short(state.work), state.closed, machine)


def _short(stamp: str) -> str:
    return hashlib.blake2s(stamp.encode("utf-8", "replace"), digest_size=6).hexdigest()


@router.get("/live", response_class=StreamingResponse)
async def follow(
    request: Request,
    run: int | None = None,
    since: Annotated[str, Query(max_length=100)] = "",
    last_event_id: Annotated[str, Header(max_length=100)] = "",
) -> Response:
    """Return the changes of a run, or of the list of runs, as server-sent events: `change`, `machine`, `busy`, `gone`.

    A run's `change` has `iterations` (rows of its curves that are new or may have changed), `run_row` and `progress`. A
    `change` of the list is empty, and tells the client to request the list again. `machine` is empty too, and tells the client
    that the load of the hosts has changed. `since` or `Last-Event-ID` is the id of the last event that the client received.
    """
    live: Live = request.app.state.live
    if live.listeners >= MAX_LISTENERS:
        return refuse(_TOO_MANY)
    return StreamingResponse(_events(live, run, last_event_id or since), media_type="text/event-stream")


async def _events(live: Live, run: int | None, last: str) -> AsyncGenerator[str]:
    closed, mark = _parse_id(last)
    machine: str | None = None
    yield f"retry: {RETRY_MS}\n\n"
    if live.listeners >= MAX_LISTENERS:  # others came in while this one did
        yield _event("busy", {"error": _TOO_MANY.message})
        return
    async with aclosing(live.listen(run)) as looks:
        async for seen in looks:
            if seen is None:
                yield ": still here\n\n"
                continue
            if seen.gone or seen.busy:
                yield _event("gone", {}) if seen.gone else _event("busy", {"error": seen.busy})
                continue
            if machine not in (None, seen.machine):  # what the client asked for at first may be older than the first look
                yield _event("machine", {})
            machine = seen.machine
            if mark != seen.mark:
                since = seen.closed if closed is None else min(closed, seen.closed)
                async for read in _read(live, run, since, seen.mark):
                    if isinstance(read, AgentRLError):
                        yield _event("busy", {"error": read.message})
                    else:
                        closed, mark = seen.closed, seen.mark
                        yield _event("change", read, f"{closed}.{mark}")


async def _read(live: Live, run: int | None, since: int, mark: str) -> AsyncGenerator[dict[str, Any] | AgentRLError]:
    """Read the data of a change, and yield them. If an attempt fails, yield its error and try again."""
    while not live.is_ending():
        try:
            yield {} if run is None else await live.changes(run, since, mark)
        except NotFoundError:
            pass  # the next look says so
        except AgentRLError as error:
            yield error
            await asyncio.sleep(LOOK_SECONDS)
            continue
        return


def _changes(store: ReadOnlyStore, run: int, since: int) -> dict[str, Any]:
    def read(tx: DriverTransaction) -> dict[str, Any]:
        name = run_rows.run_name(tx, run)
        (row,) = list_shown_runs(tx, [run_rows.run_by_id(tx, run)])
        rows = curves.load_curves(tx, name, since, MAX_ROWS).rows
        return {"run": run, "iterations": rows, "run_row": row, "progress": run_rows.count_progress(tx, name)}

    return store.ask(read)


def _parse_id(text: str) -> tuple[int | None, str]:
    """Return two values from the id of an event: the number of finished iterations, and the mark."""
    closed, point, mark = text.partition(".")
    return (int(closed), mark) if point and closed.isascii() and closed.isdigit() and len(closed) < 10 else (None, "")


def _event(kind: str, data: Any, number: str = "") -> str:
    body = json.dumps(plain(data), allow_nan=False, separators=(",", ":"))
    return f"{f'id: {number}' + chr(10) if number else ''}event: {kind}\ndata: {body}\n\n"
