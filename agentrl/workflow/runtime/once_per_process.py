"""`Once`: a lazy singleton, created when it is first needed."""

import threading
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Once(Generic[Made]):
    """A callable that calls `make` once and returns its result. Threads that call it at the same time get the same result.

    With functools.cache each of these threads would call `make`. If `make` raises an error, the next call tries again.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self.__doc__ = make.__doc__
        self._lock = threading.Lock()
        self._made = cache(make)

    def __call__(self) -> Made:
        """Return the result; create it at the first call."""
        with self._lock:
            return self._made()

    @property
    def made(self) -> bool:
        """True if the result was created."""
        return bool(self._made.cache_info().currsize)

    def forget(self) -> None:
        """Drop the result. The next call creates another."""
        self._made.cache_clear()
