"""The device that a model runs on: its name, its precision, and a test that it runs a kernel."""

from typing import Literal

import torch

from agentrl.workflow.errors import ConfigError

SIDE = 16
"""The side of the square matrices of the test kernel.

With it, the elements of the product, 16, and their sum, 4096, are exact in every dtype.
"""


def pick_device(device: str) -> str:
    """Return the device. `auto` becomes `cuda` if torch can use a GPU, else `cpu`."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def devices_of_ranks(
    number: int | Literal["auto"],
    device: str,
    numerics: str,
    has_other_hosts: bool = False,
    option: str = "-s update.devices=",
) -> list[str]:
    """Return the device of each rank of a training on this machine. One device of one host means that this process trains by
    itself.

    Args:
        number: the number of devices. `auto` takes all GPUs of this machine that torch can use.
        device: AGENTRL_DEVICE.
        numerics: `model.numerics`; `exact` computes on the CPU.
        has_other_hosts: whether the training has ranks on other hosts. Then `auto` is not returned: a device is `cpu` or a
            card, such as `cuda:0`.
        option: the option that sets `number`, for messages.

    Raises:
        ConfigError: this machine does not have so many devices.
    """
    name = option.removeprefix("-s ")
    if number == 1 and not has_other_hosts:
        return [device]
    if device == "cpu" or numerics == "exact":
        return ["cpu"] * (1 if number == "auto" else number)
    if device not in ("auto", "cuda"):
        if number in (1, "auto"):
            return [device]
        message = f"{name}{number} needs {number} devices, and AGENTRL_DEVICE={device} names one."
        raise ConfigError(message, "Set AGENTRL_DEVICE=cuda. Choose the cards with CUDA_VISIBLE_DEVICES.")
    gpus = torch.cuda.device_count()
    if number == "auto" and not has_other_hosts:
        return [f"cuda:{card}" for card in range(gpus)] if gpus > 1 else [device]
    if number in (1, "auto") and not gpus and device == "auto":
        return ["cpu"]
    wanted = max(1, gpus) if number == "auto" else number
    if wanted > gpus:
        message = f"{name}{number} needs {wanted} GPUs, and torch can use {gpus or 'none'} on this machine."
        more = f"Pass {option}{gpus}." if gpus else "Set AGENTRL_DEVICE=cpu to train with so many processes on the CPU."
        raise ConfigError(message, more)
    return [f"cuda:{card}" for card in range(wanted)]


def auto_dtype(device: torch.device, kind: Literal["lora", "full"]) -> torch.dtype:
    """Return the precision that `model.dtype: auto` means on this device.

    LoRA on a GPU computes in bfloat16. Some cards have no bfloat16 units (Turing and older), and torch only emulates them;
    there, LoRA computes in float16. Everything else computes in float32: optimizer steps are about 1e-4, and trained weights in
    bfloat16 have too few bits for them.
    """
    if device.type != "cuda" or kind == "full":
        return torch.float32
    with torch.cuda.device(device):
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float16


def mixed_dtype(device: torch.device, kind: Literal["lora", "full"]) -> torch.dtype | None:
    """Return the dtype of matrix products in mixed-precision training of all weights, or None if the training is not mixed.

    On a GPU with bfloat16 units, the training of all weights keeps float32 weights and computes products in bfloat16, which
    needs no loss scale (Micikevicius et al. 2018, arXiv 1710.03740). For LoRA the result is None: its frozen base already has
    the precision of `auto_dtype`.
    """
    return torch.bfloat16 if kind == "full" and auto_dtype(device, "lora") == torch.bfloat16 else None


def try_kernel(device: torch.device, dtype: torch.dtype) -> None:
    """Run a small matrix product on the device and wait for it.

    Raises:
        RuntimeError, AssertionError: the device does not exist, its driver does not fit, or torch has no kernels for it.
    """
    ones = torch.ones(SIDE, SIDE, device=device, dtype=dtype)
    product = float((ones @ ones).sum())  # reading it waits for the kernel
    if product != SIDE**3:
        raise RuntimeError(f"a matrix product on it is {product}, not {SIDE**3}")
