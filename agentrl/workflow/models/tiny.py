"""The tiny model: about a million parameters of Qwen2's architecture, with its own tokenizer and chat template.

Its supervised warm-up takes less than a minute on two CPU cores. So the complete workflow, training included, runs on any
machine. The template has Qwen's markup (`<|im_start|>role`, `<tool_call>`, `<tool_response>`) with one short line for the
tools. The tokenizer is a byte-level BPE that is trained on the demonstrations. Each digit is one token, and so is each frequent
phrase of the demonstrations. An episode of two turns has about 45 tokens.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from agentrl.workflow.chat.tiny_template import TEMPLATE

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SPECIAL = re.compile("|".join(map(re.escape, (END_OF_TEXT, START, END, *TAGS))))
VOCABULARY = 2048
CONTEXT = 1024

INIT = 0.06
"""The standard deviation of the initial weights.

Qwen's 0.02 suits widths of 1,000; with 0.02, the tiny model learns to copy half as fast.
"""


def tiny_tokenizer(texts: Sequence[str], vocabulary: int = VOCABULARY) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer with the tiny template on the texts. The same texts give the same tokenizer.

    The tokenizer has Qwen2's class, because transformers loads every `qwen2` folder with that class and its splitting rules.
    """
    backend = Qwen2Tokenizer().backend_tokenizer
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, START, END, *TAGS],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([part for text in texts for part in SPECIAL.split(text)], trainer)
    trained = json.loads(backend.to_str())["model"]
    merges: Any = [tuple(pair) for pair in trained["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=merges,
        eos_token=END,
        pad_token=END_OF_TEXT,
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
        extra_special_tokens=[START],
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in [*TAGS, *phrases(texts)]])
    return tokenizer


def phrases(texts: Sequence[str]) -> list[str]:
    """Return the phrases that occur in at least every twentieth text. A phrase is the text between special tokens or digits.

    The tokenizer makes each of them one token.
    """
    counts = Counter(part for text in texts for part in set(re.split(r"\d", SPECIAL.sub("0", text))) if len(part) > 1)
    return sorted(part for part, count in counts.items() if count * 20 >= len(texts))


def tiny_model(vocabulary: int, seed: int, layers: int = 4, width: int = 128) -> Qwen2ForCausalLM:
    """Return a Qwen2 model with random weights, which the seed decides."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=INIT,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def save_tiny(folder: Path, model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> None:
    """Write model and tokenizer in the hub's format."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
