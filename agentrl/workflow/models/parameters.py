"""The number of a model's parameters and of those that train, from a module or from a model's files. For files, neither weights
nor torch are loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.errors import ModelError
from agentrl.workflow.models.headers import ModelFiles, read_model_files
from agentrl.workflow.models.lookup import lora_rank
from agentrl.workflow.models.lora_targets import LoraLayers, adapted_shapes

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Parameters:
    """The number of a model's parameters, and of those that train."""

    trainable: int
    all: int

    def __str__(self) -> str:
        share = 100 * self.trainable / self.all
        return f"trainable params: {self.trainable:,} || all params: {self.all:,} || trainable%: {share:.4f}"


def count_trained(base: int, rank: int, layers: LoraLayers | None) -> Parameters:
    """Count the parameters of a base with LoRA adapters, and those that train.

    Args:
        base: the number of the base's parameters.
        rank: the rank of the adapters.
        layers: the layers with an adapter; without layers all parameters train.
    """
    adapters = rank * layers.width if layers else 0
    return Parameters(adapters or base, base + adapters)


def count_parameters(module: "nn.Module") -> Parameters:
    """Count a module's parameters and those that train.

    A quantised layer counts with its number of parameters before quantisation. The sampler's adapter is left out.
    """
    sizes = [(_size(p), p.requires_grad) for name, p in module.named_parameters() if ".sampler." not in name]
    return Parameters(sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes))


def _size(parameter: "nn.Parameter") -> int:
    quantised = getattr(parameter, "quant_state", None)
    return int(prod(quantised.shape)) if quantised is not None else parameter.numel()


def count_in_files(config: ModelConfig, folder: Path) -> Parameters | None:
    """Count the parameters of the model in the folder from the headers of its files. Return None if they cannot be counted."""
    try:
        return count_in_headers(read_model_files(folder), lora_rank(config, folder), config.lora_targets)
    except ModelError:  # loading it reports the error
        return None


def count_in_headers(files: ModelFiles, rank: int, targets: Sequence[str]) -> Parameters | None:
    """Count the parameters from the headers. Return None if the files list no weights, or if the base is stored quantised.

    The headers of a quantised base have only the shapes of the packed numbers.

    Args:
        rank: the rank of LoRA; 0 trains all weights.
        targets: the layers that LoRA trains.
    """
    if "quantization_config" in files.config:
        return None
    shapes = files.shapes
    if files.config.get("tie_word_embeddings") is True and any(name.endswith("embed_tokens.weight") for name in shapes):
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    whole = sum(map(prod, shapes.values()))
    if not whole:
        return None
    if not rank:
        return Parameters(whole, whole)
    vocabulary = files.config.get("text_config", files.config).get("vocab_size")
    lora = sum(rank * sum(shape) for shape in adapted_shapes(shapes, targets, vocabulary))
    return Parameters(lora, whole + lora)
