"""Tiny random models of the families that the documents name, from transformers' own configs, for the tests of the sampler."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.support.small_models import tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
WINDOW = 8
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "Qwen3": lambda: Qwen3Config(**SHAPE),
    "Qwen3.5": lambda: Qwen3_5TextConfig(
        **SHAPE,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "Qwen3 MoE": lambda: Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "Gemma 3": lambda: Gemma3TextConfig(**SHAPE, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "LFM2": lambda: Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"], block_ff_dim=64),
    "Granite 4": lambda: GraniteMoeHybridConfig(
        **SHAPE,
        **MAMBA,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "Falcon-H1": lambda: FalconH1Config(**SHAPE, **MAMBA, mamba_d_ssm=64),
    "Mistral": lambda: MistralConfig(**SHAPE, sliding_window=WINDOW),
    "Phi-3": lambda: Phi3Config(**SHAPE, sliding_window=2 * SHAPE["max_position_embeddings"]),
    "gpt-oss": lambda: GptOssConfig(
        **SHAPE,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}


def save_random(folder: Path, config: PreTrainedConfig) -> Path:
    """Write a random model of this config, with the tiny tokenizer, in the hub's format."""
    config.vocab_size = len(tokenizer())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    tokenizer().save_pretrained(folder)
    return folder
