"""A small model file of llama.cpp's format."""

import json
from pathlib import Path

import gguf
import numpy as np

from tests.support.small_models import tokenizer

LAYERS, WIDTH, INNER, HEADS = 2, 64, 128, 4


def write_gguf(file: Path, architecture: str = "llama") -> None:
    """A random Llama in 8 bits with the tiny tokenizer and its chat template; the header names the architecture."""
    draw = np.random.default_rng(0)
    words = tokenizer()
    backend = json.loads(words.backend_tokenizer.to_str())["model"]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words.convert_ids_to_tokens(list(range(len(words)))))
    writer.add_token_merges([" ".join(pair) for pair in backend["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(str(words.chat_template))
    square, wide, narrow = (WIDTH, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
    layer = {"attn_q": square, "attn_k": square, "attn_v": square, "attn_output": square}
    layer |= {"ffn_gate": wide, "ffn_up": wide, "ffn_down": narrow}
    shapes = {f"blk.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    for name, shape in {"token_embd": (len(words), WIDTH), **shapes}.items():
        weights = gguf.quantize(draw.normal(0, 0.06, shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", weights, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    norms = [f"blk.{number}.{name}" for number in range(LAYERS) for name in ("attn_norm", "ffn_norm")]
    for name in [*norms, "output_norm"]:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
