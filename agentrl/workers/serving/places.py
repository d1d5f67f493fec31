"""The lookup of API keys: the attempt to which a key belongs, and the worker that serves it. One thread queries the database,
for many keys at a time.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from agentrl.workflow.store.endpoint_reads import AttemptLocation

KNOWN_SECONDS = 5.0
"""The lifetime of a cached answer, in seconds. An outdated answer is harmless: a worker that no longer holds the episode
responds with 421.
"""
MAX_KNOWN = 4096
MAX_READ = 500
"""The most keys in one query."""


class Places:
    """The lookup of keys of one endpoint. Use it only in the endpoint's event loop."""

    def __init__(self, read: Callable[[Collection[str]], dict[str, AttemptLocation]]) -> None:
        self._read = read
        self._known: OrderedDict[str, tuple[float, AttemptLocation]] = OrderedDict()
        self._asked: dict[str, asyncio.Future[AttemptLocation | None]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "rows")

    async def find(self, key_hash: str, fresh: bool = False) -> AttemptLocation | None:
        """Return the attempt to which the key with that hash belongs; None for an unknown key.

        Args:
            key_hash: the hash of the key.
            fresh: whether to query the database even if a cached answer exists.

        Raises:
            ServiceError: the database does not answer.
        """
        if not fresh and (cached := self._known.get(key_hash)) and time.monotonic() - cached[0] < KNOWN_SECONDS:
            return cached[1]
        waiting = self._asked.get(key_hash)
        if waiting is None:
            waiting = self._asked[key_hash] = asyncio.get_running_loop().create_future()
            if self._reading is None:
                self._reading = asyncio.create_task(self._read_all())
        return await asyncio.shield(waiting)  # others may wait for it too

    def close(self) -> None:
        """End the thread after its current query."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read_all(self) -> None:
        while self._asked:
            batch = {name: self._asked.pop(name) for name in list(self._asked)[:MAX_READ]}
            try:
                places = await asyncio.get_running_loop().run_in_executor(self._thread, self._read, list(batch))
            except Exception as error:  # noqa: BLE001 - those who wait are told
                for future in batch.values():
                    future.set_exception(error)
                    future.exception()  # seen, also where nobody waits any more
            else:
                for name, future in batch.items():
                    self._remember(name, places.get(name))
                    future.set_result(places.get(name))
        self._reading = None

    def _remember(self, key_hash: str, place: AttemptLocation | None) -> None:
        self._known.pop(key_hash, None)
        if place is not None and not place.over and place.address is not None:
            self._known[key_hash] = (time.monotonic(), place)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
