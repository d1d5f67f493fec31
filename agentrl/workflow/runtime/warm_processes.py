"""A pool of warm processes: each request has one for itself, and the process is kept for the next."""

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
        """Whether it can serve a request, as far as is known."""
        ...


Kept = TypeVar("Kept", bound=Lasting)


class Warm(Generic[Kept]):
    """A pool with as many processes as cores; each is opened when first needed, and again after it was lost."""

    def __init__(self, opened: Callable[[], Kept]) -> None:
        self._opened = opened
        self._places = Once(self._empty_places)

    @contextmanager
    def one(self) -> Iterator[Kept]:
        """Lend one process to the caller alone.

        Raises:
            AgentRLError: it cannot be opened.
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
        """The number of processes not in use."""
        return self._places().qsize()

    def forget(self) -> None:
        """Let all be opened anew; a process now in use is kept until its user is done."""
        self._places.forget()

    @staticmethod
    def _empty_places() -> "LifoQueue[Kept | None]":
        places: LifoQueue[Kept | None] = LifoQueue()
        for _ in range(os.cpu_count() or 1):
            places.put(None)
        return places
