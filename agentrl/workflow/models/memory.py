"""Memory handed over to other processes: what torch and the C library would keep for later."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of glibc's malloc.h."""

RETURN_THRESHOLD, DEFAULT_THRESHOLD = 2**20, 2**25
"""Allocation sizes, in bytes, from which memory comes from the system, not the heap: inside the context, and else (glibc's)."""


def free_cached_blocks(device: torch.device) -> None:
    """Return the blocks that torch's allocator keeps for later to the GPU, where another process may need them.

    Does nothing for another kind of device.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def return_freed_memory(device: torch.device, lean: bool) -> Iterator[None]:
    """Return memory that is freed inside to the GPU at the end, and if `lean`, that of the CPU to the system at once."""
    try:
        with _without_heap(lean):
            yield
    finally:
        free_cached_blocks(device)


@contextmanager
def _without_heap(wanted: bool) -> Iterator[None]:
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
