"""An estimate of an iteration's memory, in bytes by part, from a model's files. No weights are loaded.

The estimate includes neither the memory of the libraries (CUDA and cuBLAS: 0.5 to 1 GiB) nor gaps between the parts.
`tests/models/test_memory_estimate.py` checks the parts against a loaded model and against the tensors that autograd saves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from agentrl.workflow.config import ALL_LINEAR, RunConfig
from agentrl.workflow.models.headers import ModelFiles, Shapes
from agentrl.workflow.models.lora_targets import adapted_shapes

FLOAT = 4
"""The bytes of a float32."""
LENGTH_STEP = 256
"""The multiple of tokens by which the cache of keys and values grows on a GPU. Each growth copies it and ends CUDA graphs."""
HEAD_CHUNK = 2**23
"""The number of logits in memory at once in an update: 32 MB in float32."""
COPY_LIMIT = 250_000_000
"""The number of parameters below which the sampler of a fully trained model stores its weights twice.

The sampler stores its weights as modules, and a packed copy for its forward pass. The packed copy is then the sixth tensor of
this size: the others are the modules, the trained copy, its gradient and two moments.
"""

MICROBATCH_TOKENS = 1536
"""The tokens of a microbatch if neither the config nor a GPU's memory decides."""
FREE_SHARE = 0.8
"""The share of a GPU's free memory that a microbatch may take. The rest is for gaps, which the estimate does not include."""

RECURRENT_SIZES = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
)
"""The config keys with the sizes of a layer's recurrent state: gated delta nets (Qwen3.5), Mamba 2 (Granite 4, Falcon-H1)."""

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError)
"""The exceptions that reading sizes from a config raises if they are missing or invalid."""

MAX_BYTES = 2**60
"""The number of bytes from which on an estimate is treated as invalid."""

Parts = Mapping[str, int]
"""The bytes of memory, by a description of their use."""


