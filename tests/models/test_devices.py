"""The device that a model runs on. What CUDA says of a card is the edge: no GPU is needed."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from agentrl.cli import doctor, probe
from agentrl.workflow.models import devices
from agentrl.workflow.models.devices import auto_dtype, pick_device, try_kernel

GPU = torch.device("cuda", 0)
NO_KERNELS = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be reported later."


@pytest.fixture
def turing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card without bfloat16 units, on which torch emulates it."""
    card = SimpleNamespace(name="NVIDIA GeForce GTX 1650", major=7, minor=5, total_memory=4 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 4 * 2**30))


@pytest.mark.usefixtures("turing")
def test_auto_dtype_is_float16_if_card_emulates_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert auto_dtype(GPU, "lora") == torch.float16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert auto_dtype(GPU, "lora") == torch.bfloat16


@pytest.mark.parametrize(("device", "kind"), [(GPU, "full"), (torch.device("cpu"), "lora"), (torch.device("cpu"), "full")])
def test_auto_dtype_is_float32_on_other_devices(device: torch.device, kind: str) -> None:
    assert auto_dtype(device, kind) == torch.float32  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_try_kernel_computes_on_the_device(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    try_kernel(torch.device("cpu"), dtype)
    monkeypatch.setattr(torch, "ones", torch.zeros)  # as from a kernel that did nothing
    with pytest.raises(RuntimeError, match=r"a matrix product on it is 0\.0, not 4096"):
        try_kernel(torch.device("cpu"), dtype)


@pytest.mark.usefixtures("turing")
def test_doctor_names_the_card_its_memory_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[torch.device, torch.dtype]] = []
    monkeypatch.setattr(devices, "try_kernel", lambda *kernel: tried.append(kernel))
    check = doctor._device("auto", probe._device_facts("auto"))
    assert tried == [(torch.device("cuda"), torch.float16)]
    assert check.state == "ok"
    assert check.found == (
        "cuda runs a matrix product; LoRA computes in float16; "
        "NVIDIA GeForce GTX 1650, compute capability 7.5, 3.0 of 4.0 GiB free"
    )


@pytest.mark.usefixtures("turing")
def test_doctor_fails_a_card_for_which_torch_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device, dtype: torch.dtype) -> None:
        raise torch.AcceleratorError(NO_KERNELS)

    monkeypatch.setattr(devices, "try_kernel", refuse)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    check = doctor._device("auto", probe._device_facts("auto"))
    assert check.state == "fail"
    assert "no kernel image is available for execution on the device" in check.found
    assert check.found.endswith("; this build of torch has kernels for sm_80, sm_90")
    assert check.todo.startswith("Install a build of torch for this card")


def test_pick_device_leaves_a_named_device_alone() -> None:
    assert pick_device("cuda:3") == "cuda:3"
