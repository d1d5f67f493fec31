"""Linear layers whose weights lie as a CPU's matrix kernels read them, for a frozen model that samples.

A decoding step multiplies few rows by all weights. Plain `torch.nn.functional.linear` brings each weight into its kernel's
order at every call; here oneDNN does so once. The sums are taken in another order, so logprobs differ by a rounding.
"""

from functools import partial

import torch
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16)


def packable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are such kernels: on a CPU, for float32 and bfloat16."""
    return device.type == "cpu" and dtype in DTYPES and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


@torch.no_grad()
def pack(model: nn.Module) -> None:
    """Has the model's linear layers use a packed copy of their present weights; to be called again when those change."""
    for module in model.modules():
        if type(module) is nn.Linear:  # a subclass computes something else
            packed = torch.ops.mkldnn._reorder_linear_weight(module.weight)
            module.forward = partial(_linear, packed, module.bias)  # type: ignore[method-assign]


def _linear(packed: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return product
