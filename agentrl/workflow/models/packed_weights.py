"""Products with weights packed in the layout of a CPU's matrix kernels, for a frozen model that samples.

A decoding step multiplies few rows by all weights. Plain `torch.nn.functional.linear` packs each weight at every call; here
oneDNN does so once. The order of sums differs, so logprobs differ by a rounding.

torch's operations for this are private, and the processor features they need differ by dtype (bfloat16: AVX-512 or the like).
So each process tries them out, once per dtype, and multiplies plainly if they are missing, raise or give other numbers.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""The dtypes that are packed -> the largest error of a product, relative to its greatest entry."""

WORTH_PRODUCTS = 2_000_000
"""Below this many multiplications the call of oneDNN takes longer than its product saves."""


def pack_weight(weight: Tensor, bias: Tensor | None) -> Product:
    """inputs (..., I) -> (..., O) for the present values of a weight (O, I): packed if this machine can, else plain."""
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
    """Return whether weights are packed: on a CPU, in float32 or bfloat16, if this processor and this torch can."""
    return device.type == "cpu" and dtype in ROUNDING and not why_not_packed(dtype)


@cache
def why_not_packed(dtype: torch.dtype) -> str:
    """Return the reason why this process does not pack a dtype of `ROUNDING`; empty if a packed product was right."""
    draw = torch.Generator().manual_seed(0)
    weight, bias, inputs = (torch.randn(size, generator=draw).to(dtype) for size in ((80, 48), (80,), (7, 48)))
    exact = functional.linear(inputs.double(), weight.double(), bias.double())
    try:
        with torch.no_grad():
            product = pack_with_onednn(weight, bias)
            outputs = torch.cat([product(inputs), product(inputs[:1])])
            off = float((outputs.double() - torch.cat([exact, exact[:1]])).abs().max() / exact.abs().max())
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0].rpartition(": ")[2].rstrip(".") or type(error).__name__
    return "" if off <= ROUNDING[dtype] else f"a packed product is off by {off:.2g}"


def pack_with_onednn(weight: Tensor, bias: Tensor | None) -> Product:
    """Return the packed product itself; raises if oneDNN has none."""
    packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def product(inputs: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed_weight, bias, "none", [], "")
        return result

    return product
