"""Products with weights that lie as a CPU's matrix kernels read them, for a frozen model that samples.

A decoding step multiplies few rows by all weights. Plain `torch.nn.functional.linear` brings each weight into its kernel's
order at every call; here oneDNN does so once. The sums are taken in another order, so logprobs differ by a rounding.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

DTYPES = (torch.float32, torch.bfloat16)

WORTH = 2_000_000
"""Below so many multiplications calling oneDNN takes longer than its product saves."""


def packed(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """inputs (..., I) -> (..., O) for a weight (O, I) as it is now: packed on a CPU in float32 and bfloat16, else plain."""
    if not packable(weight.device, weight.dtype):
        return lambda inputs: functional.linear(inputs, weight, bias)
    kept = torch.ops.mkldnn._reorder_linear_weight(weight)
    outputs = len(weight)
    plain = weight if weight.numel() < WORTH else None

    def product(inputs: Tensor) -> Tensor:
        if plain is not None and inputs.numel() * outputs < WORTH:
            return functional.linear(inputs, plain, bias)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, kept, bias, "none", [], "")
        return result

    return product


def packable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are such kernels: on a CPU, for float32 and bfloat16."""
    return device.type == "cpu" and dtype in DTYPES and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
