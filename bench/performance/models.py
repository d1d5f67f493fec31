"""Models with random weights that both sides of a comparison load from one folder in the hub's format.

Qwen2's architecture with the tiny model's tokenizer and chat template. `tiny` is 4 layers of 128, about 1M parameters;
`bench` is 8 layers of 512 with grouped-query attention and 32,768 tokens, 41M parameters: its tokenizer is padded with
tokens that no text has, so that whatever is sampled can be decoded. `half_billion` has the shape of Qwen2-0.5B and is kept in
bfloat16, as the hub has it; only the tiny tokenizer's few ids have a text.
"""

from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from agentrl.workflow.datasets.arithmetic import arithmetic
from agentrl.workflow.models.memory_estimate import Shape
from agentrl.workflow.models.tiny import save_tiny, tiny_model, tiny_tokenizer
from agentrl.workflow.training.supervised import demonstrations, texts_of

ModelName = Literal["tiny", "bench"]
DEMONSTRATIONS = 200
LAYERS, WIDTH, VOCABULARY, CONTEXT = 8, 512, 32768, 2048

HALF_BILLION = Qwen2Config(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=0,
)
"""Qwen2-0.5B."""

TWO_BILLION = Qwen2Config(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=0,
)
"""The sizes of Qwen3-1.7B in Qwen2's architecture: 1,720,813,568 parameters."""


def shape_of(config: PreTrainedConfig, rank: int, element: int, bits: int = 4) -> Shape:
    """What decides the memory of a model of that config, with LoRA of the rank; see `memory_estimate.Shape`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    weights = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    return Shape(config.to_dict(), weights, rank, element, bits)


def saved(name: ModelName, folder: Path, seed: int = 0) -> Path:
    """Makes that model in `folder / name`, about two seconds for `bench`, and returns this path."""
    tokenizer = _tokenizer()
    if name == "bench":
        _pad(tokenizer)
    model = tiny_model(len(tokenizer), seed) if name == "tiny" else bench_model(seed)
    save_tiny(folder / name, model, tokenizer)
    return folder / name


def bench_model(seed: int = 0) -> Qwen2ForCausalLM:
    """A Qwen2 of 41M parameters in Qwen2-0.5B's proportions of heads, with random weights."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def half_billion(folder: Path) -> Path:
    """A model of Qwen2-0.5B's shape, 494,032,768 parameters; makes the folder (1 GB, about ten seconds) and returns it."""
    return random_model(HALF_BILLION, folder)


def random_model(config: Qwen2Config, folder: Path, device: str = "cpu") -> Path:
    """Write a model of this shape with random weights in bfloat16; return its folder.

    Args:
        device: where the weights are drawn: much faster on a GPU, which draws others.
    """
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    save_tiny(folder, model, _tokenizer())
    return folder


def _tokenizer() -> Qwen2Tokenizer:
    return tiny_tokenizer(texts_of(demonstrations(arithmetic, DEMONSTRATIONS, seed=0)))


def _pad(tokenizer: Qwen2Tokenizer) -> None:
    tokenizer.model_max_length = CONTEXT
    tokenizer.add_tokens([f"<unused_{number}>" for number in range(len(tokenizer), VOCABULARY)])
