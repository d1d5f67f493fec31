"""The cost of an update: the peak of GPU memory, the floating-point operations per second, and their share of the GPU's peak
rate.
"""

import re
from collections.abc import Sequence

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from agentrl.workflow.models.logprobs import causal_model
from agentrl.workflow.training.training_rows import Row

PEAK_TFLOPS = {
    "A100": 312.0, "A40": 149.7, "A10": 125.0, "H100 PCIe": 756.5, "H100 80GB HBM3": 989.5, "H200": 989.5,
    "L40S": 362.0, "L4": 121.0, "T4": 65.0, "V100-SXM2": 125.0, "V100-PCIE": 112.0,
}  # fmt: skip
"""The peak TFLOP/s of dense matrix products in bfloat16 or float16, from NVIDIA's data sheets, by the card's name in CUDA.

The data sheets of H100, H200, L40S and L4 print the rate with sparsity, which is twice as high.
"""
HALVES = (torch.bfloat16, torch.float16)


class UpdateCost:
    """A meter of an update's cost. Call `begin`, then `add` for every input of the model, then `metrics`."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._flops = 0.0
        causal = causal_model(module)
        config, head = causal.config.get_text_config(), causal.get_output_embeddings()  # type: ignore[no-untyped-call]
        layers = [m for name, m in module.named_modules() if isinstance(m, nn.Linear | Conv1D) and _is_used(name, m, head)]
        self._trained = sum(_size(layer) for layer in layers if layer.weight.requires_grad)
        self._frozen = sum(_size(layer) for layer in layers) - self._trained
        self._head, self._head_trains = _size(head), head.weight.requires_grad
        heads, width = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
        if type(heads) is int and heads > 0:
            width = heads * (width if type(width) is int else config.hidden_size // heads)
            self._attention = config.num_hidden_layers * width
        else:
            self._attention = 0
        # Not known: experts, three-dimensional weights of which a token uses a few, and models without such attention.
        self._is_known = self._attention > 0 and all(parameter.ndim < 3 for parameter in module.parameters())
        self._dtype = head.weight.dtype

    def begin(self) -> None:
        """Reset the counters."""
        self._flops = 0.0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def add(self, rows: Sequence[Row], shares: bool, learns: bool) -> None:
        """Count the operations of one forward pass, and of the backward pass if `learns`.

        In the forward pass, a token takes 2 operations for each weight of a matrix product. In the backward pass it takes 2 for
        each weight that the gradient passes through, and 2 for each weight that trains (Kaplan et al. 2020, arXiv 2001.08361,
        table 1). For each layer, channel and token that it attends to, attention takes 4 operations in the forward and 8 in the
        backward pass (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). Unlike there, a token attends only to itself and
        earlier tokens. `shares` says whether common beginnings of rows are read once. `learns` says whether there is a backward
        pass.
        """
        starts = [row.prefix if shares else 0 for row in rows]
        beginnings = {row.input_ids[: row.prefix] for row in rows} if shares else set()
        tokens = sum(map(len, beginnings)) + sum(len(row.input_ids) - start for row, start in zip(rows, starts, strict=True))
        attended = sum(_pairs(len(beginning)) for beginning in beginnings)
        attended += sum(_pairs(len(row.input_ids)) - _pairs(start) for row, start in zip(rows, starts, strict=True))
        scored = sum(sum(row.loss_mask) for row in rows)
        body, head = self._trained + self._frozen, self._head
        self._flops += 2 * body * tokens + 2 * head * scored + 4 * self._attention * attended
        if learns:
            self._flops += (2 * body + 2 * self._trained) * tokens + 8 * self._attention * attended
            self._flops += (2 + 2 * self._head_trains) * head * scored

    def metrics(self, seconds: float) -> dict[str, float]:
        """Return the metrics of the cost.

        They are `tflops` (10**12 operations per second), on a GPU `peak_memory_bytes`, and `mfu` if the GPU's peak is known.
        `mfu`, the model FLOPs utilisation, is the share of the peak in half precision. For float32 no peak is known.
        """
        metrics = {"tflops": self._flops / seconds / 1e12} if self._is_known and seconds else {}
        if self._device.type == "cuda":
            metrics["peak_memory_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
            peak = find_peak(torch.cuda.get_device_name(self._device)) if self._dtype in HALVES else None
            if peak is not None and "tflops" in metrics:
                metrics["mfu"] = metrics["tflops"] / peak
        return metrics


def find_peak(card: str) -> float | None:
    """Return the card's peak TFLOP/s in half precision; None if it is unknown."""
    model = re.sub(r"^(NVIDIA|Tesla) ", "", card)
    matches = [
        name for name in PEAK_TFLOPS if re.fullmatch(rf"{re.escape(name)}([ -](SXM|PCI|\d+ ?GB).*)?", model, re.IGNORECASE)
    ]
    return PEAK_TFLOPS[matches[0]] if matches else None


def _is_used(name: str, layer: nn.Module, head: nn.Module) -> bool:
    """Return True if an update computes with the layer: not the sampler's adapter, not the head."""
    return layer is not head and "sampler" not in name.split(".")


def _size(layer: nn.Module) -> int:
    """Return the number of weights of a layer, also if they are packed into 4 bits."""
    return layer.in_features * layer.out_features if isinstance(layer, nn.Linear) else layer.weight.numel()  # type: ignore[operator]


def _pairs(tokens: int) -> int:
    """Return the number of pairs (token, attended token); a token attends to itself and all earlier ones."""
    return tokens * (tokens + 1) // 2
