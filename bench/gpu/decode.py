"""Tokens per second of decoding, 1 to 256 rows: ours with and without CUDA graphs, plain eager decoding, `generate`, and the
bound that memory sets.

Eager decoding is a loop of the model's forward pass with transformers' cache and an argmax. A step must read every weight once,
and each row's keys and values; the rate at which memory is read is measured here by copying (bytes read and written).
"""

import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.models.policy import Policy
from bench.gpu.part import Part, Row
from bench.gpu.shapes import shape_folder
from bench.performance import samplers
from bench.performance.models import saved
from bench.performance.samplers import Sampler, Work
from bench.performance.timing import alternate

PROMPT_TOKENS = 16
ROWS, FEW_ROWS = (1, 4, 16, 64, 256), (1, 4)
TOKENS, FEW_TOKENS = 64, 8
ROUNDS = 3
LEAST_SECONDS = 3.0
SHARE_OF_TIME = 30
"""The rounds of a row take at most this part of the time that is left."""
COPIED_BYTES = 2**30
"""Many times what any cache holds."""

KINDS: Mapping[str, Mapping[str, Any]] = {
    "all weights": {"lora_r": 0},
    "LoRA": {"lora_r": 8},
}


def measure(part: Part) -> None:
    """Measure the rate of memory, then a row for each model, kind and number of rows."""
    device = torch.device("cuda" if part.gpu else "cpu")
    size = COPIED_BYTES if part.gpu else COPIED_BYTES // 16
    row = part.attempt("memory", lambda: {"gb_per_s": bandwidth(device, size) / 1e9})
    rate = row["gb_per_s"] * 1e9 if row else 0.0
    dtype = "bfloat16" if part.gpu else "float32"
    with tempfile.TemporaryDirectory() as folder:
        for model in ("Qwen2-0.5B", "1.7B", "tiny") if part.gpu else ("tiny",):
            for kind, options in KINDS.items():
                config = ModelConfig.model_validate({"dtype": dtype, **options})
                _measure_model(part, model, f"{model}, {kind}", Path(folder), config, rate)
                torch.cuda.empty_cache()


def _measure_model(part: Part, model: str, name: str, folder: Path, config: ModelConfig, rate: float) -> None:
    """Measure the rows of one model; eager decoding and `generate` without LoRA only, as an adapter could be merged there."""
    sides: dict[str, Any] = {}

    def load() -> Row:
        path = saved("tiny", folder) if model == "tiny" else shape_folder(model, part)
        began = time.perf_counter()
        policy = sides["policy"] = Policy.load(config, str(path))
        if policy.kind == "full":
            plain: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, config.dtype))
            sides["model"] = plain.to(policy.device).eval()
        return {"seconds": time.perf_counter() - began}

    if part.attempt(f"{name}, loaded", load, LEAST_SECONDS) is None:
        return
    for rows in ROWS if part.gpu else FEW_ROWS:
        work = _work(rows, TOKENS if part.gpu else FEW_TOKENS)
        part.attempt(f"{name}, {rows} rows", lambda work=work: _rates(sides, work, part, rate), LEAST_SECONDS)  # type: ignore[misc]


def _rates(loaded: dict[str, Any], work: Work, part: Part, rate: float) -> Row:
    policy: Policy = loaded["policy"]
    sampler, engine = samplers.ours(policy, work)
    launching, launching_engine = samplers.ours(policy, work, graphs=False)
    sides: dict[str, Sampler] = {"ours": sampler, "ours_without_graphs": launching}
    if "model" in loaded:
        sides |= {"eager": samplers.bare(loaded["model"], work), "generate": samplers.generate(loaded["model"], work)}
    try:
        began = time.perf_counter()
        alternate(sides, 1, warm_up=False)
        once = time.perf_counter() - began
        rounds = max(1, min(ROUNDS, int(part.left / SHARE_OF_TIME / once)))
        taken = alternate(sides, rounds, warm_up=False)
    finally:
        engine.close()
        launching_engine.close()
    row: Row = {side: work.tokens / statistics.median(spent) for side, spent in taken.items()}
    row["rounds"] = rounds
    if rate:
        row["bound"] = work.slots * rate / read_per_step(policy, work)
        row["ours_of_bound"] = row["ours"] / row["bound"]
    return row


def read_per_step(policy: Policy, work: Work) -> float:
    """Return the bytes that a step must read: each weight once (an embedding that is the head too), and each row's keys."""
    with policy.sampling() as model:
        config: Any = model.config
        # An embedding that is not the head is read one row per token.
        read = [
            parameter
            for name, parameter in model.named_parameters()
            if ".policy." not in name and (config.tie_word_embeddings or "embed_tokens" not in name)
        ]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    context = len(work.prompts[0]) + work.lengths[0] / 2
    element = read[0].element_size()
    keys: float = 2 * config.num_hidden_layers * config.num_key_value_heads * width * context * element
    return sum(p.numel() * p.element_size() for p in read) + work.slots * keys


def bandwidth(device: torch.device, size: int) -> float:
    """Return the bytes per second that a copy reads and writes: the median of nine copies, after three."""
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    taken = []
    for number in range(12):
        _wait(device)
        began = time.perf_counter()
        target.copy_(source)
        _wait(device)
        if number > 2:
            taken.append(time.perf_counter() - began)
    return 2 * size / statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _work(rows: int, tokens: int) -> Work:
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(20, 300) for _ in range(PROMPT_TOKENS)) for _ in range(rows)]
    return Work(prompts, [tokens] * rows, rows)
