"""Products with weights that lie as a CPU's matrix kernels read them, for a frozen model that samples.

A decoding step multiplies few rows by all weights. Plain `torch.nn.functional.linear` brings each weight into its kernel's
order at every call; here oneDNN does so once. The sums are taken in another order, so logprobs differ by a rounding.

torch's operations for it are private, and what they need of the processor differs by dtype (bfloat16: AVX-512 or the like).
So each process tries them out, once per dtype, and multiplies plainly where they are missing, raise or give other numbers.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""The dtypes that are packed, and how far a product may be from the exact one, in units of its greatest entry."""

WORTH_PRODUCTS = 2_000_000
"""Below so many multiplications calling oneDNN takes longer than its product saves."""


def pack_weight(weight: Tensor, bias: Tensor | None) -> Product:
    """inputs (..., I) -> (..., O) for a weight (O, I) as it is now: packed where this machine can, else plain."""
    if not can_pack(weight.device, weight.dtype):
        return lambda inputs: functional.linear(inputs, weight, bias)
    fast = pack_with_onednn(weight, bias)
    outputs = len(weight)
    plain = weight if weight.numel() < WORTH_PRODUCTS else None

    def product(inputs: Tensor) -> Tensor:
        if plain is not None and inputs.numel() * outputs < WORTH_PRODUCTS:
            return functional.linear(inputs, plain, bias)
        return fast(inputs)

    return product


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights are packed there: on a CPU, in float32 and bfloat16, where this processor and this torch can."""
    return device.type == "cpu" and dtype in ROUNDING and not why_not_packed(dtype)


@cache
def why_not_packed(dtype: torch.dtype) -> str:
    """Why this process multiplies plainly in one of the dtypes of `ROUNDING`; empty where a packed product came out right."""
    draw = torch.Generator().manual_seed(0)
    weight, bias, inputs = (torch.randn(size, generator=draw).to(dtype) for size in ((80, 48), (80,), (7, 48)))
    exact = functional.linear(inputs.double(), weight.double(), bias.double())
    try:
        with torch.no_grad():
            product = pack_with_onednn(weight, bias)
            found = torch.cat([product(inputs), product(inputs[:1])])
            off = float((found.double() - torch.cat([exact, exact[:1]])).abs().max() / exact.abs().max())
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0].rpartition(": ")[2].rstrip(".") or type(error).__name__
    return "" if off <= ROUNDING[dtype] else f"a packed product is off by {off:.2g}"


def pack_with_onednn(weight: Tensor, bias: Tensor | None) -> Product:
    """The packed product itself; raises where oneDNN has none."""
    kept = torch.ops.mkldnn._reorder_linear_weight(weight)

    def product(inputs: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, kept, bias, "none", [], "")
        return result

    return product
