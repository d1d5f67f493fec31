"""Processes that are kept between the questions they are asked: each question has one for itself."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import LifoQueue
from typing import Generic, Protocol, TypeVar

from agentrl.workflow.runtime.lazy import Once
from agentrl.workflow.runtime.patience import waiting


class Lasting(Protocol):
    """What may be lost."""

    @property
    def alive(self) -> bool:
        """Whether it can be asked, as far as is known."""
        ...


Kept = TypeVar("Kept", bound=Lasting)


class Warm(Generic[Kept]):
    """Processes that last, as many as there are cores, each opened when it is first asked for, and again when it was lost."""

    def __init__(self, opened: Callable[[], Kept]) -> None:
        self._opened = opened
        self._places = Once(self._empty_places)

    @contextmanager
    def one(self) -> Iterator[Kept]:
        """One of them, for the caller alone.

        Raises:
            AgentRLError: it cannot be opened.
        """
        with waiting():
            kept = self._places().get()
        try:
            if kept is None or not kept.alive:
                kept = self._opened()
            yield kept
        finally:
            self._places().put(kept)

    @property
    def idle(self) -> int:
        """How many nobody uses at this moment."""
        return self._places().qsize()

    def forget(self) -> None:
        """They are opened anew; who has one keeps it until it is done."""
        self._places.forget()

    @staticmethod
    def _empty_places() -> "LifoQueue[Kept | None]":
        places: LifoQueue[Kept | None] = LifoQueue()
        for _ in range(os.cpu_count() or 1):
            places.put(None)
        return places
