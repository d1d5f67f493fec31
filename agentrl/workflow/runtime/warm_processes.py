"""A pool of running processes. Each process serves one request at a time, and is kept for later requests."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import LifoQueue
from typing import Generic, Protocol, TypeVar

from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.runtime.wait_budget import waiting


class Lasting(Protocol):
    """A long-lived process, or a session in such a process. Both may end unexpectedly."""

    @property
    def alive(self) -> bool:
        """True if the process can probably serve another request."""
        ...


Kept = TypeVar("Kept", bound=Lasting)


class Warm(Generic[Kept]):
    """A pool with one process per core. A process is started when it is first needed. A lost process is replaced by a new
    one.
    """

    def __init__(self, opened: Callable[[], Kept]) -> None:
        self._opened = opened
        self._places = Once(self._empty_places)

    @contextmanager
    def one(self) -> Iterator[Kept]:
        """Yield a process for exclusive use in the `with` block. Raise AgentRLError if it cannot be started."""
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
        """The number of processes that serve no request."""
        return self._places().qsize()

    def forget(self) -> None:
        """Drop all processes, so new ones are started. A process that serves a request finishes it."""
        self._places.forget()

    @staticmethod
    def _empty_places() -> "LifoQueue[Kept | None]":
        places: LifoQueue[Kept | None] = LifoQueue()
        for _ in range(os.cpu_count() or 1):
            places.put(None)
        return places
