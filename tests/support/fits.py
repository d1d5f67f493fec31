"""The table "What fits" of docs/models.md, computed from the shapes of three models."""

from collections.abc import Iterator

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from agentrl.workflow.models.memory_estimate import (
    FREE_SHARE,
    Parts,
    Shape,
    always,
    microbatch_that_fits,
    while_sampling,
    while_updating,
)
from bench.performance.models import HALF_BILLION, shape_of

MODELS: dict[str, PretrainedConfig] = {
    "Qwen2.5-0.5B": HALF_BILLION,
    "SmolLM2-1.7B": LlamaConfig(
        vocab_size=49_152,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=32,
        tie_word_embeddings=True,
    ),
    "Qwen3-4B": Qwen3Config(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
}
CARDS = (4, 8, 12, 24)
"""GB of memory."""
OF_CUDA = 2**30
"""Bytes that CUDA and cuBLAS take for themselves: 0.95 GiB on an H200 (docs/measurements.md)."""
ROWS, TOKENS, RANK = 32, 1024, 8


def table() -> Iterator[str]:
    """The lines of the table, in Markdown."""
    cards = " | ".join(f"{card} GB" for card in CARDS)
    yield f"| model | base | model and adapters | {cards} |"
    yield "|---|---|---|" + "---|" * len(CARDS)
    for name, config in MODELS.items():
        for base, bits in (("bfloat16", 0), ("4-bit", 4)):
            shape = shape_of(config, RANK, 2, bits)
            held = sum(always(shape).values())
            cells = [_cell(shape, card * 10**9 - OF_CUDA - held) for card in CARDS]
            yield f"| {name} | {base} | {held / 2**30:.1f} GiB | {' | '.join(cells)} |"


def _cell(shape: Shape, free: int) -> str:
    def fits(parts: Parts) -> bool:
        return sum(parts.values()) <= FREE_SHARE * free

    rows = max((count for count in range(1, ROWS + 1) if fits(while_sampling(shape, count, TOKENS, on_gpu=True))), default=0)
    sizes = []
    for checkpointing in (False, True):
        tokens = microbatch_that_fits(shape, free, checkpointing)
        sizes.append(f"{tokens:,}" if fits(while_updating(shape, tokens, checkpointing)) else "no")
    return f"{rows} rows; {sizes[0]} ({sizes[1]})" if rows and sizes[1] != "no" else "no"
