"""The table "What fits" of docs/models.md, computed from the shapes of three models."""

from collections.abc import Iterator

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from agentrl.workflow.models.memory_estimate import FREE_SHARE, always, microbatch_that_fits, while_sampling
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
OF_CUDA = 2**29
"""Bytes that CUDA takes for itself, about."""
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
            row = sum(while_sampling(shape, 1, TOKENS).values())
            cells = []
            for card in CARDS:
                free = card * 10**9 - OF_CUDA - held
                rows = min(ROWS, int(FREE_SHARE * free / row))
                plain, again = (microbatch_that_fits(shape, free, checkpointing) for checkpointing in (False, True))
                cells.append(f"{rows} rows; {plain:,} ({again:,})" if rows > 0 and again > 256 else "no")
            yield f"| {name} | {base} | {held / 2**30:.1f} GiB | {' | '.join(cells)} |"
