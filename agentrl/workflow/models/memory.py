"""The return of freed memory to other processes, which torch and the C library would otherwise keep."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of glibc's malloc.h."""

RETURN_THRESHOLD, DEFAULT_THRESHOLD = 2**20, 2**25
"""The allocation size, in bytes, from which memory comes from the system instead of the heap.

The first is used inside the context; the second is glibc's default.
"""


def free_cached_blocks(device: torch.device) -> None:
    """Return the free blocks of torch's allocator to the GPU, where another process may need them.

    On another kind of device it does nothing.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def return_freed_memory(device: torch.device, lean: bool) -> Iterator[None]:
    """Return GPU memory that was freed inside the context at its end.

    If `lean`, return freed CPU memory to the system at once.
    """
    try:
        with _without_heap(lean):
            yield
    finally:
        free_cached_blocks(device)


@contextmanager
def _without_heap(enabled: bool) -> Iterator[None]:
    """Return the memory of large CPU tensors to the system as soon as they are freed, at the cost of time.

    glibc's heap cannot reuse a gap for an aligned tensor of the same size, so an update of a quantised base held twice the
    memory in use. With another C library this does nothing.
    """
    if not enabled or platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, RETURN_THRESHOLD)
    try:
        yield
    finally:
        libc.mallopt(MMAP_THRESHOLD, DEFAULT_THRESHOLD)
