"""What is minimised: pure functions of (B, T) token tensors, to be combined by the files of `workflow/algorithms`.

A microbatch never divides by its own counts. `aggregate` divides by the counts of the whole minibatch (`Normaliser`), so
the microbatches' losses add up to the minibatch's loss, and the gradient does not depend on how it was split.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workflow.config import AlgorithmConfig

DUAL_CLIP = 3.0
AGGREGATION = "token-mean"


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Counts over a whole minibatch.

    Args:
        tokens: trained tokens.
        rows: rows with at least one trained token.
        width: token positions of the longest row (T), for the norms that divide by it.
    """

    tokens: int
    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What a loss reads, one value per token; all (B, T).

    Args:
        logprobs: of the policy being trained, at the sampling temperature; carries the gradient.
        old: proximal logprobs (PPO's "old"), a constant.
        advantages: credit of each token.
        mask: True where the token trains. Whatever stands elsewhere changes nothing.
        reference: logprobs of the frozen reference, None where no KL is asked for.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    reference: Tensor | None = None

    def log_ratio(self) -> Tensor:
        """logprobs - old, 0 where the token does not train, so that its exponential stays finite."""
        return torch.where(self.mask, self.logprobs - self.old, 0.0)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A microbatch's share of the minibatch's loss (a scalar with a gradient) and sums of what is worth watching.

    `sums` are sums over trained tokens; divided by the minibatch's token count they are the metrics of those names.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]


Loss = Callable[[TokenBatch, AlgorithmConfig, Normaliser], LossTerms]
"""A microbatch's tokens, the run's options, the minibatch's counts -> its share of the loss."""


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic loss per token and where the clip was active; both (B, T).

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(log_ratio); where A < 0, at most -A dual_clip.
    Source: arXiv 1707.06347, equation 7; dual clip arXiv 1912.09729, equation 5 (on at 3 in verl, off in TRL).
    """
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return loss, clipped > plain


def importance_weights(proximal: Tensor, behavior: Tensor, mask: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling: what a token that other weights sampled counts, and where it was cut; both (B, T).

    min(exp(proximal - behavior), cap), a constant without gradient; 1 where `mask` is False. The expectation over the sampler's
    tokens becomes that over the tokens of the weights which the update starts from, but for the cap, which bounds the variance.
    Where both are the same weights it is 1 up to rounding. A surrogate is proportional to its advantage, so that a token's
    advantage times this weight is its loss times this weight; a KL beside it keeps its own.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), its token form, as in
    verl; the truncation is rho-bar of IMPALA, arXiv 1802.01561, equation 1.

    Args:
        proximal: logprobs under the weights that the update starts from.
        behavior: as the sampler computed them.
        mask: True where the token trains.
        cap: at least 1.
    """
    difference = torch.where(mask, proximal - behavior, 0.0).detach()
    return difference.exp().clamp(max=cap), difference > math.log(cap)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The low-variance, non-negative KL estimate exp(d) - d - 1, d = reference - logprobs; (B, T) in, (B, T) out.

    Source: Schulman, "Approximating KL divergence" (2020); DeepSeekMath, arXiv 2402.03300, equation 4.
    """
    difference = reference - logprobs
    return difference.exp() - difference - 1


def clipped_with_kl(batch: TokenBatch, options: AlgorithmConfig, normaliser: Normaliser) -> LossTerms:
    """The clipped surrogate plus kl_coef x KL, as GRPO has it; sums `ratio`, `clip_fraction` and, with a reference, `kl`."""
    log_ratio = batch.log_ratio()
    per_token, clipped = clipped_surrogate(log_ratio, batch.advantages, options.clip_low, options.clip_high, DUAL_CLIP)
    sums = {"ratio": (log_ratio.exp() * batch.mask).sum(), "clip_fraction": (clipped & batch.mask).sum()}
    if batch.reference is not None:
        divergence = k3(torch.where(batch.mask, batch.logprobs, 0.0), torch.where(batch.mask, batch.reference, 0.0))
        per_token = per_token + options.kl_coef * divergence
        sums["kl"] = divergence.sum()
    loss = aggregate(per_token, batch.mask, AGGREGATION, normaliser)
    return LossTerms(loss, {name: value.detach() for name, value in sums.items()})


def aggregate(per_token: Tensor, mask: Tensor, name: str, normaliser: Normaliser) -> Tensor:
    """A microbatch's share of the masked aggregation `name` of (B, T) values; the shares add up to the whole.

    `token-mean` (DAPO), `seq-mean-token-mean` (the GRPO paper), `seq-mean-token-sum`, and Dr.GRPO's
    `seq-mean-token-sum-norm`, which verl divides by T and TRL by B x T (`-trl`).
    """
    return AGGREGATIONS[name](torch.where(mask, per_token, 0.0), mask, normaliser)


AGGREGATIONS: Mapping[str, Callable[[Tensor, Tensor, Normaliser], Tensor]] = {
    "token-mean": lambda x, mask, n: x.sum() / n.tokens,
    "seq-mean-token-mean": lambda x, mask, n: (x.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / n.rows,
    "seq-mean-token-sum": lambda x, mask, n: x.sum() / n.rows,
    "seq-mean-token-sum-norm": lambda x, mask, n: x.sum() / n.width,
    "seq-mean-token-sum-norm-trl": lambda x, mask, n: x.sum() / (n.rows * n.width),
}
