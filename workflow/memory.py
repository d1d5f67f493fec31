"""How it shows that memory ran out, on whatever device, and how the CPU's is kept from lying idle."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of glibc's malloc.h."""

APART, TOGETHER = 2**20, 2**25
"""Bytes from which on memory is the system's own, and not the heap's: while it is spared, and else (glibc's limit)."""


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU (which has no class for it)."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def spared(wanted: bool) -> Iterator[None]:
    """The process's memory, at the price of time: what a large tensor of the CPU took goes back when it is freed.

    glibc's heap cannot fill a gap with an aligned tensor of the same size, so an update of a quantised base held twice the
    memory that was in use. With another C library this does nothing.
    """
    if not wanted or platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, APART)
    try:
        yield
    finally:
        libc.mallopt(MMAP_THRESHOLD, TOGETHER)
