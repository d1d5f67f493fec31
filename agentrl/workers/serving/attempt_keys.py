"""The authentication of agents. It finds the attempt to which an API key belongs, and the worker that serves this attempt. One
thread queries the database, for many keys at a time.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from logging import getLogger

from agentrl.workers.http import api_errors
from agentrl.workflow.agents.keys import key_hash
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.store.endpoint_reads import AttemptLocation

log = getLogger("agentrl.endpoint")
KNOWN_SECONDS = 5.0
"""The lifetime of a cached answer, in seconds. An outdated answer does no harm: a worker that no longer holds the episode
responds with status 421, and the database is queried again. A worker that still holds the episode cannot commit a turn of an
attempt that has ended (`store.steps.commit_calls`), and refuses it with status 409. When this endpoint ends an
attempt, it drops the answer at once (`AttemptKeys.forget`).
"""
MAX_KNOWN = 4096
MAX_KEY_CHARS = 256
MAX_READ = 500
"""The most keys in one query."""


class AttemptKeys:
    """The authentication by the keys that agents receive for their attempts. Use it only in the endpoint's event loop."""

    def __init__(self, read: Callable[[Collection[str]], dict[str, AttemptLocation]]) -> None:
        self._read = read
        self._known: OrderedDict[str, tuple[float, AttemptLocation]] = OrderedDict()
        self._asked: dict[str, asyncio.Future[AttemptLocation | None]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._forgets = 0
        self._thread = ThreadPoolExecutor(1, "rows")

    async def find(self, hashed: str, fresh: bool = False) -> AttemptLocation | None:
        """Return the attempt to which the key with that hash belongs; None for an unknown key.

        Args:
            hashed: the hash of the key.
            fresh: whether to query the database even if a cached answer exists.

        Raises:
            ServiceError: the database does not answer.
        """
        if not fresh and (cached := self._known.get(hashed)) and time.monotonic() - cached[0] < KNOWN_SECONDS:
            return cached[1]
        waiting = self._asked.get(hashed)
        if waiting is None:
            waiting = self._asked[hashed] = asyncio.get_running_loop().create_future()
            if self._reading is None:
                self._reading = asyncio.create_task(self._read_all())
        return await asyncio.shield(waiting)  # others may wait for it too

    async def find_open(self, key: str) -> AttemptLocation:
        """Return the attempt to which the key belongs, if its episode accepts requests.

        Raises:
            ApiError: with status 401, the key is unknown; with status 409, the episode is over; with status 503, the database
                does not answer.
        """
        return require_open(await self._find(key))

    async def accepts(self, api_key: str) -> bool:
        """Return True if the key belongs to an attempt.

        Raises:
            ApiError: the database does not answer.
        """
        return 0 < len(api_key) <= MAX_KEY_CHARS and await self._find(api_key) is not None

    async def find_model(self, api_key: str, headers: Mapping[str, str]) -> tuple[str, int]:
        """Return the name of the run to which a request with this key belongs, and when it was created, in Unix seconds.

        Raises:
            ApiError: the key or the episode is refused; see `find_open`.
        """
        place = await self.find_open(_checked(api_key))
        return place.run, place.created

    @asynccontextmanager
    async def enter(self, api_key: str, headers: Mapping[str, str], path: str) -> AsyncIterator[str]:
        """Yield the key with which the request is forwarded. The request is open during the `with` block.

        Raises:
            ApiError: there is no key, or it is too long.
        """
        yield _checked(api_key)

    def forget(self, agent: int) -> None:
        """Remove the cached answer for the attempt whose row in `agent_attempts` has the id `agent`. Results of a query in
        progress are not cached either, because they may be older.
        """
        self._forgets += 1
        for hashed in [hashed for hashed, (_, place) in self._known.items() if place.agent == agent]:
            del self._known[hashed]

    def close(self) -> None:
        """End the thread after its current query."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _find(self, key: str) -> AttemptLocation | None:
        try:
            return await self.find(key_hash(key))
        except ServiceError as error:
            log.warning("%s", error)
            raise api_errors.broken(30) from None

    async def _read_all(self) -> None:
        while self._asked:
            forgets = self._forgets
            batch = {name: self._asked.pop(name) for name in list(self._asked)[:MAX_READ]}
            try:
                places = await asyncio.get_running_loop().run_in_executor(self._thread, self._read, list(batch))
            except Exception as error:  # noqa: BLE001 - those who wait are told
                for future in batch.values():
                    future.set_exception(error)
                    future.exception()  # seen, also where nobody waits any more
            else:
                for name, future in batch.items():
                    self._known.pop(name, None)
                    if forgets == self._forgets:
                        self._remember(name, places.get(name))
                    future.set_result(places.get(name))
        self._reading = None

    def _remember(self, hashed: str, place: AttemptLocation | None) -> None:
        if place is not None and not place.over and place.address is not None:
            self._known[hashed] = (time.monotonic(), place)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)


def require_open(place: AttemptLocation | None) -> AttemptLocation:
    """Return the attempt's location if its episode accepts requests.

    Raises:
        ApiError: with status 401, the key is unknown; with status 409, the episode is over.
    """
    if place is None:
        raise api_errors.unknown_key()
    if place.over:
        raise api_errors.over(place.episode, place.over)
    return place


def _checked(api_key: str) -> str:
    if not 0 < len(api_key) <= MAX_KEY_CHARS:
        raise api_errors.unknown_key()
    return api_key
