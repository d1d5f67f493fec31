"""Counts a model's parameters and those that train: in a module, or in files, without loading them or torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.errors import ModelError
from agentrl.workflow.models.lookup import lora_rank

if TYPE_CHECKING:
    from torch import nn

LARGEST_CONFIG = 1 << 20
"""The most bytes read of a model's config.json."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The number of a model's parameters, and of those that train."""

    trainable: int
    all: int

    def __str__(self) -> str:
        share = 100 * self.trainable / self.all
        return f"trainable params: {self.trainable:,} || all params: {self.all:,} || trainable%: {share:.4f}"


def count_parameters(module: "nn.Module") -> Parameters:
    """Counts a module's parameters: quantised layers at their original size, the sampler's adapter left out."""
    sizes = [(_size(p), p.requires_grad) for name, p in module.named_parameters() if ".sampler." not in name]
    return Parameters(sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes))


def _size(parameter: "nn.Parameter") -> int:
    quantised = getattr(parameter, "quant_state", None)
    return int(prod(quantised.shape)) if quantised is not None else parameter.numel()


def count_in_files(config: ModelConfig, folder: Path) -> Parameters | None:
    """Counts the parameters of the model in the folder by the headers of its files; None if they do not say."""
    try:
        with (folder / "config.json").open("rb") as file:
            told = json.loads(file.read(LARGEST_CONFIG))
        shapes = _shapes(folder)
        rank = lora_rank(config, folder)
    except (OSError, ValueError, RecursionError, SafetensorError, ModelError):  # loading it reports the error
        return None
    if not isinstance(told, dict) or "quantization_config" in told or not shapes:
        return None
    if told.get("tie_word_embeddings") is True and any(name.endswith("embed_tokens.weight") for name in shapes):
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    whole = sum(map(prod, shapes.values()))
    if not rank:
        return Parameters(whole, whole)
    ends = tuple(f".{target}.weight" for target in config.lora_targets)
    lora = sum(rank * sum(shape) for name, shape in shapes.items() if name.endswith(ends) and len(shape) == 2)
    return Parameters(lora, whole + lora)


def _shapes(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Name -> shape of each weight."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118 - no dict
    return shapes
