"""What an exception says of the device."""

import pytest
import torch

from agentrl.workflow.errors import DeviceLost, InfraError
from agentrl.workflow.models.device_errors import as_device_lost, classify

ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API call."


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_classify_recognises_out_of_memory(error: Exception) -> None:
    assert classify(error) == "out_of_memory"
    assert as_device_lost(error) is None


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(ASSERT),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        DeviceLost("CUDA error: unspecified launch failure"),
    ],
)
def test_classify_recognises_a_lost_device(error: Exception) -> None:
    assert classify(error) == "device_lost"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
        torch.AcceleratorError("CUDA error: invalid configuration argument"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(...)`"),
        ValueError("a log that quotes CUDA error: unspecified launch failure"),
        InfraError("Sampling failed."),
    ],
)
def test_classify_leaves_other_errors_alone(error: Exception) -> None:
    """A build of torch without kernels for the card is met again by every new process."""
    assert classify(error) == "other"
    assert as_device_lost(error) is None


def test_device_lost_names_the_first_line_and_keeps_the_cause() -> None:
    error = torch.AcceleratorError(ASSERT)
    lost = as_device_lost(error)
    assert lost is not None
    assert lost.reason == "CUDA error: device-side assert triggered"
    assert lost.__cause__ is error
    assert as_device_lost(lost) is lost
