"""Ways to sample the same tokens' worth from one model: each takes `Work` and returns what does it once.

No row ends before its length, on any side: ours gets end tokens that cannot be drawn and a limit per request, `generate`
none and the longest length of its batch, as it goes on for all of a batch until the last row ends anyway.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from agentrl.workflow.config import PROJECTIONS
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.models.logprobs import cache_parameter
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.trajectory import PolicyRef

DRAWN: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": 0}

Sampler = Callable[[], None]


@dataclass(frozen=True)
class Work:
    """What is to be sampled.

    Args:
        prompts: one per row, exact ids, of one length.
        lengths: how many tokens each row gets.
        slots: rows that are live at once.
    """

    prompts: Sequence[tuple[int, ...]]
    lengths: Sequence[int]
    slots: int

    @property
    def tokens(self) -> int:
        """How many are sampled in all."""
        return sum(self.lengths)


def ours(policy: Policy, work: Work, graphs: bool = True) -> tuple[Sampler, RollingEngine]:
    """Our engine, which returns a logprob with every token; close it afterwards.

    Args:
        graphs: whether it may use CUDA graphs.
    """
    policy.chat.end_ids = frozenset({-1})
    engine = RollingEngine(policy, work.slots)
    if not graphs:
        engine._batch._rows.graphs = None  # type: ignore[misc]
    weights = PolicyRef("", policy.base_hash)

    def sample() -> None:
        requests = [
            GenerateRequest(prompt, weights, key, 0, length)
            for key, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True), start=1)
        ]
        completions = [future.result() for future in [engine.submit(request) for request in requests]]
        assert [len(completion.token_ids) for completion in completions] == list(work.lengths)

    return sample, engine


def generate(model: Any, work: Work) -> Sampler:
    """transformers' own: batches of `slots` rows in the order of arrival, each until its longest row is done."""
    model.generation_config.eos_token_id = None  # it is taken where none is named, and would end a row by chance

    def sample() -> None:
        for start in range(0, len(work.prompts), work.slots):
            ids = torch.tensor(work.prompts[start : start + work.slots], device=model.device)
            longest = max(work.lengths[start : start + work.slots])
            config = GenerationConfig(**DRAWN, max_new_tokens=longest)  # type: ignore[no-untyped-call]
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            assert len(out.tolist()[0]) == ids.shape[1] + longest

    return sample


@torch.no_grad()
def _loop(model: Any, ids: torch.Tensor, steps: int) -> None:
    cache = DynamicCache(config=model.config)
    for _ in range(steps):
        logits = model(input_ids=ids, **{cache_parameter(model): cache}, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
    ids.tolist()  # a GPU is waited for


def bare(model: Any, work: Work) -> Sampler:
    """The eager forward pass with its own cache and an argmax, and nothing else: equal lengths only."""
    prompts = torch.tensor(work.prompts, device=model.device)
    (length,) = set(work.lengths)
    return lambda: _loop(model, prompts, length)


def matmuls(model: Any, work: Work) -> Sampler:
    """The products with weights of so many decoding steps at full slots, at their own shapes: equal lengths only."""
    weights = [
        (module.weight, torch.randn(work.slots, module.in_features, dtype=module.weight.dtype, device=module.weight.device))
        for name, module in model.named_modules()
        if name.endswith((*PROJECTIONS, "lm_head"))
    ]
    (length,) = set(work.lengths)

    @torch.no_grad()
    def multiply() -> None:
        for _ in range(length):
            for weight, states in weights:
                product = functional.linear(states, weight)
        product.sum().item()  # a GPU is waited for

    return multiply


def continuous(model: Any, work: Work) -> tuple[Sampler, Callable[[], None]]:
    """transformers' continuous batching, its manager kept warm between rounds, and what ends it. It changes the model."""
    config = GenerationConfig(**DRAWN, eos_token_id=-1)  # type: ignore[no-untyped-call]
    pages = work.slots * -(-(len(work.prompts[0]) + max(work.lengths)) // 256) + 8
    batching = ContinuousBatchingConfig(num_blocks=pages, max_requests_per_batch=work.slots, max_batch_tokens=2048, seed=0)
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
    manager.start()

    def end() -> None:
        manager.stop(block=True)
        manager.destroy()

    def sample() -> None:
        for prompt, length in zip(work.prompts, work.lengths, strict=True):
            manager.add_request(list(prompt), max_new_tokens=length)
        sampled = 0
        for _ in work.prompts:
            while (output := manager.get_result(timeout=1)) is None:
                if not manager.is_running():
                    raise RuntimeError("continuous batching has ended")
            sampled += len(output.generated_tokens)
        assert sampled == work.tokens, (sampled, work.tokens)

    return sample, end
