"""Matrix products with weights that are packed in the layout of a CPU's kernels, for a frozen model that samples.

A decoding step multiplies few rows by all weights. `torch.nn.functional.linear` packs each weight at every call; here oneDNN
packs it once. The order of sums differs, so logprobs differ by rounding.

torch's operations for this are private, and the processor features that they need depend on the dtype (bfloat16: AVX-512 or
similar). So each process tests the operations once per dtype, and uses plain products if the operations are missing, raise an
exception or return wrong numbers.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""The dtypes that can be packed. The value is the largest allowed error of a product, relative to its largest entry."""

WORTH_PRODUCTS = 2_000_000
"""The number of multiplications in a product below which calling oneDNN costs more time than packing saves."""


def pack_weight(weight: Tensor, bias: Tensor | None) -> Product:
    """Return a function from inputs (..., I) to outputs (..., O) that multiplies by a weight (O, I).

    The function uses the values that the weight has now. The weight is packed if this machine can do so.
    """
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
    """Return True if weights are packed.

    This requires a CPU, float32 or bfloat16, and support by this processor and this torch.
    """
    return device.type == "cpu" and dtype in ROUNDING and not why_not_packed(dtype)


@cache
def why_not_packed(dtype: torch.dtype) -> str:
    """Return why this process does not pack weights of this dtype, which is one of `ROUNDING`. Empty if it packs them, because
    the test product was right.
    """
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
    """Return the packed product. Raise an exception if oneDNN or this version of torch does not support it."""
    packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def product(inputs: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed_weight, bias, "none", [], "")
        return result

    return product
