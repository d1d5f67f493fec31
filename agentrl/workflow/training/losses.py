"""Losses: pure functions of (B, T) token tensors, named by the files of `workflow/algorithms`.

A surrogate gives each token its loss; `policy_loss` adds KL and entropy and aggregates. A microbatch never divides by its own
counts: `aggregate` divides by the counts of the whole minibatch (`Normaliser`), so that the microbatches' losses add up to the
minibatch's, and the gradient does not depend on how it was split.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.workflow.config import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""The bound of a token's log ratio, as in verl: the gradient of an exponential that overflows is not a number."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""The cap of a sequence's log ratio, as in verl."""


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Counts over a whole minibatch.

    Args:
        tokens: trained tokens.
        rows: rows with at least one trained token.
        width: the most tokens that an episode may sample, a constant of the run, for the norms that divide by it.
        episodes: those of the rows, whose rows' weights sum to 1; 0: each row is one of its own.
    """

    tokens: int
    rows: int
    width: int
    episodes: int = 0

    @property
    def sequences(self) -> int:
        """Return the sum of the rows' weights."""
        return self.episodes or self.rows


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The inputs of a loss, one value per token; all (B, T).

    Args:
        logprobs: of the policy being trained, at the sampling temperature; carries the gradient.
        old: the denominator of the ratio (PPO's "old"), a constant.
        advantages: credit of each token.
        mask: True where the token trains. Whatever stands elsewhere changes nothing.
        reference: logprobs of the frozen reference, None where no KL is asked for.
        entropy: of the distribution that each token was drawn from; with a gradient where entropy_coef is not 0.
        weights: (B,), each row's share of its episode, None for 1.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    reference: Tensor | None = None
    entropy: Tensor | None = None
    weights: Tensor | None = None

    def log_ratio(self) -> Tensor:
        """Return logprobs - old, clamped to +-`MAX_LOG_RATIO`, and 0 where the token does not train; (B, T)."""
        return torch.where(self.mask, self.logprobs - self.old, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def log_ratio_clamped(self) -> Tensor:
        """Return whether each token trains and its log ratio is clamped, so that its ratio has no gradient; (B, T)."""
        return self.mask & ((self.logprobs - self.old).abs() > MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A microbatch's share of the minibatch's loss (a scalar with a gradient) and sums of what is worth watching.

    `sums` are sums over trained tokens; divided by the minibatch's token count they are the metrics of those names.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]


Surrogate = Callable[[TokenBatch, AlgorithmConfig], tuple[Tensor, Tensor]]
"""Tokens and the run's options -> each token's loss, and where a clip was active; both (B, T)."""


def policy_loss(surrogate: Surrogate, batch: TokenBatch, options: AlgorithmConfig, normaliser: Normaliser) -> LossTerms:
    """Return the surrogate + kl_coef x KL (where it is in the loss) - entropy_coef x entropy, aggregated as `options` says.

    Sums `ratio`, `clip_fraction`, `log_ratio_clamped` and, with a reference, `kl`.
    """
    ratio = batch.log_ratio().exp()
    per_token, clipped = surrogate(batch, options)
    sums = {
        "ratio": (ratio * batch.mask).sum(),
        "clip_fraction": (clipped & batch.mask).sum(),
        "log_ratio_clamped": batch.log_ratio_clamped().sum(),
    }
    if batch.reference is not None:
        ours, reference = (torch.where(batch.mask, values, 0.0) for values in (batch.logprobs, batch.reference))
        divergence = KL[options.kl_estimator](ours, reference)
        sums["kl"] = divergence.sum()
        if options.kl_in == "loss":
            weight = ratio if options.kl_estimator == "k3-corrected" else 1.0
            per_token = per_token + options.kl_coef * divergence * weight
    if options.entropy_coef:
        assert batch.entropy is not None
        per_token = per_token - options.entropy_coef * torch.where(batch.mask, batch.entropy, 0.0)
    assert options.aggregation is not None  # settled
    loss = aggregate(per_token, batch.mask, options.aggregation, normaliser, batch.weights)
    return LossTerms(loss, {name: value.detach() for name, value in sums.items()})


# Surrogates.


def policy_gradient(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """REINFORCE's -A log pi, without ratio or clip. Source: Williams (1992)."""
    return -batch.advantages * torch.where(batch.mask, batch.logprobs, 0.0), torch.zeros_like(batch.mask)


def clipped(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate of each token's ratio, see `clipped_surrogate`."""
    return clipped_surrogate(batch.log_ratio(), batch.advantages, *_clips(options))


def clipped_sequence(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate of the row's ratio, the product of its tokens' ratios (TRL's RLOO)."""
    total = batch.log_ratio().sum(-1, keepdim=True).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    log_ratio = total.expand_as(batch.logprobs)
    return clipped_surrogate(log_ratio, batch.advantages, *_clips(options))


def clipped_sequence_mean(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """GSPO: the clipped surrogate of the row's geometric mean ratio, its gradient shared by the tokens.

    r = exp(mean over the row's tokens of log ratio), written sg(r) pi / sg(pi), so that each token has its own advantage and
    gradient. Source: arXiv 2507.18071, equations 7 and 14 (GSPO-token).
    """
    mean = batch.log_ratio().sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True).clamp(min=1)
    own = torch.where(batch.mask, batch.logprobs - batch.logprobs.detach(), 0.0)
    log_ratio = (own + mean.detach()).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    return clipped_surrogate(log_ratio, batch.advantages, *_clips(options))


def clipped_weight(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """CISPO: -sg(clipped ratio) A log pi: the weight is clipped, and no token loses its gradient.

    verl: the ratio within 1 - clip_low and 1 + clip_high. trl: at most clip_high, an absolute cap, with no lower bound.
    Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5.
    """
    ratio = batch.log_ratio().exp().detach()
    assert options.clip_high is not None  # settled
    lowest, highest = (
        (1 - options.clip_low, 1 + options.clip_high) if options.clip_low is not None else (0.0, options.clip_high)
    )
    weight = ratio.clamp(lowest, highest)
    return -weight * batch.advantages * torch.where(batch.mask, batch.logprobs, 0.0), weight != ratio


def soft_gate(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """SAPO: -A sigmoid(tau (r - 1)) 4 / tau: a gate that closes softly as the ratio leaves 1, in place of a clip.

    tau is tau_positive where A > 0, else tau_negative: tokens of bad answers are let go sooner. At r = 1 its slope is A, as the
    ratio's. Source: arXiv 2511.20347, equations 5 and 6.
    """
    assert options.tau_positive is not None  # settled
    assert options.tau_negative is not None
    tau = torch.where(batch.advantages > 0, options.tau_positive, options.tau_negative)
    gate = torch.sigmoid(tau * (batch.log_ratio().exp() - 1)) * 4 / tau
    return -batch.advantages * gate, torch.zeros_like(batch.mask)


def _clips(options: AlgorithmConfig) -> tuple[float, float, float | None]:
    assert options.clip_low is not None  # settled
    assert options.clip_high is not None
    return options.clip_low, options.clip_high, options.dual_clip or None


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


# Beside the surrogate.


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """0.5 max((v - R)^2, (clip(v, V +- clip) - R)^2) per token, V the values before the update; (B, T).

    Source: as in OpenAI's baselines and verl; arXiv 1506.02438, section 5, without the clip.
    """
    plain = (values - returns) ** 2
    if clip is None:
        return 0.5 * plain
    near = before + (values - before).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (near - returns) ** 2)


def importance_weights(
    proximal: Tensor, behavior: Tensor, mask: Tensor, cap: float, level: str = "token", beyond: str = "truncate"
) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling: the weights of tokens, and where they were truncated; both (B, T).

    min(exp(proximal - behavior), cap), a constant without gradient; 1 where `mask` is False. The expectation over the sampler's
    tokens becomes that over the tokens of the weights which the update starts from, but for the cap, which bounds the variance.
    Where both are the same weights it is 1 up to rounding. A surrogate is proportional to its advantage, so that a token's
    advantage times this weight is its loss times this weight; a KL beside it keeps its own.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), as in verl; the
    truncation is rho-bar of IMPALA, arXiv 1802.01561, equation 1; masking: IcePop (2025).

    Args:
        proximal: logprobs under the weights that the update starts from.
        behavior: as the sampler computed them.
        mask: True where the token trains.
        cap: at least 1.
        level: `token`, or `sequence`: the product over the row's tokens weighs each of them.
        beyond: what is above the cap is `truncate`d to it, or `mask`ed: it does not count at all.
    """
    difference = torch.where(mask, proximal - behavior, 0.0).detach()
    if level == "sequence":
        difference = torch.where(mask, difference.sum(-1, keepdim=True), 0.0)
    cut = difference > math.log(cap)
    weights = difference.clamp(max=math.log(cap)).exp()
    return (torch.where(cut, 0.0, weights) if beyond == "mask" else weights), cut


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return logprobs - reference: unbiased, of high variance, below 0 as well; (B, T) in and out, as the others.

    Its expected gradient is 0, so it is for rewards only.
    """
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Half the squared difference: biased, of low variance; its gradient is that of the true KL."""
    return 0.5 * (logprobs - reference) ** 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return the low-variance, non-negative KL estimate exp(d) - d - 1, d = reference - logprobs; (B, T) in, (B, T) out.

    d is at most `MAX_LOG_RATIO`. Source: Schulman, "Approximating KL divergence" (2020); DeepSeekMath, arXiv 2402.03300,
    equation 4; the clamp as in verl.
    """
    difference = (reference - logprobs).clamp(max=MAX_LOG_RATIO)
    return difference.exp() - difference - 1


KL: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "k3-corrected": k3}
"""`k3-corrected` is k3 times the ratio in the loss, which corrects its gradient for tokens of older weights, as in TRL's
`use_bias_correction_kl` (DeepSeek-V3.2, arXiv 2512.02556)."""


def aggregate(per_token: Tensor, mask: Tensor, name: str, normaliser: Normaliser, weights: Tensor | None = None) -> Tensor:
    """Return a microbatch's share of the masked aggregation `name` of (B, T) values; the shares add up to the whole.

    `token-mean` (DAPO), `seq-mean-token-mean` (the GRPO paper), `seq-mean-token-sum`, and Dr.GRPO's
    `seq-mean-token-sum-norm`: the sum divided by sequences x T, as verl 0.9.1 and TRL do.

    A token mean counts tokens, whatever row they are in. In all others a sequence is an episode: its rows, one for each chain,
    have `weights` (B,) that sum to 1, so that an episode weighs as much as another, into however many chains it fell.
    """
    values = torch.where(mask, per_token, 0.0)
    if weights is not None and name != "token-mean":
        values = values * weights.to(values.dtype)[:, None]
    return AGGREGATIONS[name](values, mask, normaliser)


AGGREGATIONS: Mapping[str, Callable[[Tensor, Tensor, Normaliser], Tensor]] = {
    "token-mean": lambda x, mask, n: x.sum() / n.tokens,
    "seq-mean-token-mean": lambda x, mask, n: (x.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / n.sequences,
    "seq-mean-token-sum": lambda x, mask, n: x.sum() / n.sequences,
    "seq-mean-token-sum-norm": lambda x, mask, n: x.sum() / (n.sequences * n.width),
}
