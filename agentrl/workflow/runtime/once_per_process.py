"""Once: a lazy singleton, made when it is first needed."""

import threading
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Once(Generic[Made]):
    """A callable that returns the one result of `make`; threads that call at the same time get the same one.

    With functools.cache each of those threads would make one. If `make` raises, the next call tries again.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self.__doc__ = make.__doc__
        self._lock = threading.Lock()
        self._made = cache(make)

    def __call__(self) -> Made:
        """Return the result, made if need be."""
        with self._lock:
            return self._made()

    @property
    def made(self) -> bool:
        """Whether the result was made."""
        return bool(self._made.cache_info().currsize)

    def forget(self) -> None:
        """Drop the result: the next call makes another."""
        self._made.cache_clear()
