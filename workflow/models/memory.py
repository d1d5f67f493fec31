"""How it shows that memory ran out, on whatever device, and how the CPU's is kept from lying idle."""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MMAP_THRESHOLD = -3
"""`M_MMAP_THRESHOLD` of glibc's malloc.h."""

OOM_MESSAGES = ("DefaultCPUAllocator", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""What errors of no class of their own say: torch's on a CPU, the driver's, and those of CUDA's libraries (cuBLAS, cuDNN)."""

RETURN_THRESHOLD, DEFAULT_THRESHOLD = 2**20, 2**25
"""Bytes from which on memory is the system's own, and not the heap's: while it is spared, and else (glibc's limit)."""


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(said in str(error) for said in OOM_MESSAGES)


@contextmanager
def return_freed_memory(wanted: bool) -> Iterator[None]:
    """Gives freed memory back, at the price of time: what a large tensor of the CPU took goes when it is freed.

    glibc's heap cannot fill a gap with an aligned tensor of the same size, so an update of a quantised base held twice the
    memory that was in use. With another C library this does nothing.
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
