"""Returns freed CPU memory to the system."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of glibc's malloc.h."""

RETURN_THRESHOLD, DEFAULT_THRESHOLD = 2**20, 2**25
"""Allocation sizes, in bytes, from which memory comes from the system, not the heap: inside the context, and else (glibc's)."""


@contextmanager
def return_freed_memory(wanted: bool) -> Iterator[None]:
    """Returns the memory of large CPU tensors to the system as soon as they are freed, at the price of time.

    glibc's heap cannot reuse a gap for an aligned tensor of the same size, so an update of a quantised base held twice the
    memory in use. With another C library this does nothing.
    """
    if not wanted or platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, RETURN_THRESHOLD)
    try:
        yield
    finally:
        libc.mallopt(MMAP_THRESHOLD, DEFAULT_THRESHOLD)
