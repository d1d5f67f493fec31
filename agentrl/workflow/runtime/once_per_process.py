"""`Once`: a lazy singleton, which is created when it is first used."""

import threading
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Once(Generic[Made]):
    """A callable that calls `make` once and returns its result. All threads get the same result.

    With functools.cache, threads that call at the same time would each call `make`. If `make` raises an exception, the next
    call tries again.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self.__doc__ = make.__doc__
        self._lock = threading.Lock()
        self._made = cache(make)

    def __call__(self) -> Made:
        """Return the result. The first call creates it."""
        with self._lock:
            return self._made()

    @property
    def made(self) -> bool:
        """True if the result exists."""
        return bool(self._made.cache_info().currsize)

    def forget(self) -> None:
        """Drop the result. The next call creates a new result."""
        self._made.cache_clear()
