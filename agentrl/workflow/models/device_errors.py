"""The classification of device errors: out of memory, device lost, or neither. Only this module decides it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from agentrl.workflow.errors import DeviceLost

DeviceError = Literal["out_of_memory", "device_lost", "other"]

_OUT_OF_MEMORY = (
    *("DefaultCPUAllocator", "CUDA error: out of memory", "HIP error: out of memory", "STATUS_ALLOC_FAILED"),
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no room for the handle
)
"""Texts of out-of-memory errors that have no exception class: those of torch on a CPU, the driver, cuBLAS and cuDNN."""

_LOST = ("CUDA error:", "HIP error:", "CUDA driver error:", "STATUS_EXECUTION_FAILED", "STATUS_INTERNAL_ERROR")
"""Texts of errors that have no exception class in torch, and after which every later call of the device fails in this process.
"""

_UNHARMED = (
    *("no kernel image is available", "invalid device ordinal", "driver version is insufficient"),
    *("invalid argument", "invalid configuration argument", "STATUS_NOT_SUPPORTED", "STATUS_INVALID_VALUE"),
)
"""Texts of errors that leave the device usable: the card does not fit this build of torch, or a call was refused."""


def classify(error: BaseException) -> DeviceError:
    """Return the kind of a device error.

    After a failed kernel (illegal address, device-side assert, ECC error, launch failure), CUDA reports a failure at every
    later call in the process. So `device_lost` means that only a new process can use the device again.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(part in text for part in _OUT_OF_MEMORY):
        return "out_of_memory"
    if isinstance(error, DeviceLost):
        return "device_lost"
    if any(part in text for part in _UNHARMED):
        return "other"
    if isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and any(part in text for part in _LOST)):
        return "device_lost"
    return "other"


def as_device_lost(error: BaseException) -> DeviceLost | None:
    """Return the error as `DeviceLost` if the device is lost, else None."""
    if isinstance(error, DeviceLost):
        return error
    if classify(error) != "device_lost":
        return None
    reason = str(error).partition("\n")[0].strip().rstrip(".")
    lost = DeviceLost(f"This process lost its device: {reason}.", "Restart the process.", reason)
    lost.__cause__ = error
    return lost


@contextmanager
def translate_device_lost() -> Iterator[None]:
    """Raise `DeviceLost` in place of an exception of torch that means a lost device. A command ends with it.

    Raises:
        DeviceLost: the device is lost.
    """
    try:
        yield
    except RuntimeError as error:
        lost = as_device_lost(error)
        if lost is None:
            raise
        raise lost from error
