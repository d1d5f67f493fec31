"""What an iteration of a model with LoRA takes by its shape, in 4 bits or as it is: bytes, part by part.

What the libraries take for themselves, and what lies free between the parts, is not in here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from transformers import Qwen2Config

from agentrl.workflow.inference.kv_cache import LENGTH_STEP
from agentrl.workflow.models.lm_head import CHUNK

FLOAT = 4

Parts = Mapping[str, int]
"""Bytes, by what takes them."""


@dataclass(frozen=True)
class Shape:
    """What decides how much memory is taken.

    Args:
        config: the model's.
        rank: of the adapters.
        element: bytes of a number that the model computes with: 4 on a CPU, 2 on a GPU.
        quantised: whether the projections' weights are kept in 4 bits, or as the model computes.
    """

    config: Qwen2Config
    rank: int
    element: int
    quantised: bool = True

    @property
    def keys(self) -> int:
        """Width of a layer's keys."""
        heads = self.config.num_attention_heads
        return self.config.hidden_size // heads * (self.config.num_key_value_heads or heads)

    @property
    def projections(self) -> list[tuple[int, int]]:
        """(out, in) of a layer's: q, k, v, o, gate, up, down."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return [(hidden, hidden), *2 * [(self.keys, hidden)], (hidden, hidden), *2 * [(inner, hidden)], (hidden, inner)]

    @property
    def base(self) -> int:
        """Weights in the projections."""
        return self.config.num_hidden_layers * sum(out * into for out, into in self.projections)

    @property
    def lora(self) -> int:
        """Weights of one adapter."""
        return self.config.num_hidden_layers * sum(self.rank * (out + into) for out, into in self.projections)

    @property
    def embeddings(self) -> int:
        """Weights that are also the head's."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def small(self) -> int:
        """Biases of q, k and v, and norms."""
        hidden = self.config.hidden_size
        return self.config.num_hidden_layers * (3 * hidden + 2 * self.keys) + hidden

    @cached_property
    def kept(self) -> int:
        """Bytes per token that one layer keeps for its backward pass.

        What both norms and all projections read, query, keys, values, attention's result, gate, its SiLU, and up. Norms and
        adapters keep what they read in float32; where the model computes in less, each adapter has a copy of its own.
        """
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        states = 2 * hidden + 2 * self.keys + 3 * inner
        read = (4 if self.element == FLOAT else 8) * hidden + inner
        small = 7 * self.rank + self.config.num_attention_heads + 2
        return FLOAT * (read + small) + self.element * states

    def activations(self, tokens: int, checkpointing: bool) -> int:
        """Bytes that all layers keep for the backward pass; with checkpointing only what they read."""
        kept = self.element * self.config.hidden_size if checkpointing else self.kept
        return tokens * self.config.num_hidden_layers * kept

    def at_work(self, tokens: int, checkpointing: bool) -> int:
        """Bytes for one layer's backward pass: its widest gradients and a whole weight, and what it keeps if made again."""
        gradients = FLOAT * (self.config.hidden_size + 3 * self.config.intermediate_size)
        weight = self.element * self.config.hidden_size * self.config.intermediate_size
        return tokens * (gradients + (self.kept if checkpointing else 0)) + weight


def always(shape: Shape) -> Parts:
    """As long as the model is loaded."""
    blocks = shape.base // 64
    packed = {
        "4-bit weights": shape.base // 2,
        "their scales: a byte for 64 weights, 4 for 256 of those": blocks + blocks // 256 * FLOAT,
    }
    return {
        **(packed if shape.quantised else {"weights": shape.element * shape.base}),
        "embeddings, which are the head": shape.element * shape.embeddings,
        "biases and norms": shape.element * shape.small,
        "LoRA in float32: trained, published, initial": 3 * FLOAT * shape.lora,
    }


def while_sampling(shape: Shape, rows: int, tokens: int) -> Parts:
    """While so many rows are sampled, up to so many tokens each."""
    length = -(-tokens // LENGTH_STEP) * LENGTH_STEP
    values = 2 * shape.config.num_hidden_layers * shape.keys
    return {
        f"keys and values of {rows} x {length} tokens": values * rows * length * shape.element,
        "logits of a token, and their weights in float32": rows * shape.config.vocab_size * (shape.element + FLOAT),
    }


def while_updating(shape: Shape, tokens: int, checkpointing: bool) -> Parts:
    """During an update in microbatches of so many tokens."""
    return {
        "LoRA's gradients": FLOAT * shape.lora,
        "AdamW's moments": 2 * FLOAT * shape.lora,
        f"activations of {tokens} tokens": shape.activations(tokens, checkpointing),
        "the layer at work": shape.at_work(tokens, checkpointing),
        "a chunk of logits, and their exponentials": 2 * FLOAT * CHUNK,
    }
