"""The sampler's ways to run a model, on one model folder: tokens per processor second, and the difference from the trainer.

    python -m bench.performance.ways FOLDER [--tokens 48]

Each way samples the same eight requests with LoRA of rank 8 in float32 on one thread.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.inference import sampler
from agentrl.workflow.inference.cache_rows import CacheRows
from agentrl.workflow.inference.model_rows import ModelRows, open_rows
from agentrl.workflow.models.fast_forward import transformers_pass
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.trajectory import PolicyRef

LENGTHS = {"one length": [32] * 8, "unequal": [20, 24, 28, 32, 36, 40, 44, 48]}


def main() -> None:
    """Print a line for each way and each set of prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    policy = Policy.load(ModelConfig.model_validate({"lora_r": 8, "dtype": "float32"}), args.folder, "cpu", threads=1)
    for prompts, lengths in LENGTHS.items():
        measure(policy, f"{prompts}: as chosen", open_rows, lengths, args.tokens)
        with patch.object(Policy, "_forward_pass", lambda policy, model: transformers_pass(model)):
            measure(policy, f"{prompts}: transformers' pass, slots", open_rows, lengths, args.tokens)
        measure(policy, f"{prompts}: transformers' caches", CacheRows, lengths, args.tokens)


def measure(policy: Policy, name: str, way: Callable[[Policy], ModelRows], lengths: Sequence[int], tokens: int) -> None:
    """Sample the requests after a short one that warms up; print tokens per processor second."""
    policy._pass = None
    base = PolicyRef(str(policy.folder), policy.base_hash)
    with patch.object(sampler, "open_rows", way):
        engine = sampler.RollingEngine(policy, slots=8)
    prompts = [tuple(100 + (7 * number) % 900 for number in range(length)) for length in lengths]
    requests = [GenerateRequest(prompt, base, key, 0, tokens) for key, prompt in enumerate(prompts)]
    engine.submit(GenerateRequest((100, 101), base, 99, 0, 2)).result()
    started = time.process_time()
    completions = [future.result() for future in [engine.submit(request) for request in requests]]
    seconds = time.process_time() - started
    engine.close()
    ids = torch.tensor([[*prompts[-1], *completions[-1].token_ids]])
    with policy.sampling() as model, torch.no_grad():
        logprobs, _ = token_logprobs(model, ids, torch.ones_like(ids))
    off = (logprobs[0, len(prompts[-1]) - 1 :] - torch.tensor(completions[-1].logprobs)).abs().max().item()
    sampled = sum(len(completion.token_ids) for completion in completions)
    print(f"{name:42} {sampled / seconds:8.1f} tokens per processor second, |sampler - trainer| at most {off:.1e}", flush=True)


if __name__ == "__main__":
    main()
