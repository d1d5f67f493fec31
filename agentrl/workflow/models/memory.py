"""The return of freed memory to the system. Otherwise torch and the C library would keep it."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of glibc's malloc.h."""

RETURN_THRESHOLD, DEFAULT_THRESHOLD = 2**20, 2**25
"""The allocation size, in bytes, from which memory comes from the system instead of the heap.

`RETURN_THRESHOLD` is used inside the context. `DEFAULT_THRESHOLD` is glibc's default.
"""


def free_cached_blocks(device: torch.device) -> None:
    """Release the free blocks of torch's GPU allocator, so other processes can use the memory.

    On another kind of device, do nothing.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def return_freed_memory(device: torch.device, lean: bool) -> Iterator[None]:
    """When the context ends, release GPU memory that was freed inside it.

    With `lean`, also return freed CPU memory to the system, at once.
    """
    try:
        with _without_heap(lean):
            yield
    finally:
        free_cached_blocks(device)


@contextmanager
def _without_heap(enabled: bool) -> Iterator[None]:
    """Inside the context, return the memory of a large CPU tensor to the system as soon as the tensor is freed.

    This takes more time. glibc's heap cannot reuse a gap for an aligned tensor of the same size. So an update of a quantised
    base held twice the memory that it used. With another C library this does nothing.
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
