"""Once: what a process has one of, made when it is first asked for."""

import threading
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Once(Generic[Made]):
    """What `make` gives, made at the first call; threads that call at the same time get the same one.

    functools.cache would have each of them make one. Where `make` raises, the next call tries again.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self.__doc__ = make.__doc__
        self._lock = threading.Lock()
        self._made = cache(make)

    def __call__(self) -> Made:
        """It, made if need be."""
        with self._lock:
            return self._made()

    @property
    def made(self) -> bool:
        """Whether it is there."""
        return bool(self._made.cache_info().currsize)

    def forget(self) -> None:
        """The next call makes another."""
        self._made.cache_clear()
