"""A sampler that could not be simpler: one row, read again from its beginning for every token. What an engine must say too."""

import numpy as np
import torch

from agentrl.workflow.engines import Completion, GenerateRequest
from agentrl.workflow.inference.sampling import cumulative_probabilities, distribution, lowest_logit, mask_below, uniforms
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.trajectory import FinishReason


@torch.no_grad()
def alone(policy: Policy, request: GenerateRequest) -> Completion:
    """The whole turn; the prompt must leave room for it."""
    policy.publish(request.policy)
    stops = policy.chat.stops(request.stop) if request.stop else None
    ids: list[int] = []
    logprobs: list[float] = []
    reason: FinishReason | None = None
    while reason is None:
        token, logprob = _token(policy, request, ids)
        ids.append(token)
        logprobs.append(logprob)
        if policy.chat.has_end_token(ids) or (stops is not None and stops.is_completed(ids)):
            reason = "stop"
        elif len(ids) == request.max_new_tokens:
            reason = "length"
    return Completion(tuple(ids), tuple(logprobs), reason, 0.0)


def _token(policy: Policy, request: GenerateRequest, ids: list[int]) -> tuple[int, float]:
    with policy.sampling() as model:
        logits = model(input_ids=torch.tensor([[*request.prompt_ids, *ids]], device=policy.device)).logits[:, -1].cpu()
    everything, _ = distribution(logits, request.temperature)
    shares = torch.tensor([[request.top_p, request.min_p]], dtype=torch.float64)
    left = mask_below(everything, lowest_logit(everything, torch.tensor([request.top_k]), shares[:, 0], shares[:, 1]))
    number = uniforms(np.array([request.key], dtype=np.uint64), np.array([request.position + len(ids)], dtype=np.uint64))
    token = int(draw(cumulative_probabilities(left), torch.from_numpy(number)))
    return token, float(everything[0, token].float())


def draw(cumulative: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The ids (N,) that the uniforms (N,) choose by the sums (N, V) of `distribution`."""
    total = cumulative[:, -1:].contiguous()
    # The sum of rounded probabilities is not 1: the draw is scaled to it, instead of favouring the last token.
    ids = torch.searchsorted(cumulative, uniforms.double()[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(ids, last).clamp(max=cumulative.shape[-1] - 1)[:, 0]
