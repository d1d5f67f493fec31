"""The precision in which LoRA adapters compute: that of their base. The trained weights stay in float32.

PEFT keeps adapters in float32 and casts the input of each adapter to float32. If the base has 16 bits, these copies are a third
of the memory that an update needs for its backward pass. Here each matrix product casts the adapter instead, which is small. So
layers with the same input share that input, without copies.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class CastLinear(nn.Linear):
    """A linear layer without a bias that computes in the precision of its input.

    The gradient of the weight has the precision of the weight.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the product (..., out) of the input (..., in)."""
        return functional.linear(input, self.weight.to(input.dtype))


def cast_adapters_down(model: Any) -> None:
    """Make the LoRA adapters of a PEFT model compute in their input's precision.

    If both precisions are the same, nothing changes.
    """
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.cast_input_dtype_enabled = False
            for adapters in (layer.lora_A, layer.lora_B):
                for name, plain in adapters.items():
                    adapters[name] = _cast_linear(plain)


def _cast_linear(plain: Any) -> CastLinear:
    """Return a `CastLinear` that shares the layer's weight."""
    layer = CastLinear(plain.in_features, plain.out_features, bias=False, device="meta")
    layer.weight = plain.weight
    return layer
