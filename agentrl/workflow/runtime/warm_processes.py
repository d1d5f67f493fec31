"""A pool of warm processes. A request has a process for itself, which is then kept for the next request."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import LifoQueue
from typing import Generic, Protocol, TypeVar

from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.runtime.wait_budget import waiting


class Lasting(Protocol):
    """A process, or a session in one, that may be lost."""

    @property
    def alive(self) -> bool:
        """True if it can probably serve a request."""
        ...


Kept = TypeVar("Kept", bound=Lasting)


class Warm(Generic[Kept]):
    """A pool with as many processes as cores. Each is started when it is first needed, and again after it was lost."""

    def __init__(self, opened: Callable[[], Kept]) -> None:
        self._opened = opened
        self._places = Once(self._empty_places)

    @contextmanager
    def one(self) -> Iterator[Kept]:
        """Yield a process that no other caller uses during the `with` block.

        Raises:
            AgentRLError: it cannot be started.
        """
        with waiting():
            process = self._places().get()
        try:
            if process is None or not process.alive:
                process = self._opened()
            yield process
        finally:
            self._places().put(process)

    @property
    def idle(self) -> int:
        """The number of processes that are not in use."""
        return self._places().qsize()

    def forget(self) -> None:
        """Drop all processes, so that new ones are started. A process that is in use serves its caller to the end."""
        self._places.forget()

    @staticmethod
    def _empty_places() -> "LifoQueue[Kept | None]":
        places: LifoQueue[Kept | None] = LifoQueue()
        for _ in range(os.cpu_count() or 1):
            places.put(None)
        return places
