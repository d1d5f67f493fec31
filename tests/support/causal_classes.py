"""A tiny config for every model type that transformers has a causal language model for."""

import re
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "lru_width", "embedding_size", "embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "block_ff_dim", "mlp_hidden_size"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "dense_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "kv_channels", "dim_head"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "linear_num_value_heads", "index_n_heads"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups", "n_groups", "max_window_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    "mamba_d_ssm": 64,
    "rotary_dim": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,
    "is_decoder": True,
}

CLASSES: tuple[str, ...] = (
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "bert", "bert-generation",
    "big_bird", "biogpt", "bitnet", "blenderbot-small", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe", "ctrl",
    "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "diffllama", "doge", "dots1", "electra", "ernie", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_mamba", "flex_olmo", "flint", "fuyu", "gemma", "gemma2",
    "gemma3", "gemma3n_text", "gemma4_unified", "gemma4_unified_assistant", "gemma4_unified_text", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "got_ocr2", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
    "gpt_neox_japanese", "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium",
    "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "inkling2_text", "inkling_text",
    "internlm3", "iquestcoder", "jais2", "jamba", "jetmoe", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "lfm3",
    "llama", "llama4", "llama4_text", "longcat_flash", "mamba", "mamba2", "megatron-bert", "mellum", "mimo_v2_flash",
    "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mixtral",
    "modernbert-decoder", "moss_transcribe_diarize", "mpt", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2",
    "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "opt", "persimmon", "phi", "phimoe", "qwen2", "qwen2_moe", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "rembert", "roformer", "rwkv", "seed_oss",
    "smollm3", "solar_open", "stablelm", "starcoder2", "trocr", "vaultgemma", "xglm", "xlstm", "youtu", "zaya",
)  # fmt: skip
"""Model types of text that a tiny config is known for, without the families that the documents name."""

REFUSED: dict[str, str] = {
    **dict.fromkeys(("cpmant", "xlm", "xlnet"), "not causal"),
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "xlm-roberta"), "does not support the position numbers"),
    "xmod": "Input language unknown",
}
"""Model type -> why the sampler refuses it."""

HYBRID = ["linear_attention", "full_attention"]
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "layer_types": None},
    "deepseek_v4": {"index_head_dim": None, "index_n_heads": None},
    "dots1": {"first_k_dense_replace": 0, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {"layer_types": HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_expand": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "gemma4_text": {"hidden_size_per_layer_input": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0},
}
"""Model type -> what its config needs besides."""


def tiny_config(model_type: str, vocabulary: int) -> PreTrainedConfig:
    """The smallest sensible config of a model type, with two layers or one of each kind."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    text = default.get_text_config(decoder=True)
    known = text.to_dict() | text.attribute_map
    values = {name: value for name, value in SIZES.items() if name in known} | {"vocab_size": vocabulary}
    if "vocab_size_per_layer_input" in known:
        values["vocab_size_per_layer_input"] = vocabulary
    if known.get("kv_lora_rank"):
        values["num_key_value_heads"] = values["num_attention_heads"]
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    if kinds:
        values["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        values["num_hidden_layers"] = len(values["layer_types"])
    values |= OWN.get(model_type, {})
    return _build(type(text), {name: value for name, value in values.items() if value is not None})


def _build(kind: Any, values: dict[str, Any]) -> PreTrainedConfig:
    """Build the config; values that it computes itself are left out."""
    text_names = {"layers_block_type": "layer_types"}
    while True:
        try:
            config: PreTrainedConfig = kind(**values)
        except AttributeError as error:
            found = re.match(r"property '(\w+)' of", str(error))
            name = text_names.get(found[1], found[1]) if found else ""
            if values.pop(name, None) is None:
                raise
        else:
            return config