@dataclass(frozen=True)
class Shape:
    """The sizes that decide how much memory is needed.

    Args:
        config: the object in the model's `config.json`; in a model with several parts, that of the text model.
        weights: the shapes of all weights.
        rank: the rank of the LoRA adapters; 0 trains all weights.
        element: bytes per number in the model's computation: 4 on a CPU, 2 on a GPU, 8 with `numerics: exact`.
        bits: bits per stored weight of quantised projections; 0: not quantised.
        targets: the layers that have an adapter.
        mixed: whether float32 weights train with matrix products in 16 bits.
    """

    config: Mapping[str, Any]
    weights: Shapes
    rank: int
    element: int
    bits: int = 0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    mixed: bool = False

    @cached_property
    def hidden(self) -> int:
        """The width of the hidden states."""
        return int(self.config["hidden_size"])

    @cached_property
    def layers(self) -> int:
        """The number of decoder layers."""
        return int(self.config["num_hidden_layers"])

    @cached_property
    def heads(self) -> int:
        """The number of query heads of a layer."""
        return int(self.config["num_attention_heads"])

    @cached_property
    def head_width(self) -> int:
        """The width of one head."""
        return int(self.config.get("head_dim") or self.hidden // self.heads)

    @cached_property
    def keys(self) -> int:
        """The width of the keys of one layer, over all of its key heads."""
        return self.head_width * int(self.config.get("num_key_value_heads") or self.heads)

    @cached_property
    def attention_layers(self) -> int:
        """The number of layers that keep keys and values: all except convolutions, Mamba and linear attention."""
        kinds: Sequence[str] = self.config.get("layer_types") or ()
        return self.layers - sum(kind == "linear_attention" or "attention" not in kind for kind in kinds)

    @cached_property
    def convolution_states(self) -> int:
        """The number of values per row that all layers store for their convolutions: the inputs of each kernel (channels, 1,
        width).
        """
        return sum(prod(shape) for name, shape in self.weights.items() if len(shape) == 3 and shape[1] == 1 and "conv" in name)

    @cached_property
    def recurrent_states(self) -> int:
        """The number of float32 values per row that all layers of linear attention or Mamba store as states."""
        layers = sum(name.endswith("conv1d.weight") for name in self.weights)
        names = next((names for names in RECURRENT_SIZES if names[0] in self.config), ())
        return layers * prod(int(self.config[name]) for name in names) if names else 0

    @cached_property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return int(self.config["vocab_size"])

    @cached_property
    def base(self) -> int:
        """The number of weights in the projections: matrices that are neither the embedding nor the head."""
        return sum(prod(shape) for shape in self.weights.values() if len(shape) == 2 and self.vocabulary not in shape)

    @cached_property
    def embeddings(self) -> int:
        """The number of weights of the embedding, plus those of the head if it does not share them."""
        sizes = {name: prod(shape) for name, shape in self.weights.items() if len(shape) == 2 and self.vocabulary in shape}
        if self.config.get("tie_word_embeddings", False):
            sizes = {name: size for name, size in sizes.items() if not name.endswith("lm_head.weight")} or sizes
        return sum(sizes.values())

    @cached_property
    def small(self) -> int:
        """The number of weights in biases and norms."""
        return sum(prod(shape) for shape in self.weights.values() if len(shape) != 2)

    @cached_property
    def adapted(self) -> list[tuple[int, ...]]:
        """The shapes of the layers that have an adapter."""
        return adapted_shapes(self.weights, self.targets, self.vocabulary)

    @property
    def lora(self) -> int:
        """The number of weights of one adapter, over all its layers."""
        return sum(self.rank * sum(shape) for shape in self.adapted)

    @property
    def all(self) -> int:
        """The number of weights of the model without adapters."""
        return self.base + self.embeddings + self.small

    @cached_property
    def kept(self) -> int:
        """The bytes per token that one layer stores for its backward pass.

        The layer stores the inputs of both norms and all projections, query, keys, values, attention's result, gate, its SiLU,
        and up, and the adapters' intermediate values. A norm stores its input in float32. In mixed precision, a norm stores its
        output too, and each of five projections has its own copy.
        """
        inner = int(self.config.get("intermediate_size") or 4 * self.hidden)
        adapters = len(self.adapted) // self.layers if self.rank else 0
        norms, copies = (4, 5) if self.mixed else (2, 2)
        states = copies * self.hidden + 2 * self.heads * self.head_width + 2 * self.keys + 4 * inner + adapters * self.rank
        return FLOAT * (norms * self.hidden + self.heads + 2) + self.element * states

    def activations(self, tokens: int, checkpointing: bool) -> int:
        """Return the bytes that all layers store for the backward pass of `tokens` tokens.

        With checkpointing these are only the inputs of the layers. Otherwise they include the weights that are cast to the
        precision of the matrix products.
        """
        if checkpointing:
            return tokens * self.layers * (FLOAT if self.mixed else self.element) * self.hidden
        cast = self.base if self.mixed else self.lora if self.element < FLOAT else 0
        return tokens * self.layers * self.kept + self.element * cast

    def at_work(self, tokens: int, checkpointing: bool) -> int:
        """Return the bytes that the backward pass of one layer needs: its largest gradients, one complete weight, and its
        activations.

        The activations are included only with checkpointing, because the layer then computes them again.
        """
        inner = int(self.config.get("intermediate_size") or 4 * self.hidden)
        gradients = FLOAT * (self.hidden + 3 * inner)
        weight = self.element * self.hidden * inner
        return tokens * (gradients + (self.kept if checkpointing else 0)) + weight


def always(shape: Shape) -> Parts:
    """Return the bytes that are held as long as the model is loaded, by part."""
    if not shape.rank:
        packed = shape.all < COPY_LIMIT
        return {"trained weights in float32": FLOAT * shape.all, "the sampler's": (1 + packed) * shape.element * shape.all}
    return {
        **_projections(shape),
        "embeddings and head": shape.element * shape.embeddings,
        "biases and norms": shape.element * shape.small,
        "LoRA in float32: trained, published, initial": 3 * FLOAT * shape.lora,
    }


def _projections(shape: Shape) -> Parts:
    if not shape.bits:
        return {"weights": shape.element * shape.base}
    if shape.bits == 8:
        return {"8-bit weights": shape.base}
    blocks = shape.base // 64
    return {
        "4-bit weights": shape.base // 2,
        "their scales: a byte for 64 weights, 4 for 256 of those": blocks + blocks // 256 * FLOAT,
    }


def cache_length(tokens: int, on_gpu: bool) -> int:
    """Return the number of tokens for which the cache of keys and values has room, if its longest row has `tokens` tokens."""
    step = LENGTH_STEP if on_gpu else LENGTH_STEP // 2
    return -(-tokens // step) * step


def while_sampling(shape: Shape, rows: int, tokens: int, on_gpu: bool) -> Parts:
    """Return the bytes needed to sample `rows` rows of up to `tokens` tokens, by part.

    The number of slots is a power of two. Layers with a sliding window store the keys of all tokens too, and mask them.
    """
    length, slots = cache_length(tokens, on_gpu), 1 << (rows - 1).bit_length()
    states = shape.element * shape.convolution_states + FLOAT * shape.recurrent_states
    return {
        f"keys and values of {slots} x {length} tokens": 2
        * shape.attention_layers
        * shape.keys
        * slots
        * length
        * shape.element,
        **({f"states of {slots} rows": slots * states} if states else {}),
        "logits of a token, and their weights in float32": rows * shape.vocabulary * (shape.element + FLOAT),
    }


def while_updating(shape: Shape, tokens: int, checkpointing: bool) -> Parts:
    """Return the bytes that each part of an update needs, with microbatches of `tokens` tokens."""
    trained = shape.lora if shape.rank else shape.all
    return {
        "gradients": FLOAT * trained,
        "AdamW's moments": 2 * FLOAT * trained,
        f"activations of {tokens} tokens": shape.activations(tokens, checkpointing),
        **({"the head in 16 bits": shape.element * shape.vocabulary * shape.hidden} if shape.mixed else {}),
        "the layer at work": shape.at_work(tokens, checkpointing),
        "a chunk of logits, and their exponentials": 2 * FLOAT * HEAD_CHUNK,
    }


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The bytes that one process needs to sample and train.

    Args:
        always: the bytes that are held as long as the model is loaded.
        sampling: the additional bytes while it samples.
        update: the additional bytes while it updates.
        rows: the number of rows that are sampled at once.
        tokens: the number of tokens of each of these rows.
    """

    always: int
    sampling: int
    update: int
    rows: int
    tokens: int

    @property
    def peak(self) -> int:
        """The peak memory, in bytes: `always` plus the larger of the two stages."""
        return self.always + max(self.sampling, self.update)

    def __str__(self) -> str:
        model, sampling, update = (f"{size / 2**30:.1f}" for size in (self.always, self.sampling, self.update))
        stages = f"sampling {self.rows} x {self.tokens:,} tokens {sampling}, update {update}"
        return f"{self.peak / 2**30:.1f} GiB: model {model}, plus the larger of {stages}"


def estimate_memory(config: RunConfig, files: ModelFiles, rank: int, slots: int, on_gpu: bool) -> MemoryEstimate | None:
    """Estimate a run's memory. Return None if the model's config.json lacks the sizes.

    Args:
        rank: the rank of the LoRA adapters; 0 trains all weights.
        slots: the most rows that are sampled at once.
        on_gpu: whether the workers compute on a GPU.
    """
    rollout, update = config.rollout, config.update
    shape = shape_of(config, files, rank, on_gpu)
    rows = min(slots, rollout.group_size * rollout.tasks_per_iteration)
    try:
        window = int(shape.config.get("max_position_embeddings") or 2**31)
        tokens = min(window, rollout.max_steps * rollout.max_new_tokens)
        stages = [
            always(shape),
            while_sampling(shape, rows, tokens, on_gpu),
            while_updating(shape, update.microbatch_tokens or MICROBATCH_TOKENS, update.gradient_checkpointing),
        ]
    except MALFORMED:
        return None
    reference = FLOAT * shape.all if config.algorithm.kl_coef and not rank else 0
    model_bytes, sampling, updating = (sum(parts.values()) for parts in stages)
    if not all(0 <= size < MAX_BYTES for size in (model_bytes, sampling, updating)):  # the config is not of a real model
        return None
    return MemoryEstimate(model_bytes + reference, sampling, updating, rows, tokens)


def shape_of(config: RunConfig, files: ModelFiles, rank: int, on_gpu: bool) -> Shape:
    """Return the model's sizes from which a run's memory is estimated. For the arguments see `estimate_memory`."""
    model = config.model
    bits = 4 if model.load_in_4bit else 8 if model.load_in_8bit else 0
    text = files.config.get("text_config", files.config)
    mixed = on_gpu and not rank and model.dtype == "auto" and model.numerics != "exact"
    element = FLOAT // 2 if mixed else _element(config, rank, on_gpu)
    return Shape(text, files.shapes, rank, element, bits, tuple(model.lora_targets), mixed)


def microbatch_that_fits(shape: Shape, free: int, checkpointing: bool) -> int:
    """Return the tokens of the largest microbatch whose update takes at most `FREE_SHARE` of the `free` bytes.

    The number is a multiple of 64 between 256 and 16,384. If the model's config lacks the sizes, it is `MICROBATCH_TOKENS`.
    """
    try:
        fixed, with_one = (sum(while_updating(shape, tokens, checkpointing).values()) for tokens in (0, 1))
        fit = int(FREE_SHARE * free - fixed) // (with_one - fixed)
    except MALFORMED:
        return MICROBATCH_TOKENS
    return min(max(fit // 64 * 64, 256), 16_384)


def _element(config: RunConfig, rank: int, on_gpu: bool) -> int:
    if config.model.numerics == "exact":
        return 2 * FLOAT
    if config.model.dtype != "auto":
        return FLOAT if config.model.dtype == "float32" else FLOAT // 2
    return FLOAT // 2 if on_gpu and rank else FLOAT
