"""Losses: pure functions of (B, T) token tensors. The files of `workflow/algorithms` select them by name.

A surrogate returns each token's loss. `policy_loss` adds KL and entropy, and aggregates the sum over the tokens. A microbatch
never divides by its own counts: `aggregate` divides by the counts of the complete minibatch (`Normaliser`). So the losses of
the microbatches add up to the loss of the minibatch, and the gradient does not depend on the split.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.workflow.config import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""The bound of a token's log ratio, as in verl. Beyond it the exponential could overflow, and its gradient would be NaN."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""The upper bound of the log ratio of a whole training row, as in verl."""


@dataclass(frozen=True, slots=True)
class Normaliser:
    """The numbers of a minibatch by which losses are divided.

    Args:
        tokens: the number of trained tokens.
        rows: the number of training rows with at least one trained token.
        width: the most tokens that an episode may sample, a constant of the run. Some aggregations divide by it.
        episodes: the number of episodes that the rows belong to. The weights of an episode's rows sum to 1. If 0, each row
            counts as an episode.
    """

    tokens: int
    rows: int
    width: int
    episodes: int = 0

    @property
    def sequences(self) -> int:
        """The number of episodes, which equals the sum of the rows' weights."""
        return self.episodes or self.rows


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The inputs of a loss, one value per token; all (B, T) if no other shape is given.

    Args:
        logprobs: logprobs under the policy that trains, at the sampling temperature; they carry the gradient.
        old: the logprobs in the denominator of the ratio (PPO's "old"), without a gradient.
        mask: True if the token trains. Values at other tokens have no effect.
        reference: logprobs under the frozen reference; None if no KL is needed.
        entropy: entropy of the distribution that each token was drawn from; it has a gradient if entropy_coef is not 0.
        weights: (B,), each row's share of its episode; None: 1 for each row.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    reference: Tensor | None = None
    entropy: Tensor | None = None
    weights: Tensor | None = None

    def log_ratio(self) -> Tensor:
        """Return logprobs - old, clamped to +-`MAX_LOG_RATIO`; 0 if the token does not train; (B, T)."""
        return torch.where(self.mask, self.logprobs - self.old, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def log_ratio_clamped(self) -> Tensor:
        """Return (B, T): True for trained tokens whose log ratio is clamped. The ratio of such a token has no gradient."""
        return self.mask & ((self.logprobs - self.old).abs() > MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A microbatch's share of the minibatch's loss (a scalar with a gradient), and sums for the metrics.

    `sums` has each metric's sum over the microbatch's trained tokens. To get the metric, add up the sums of the minibatch's
    microbatches, and divide by the minibatch's number of trained tokens.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]


Surrogate = Callable[[TokenBatch, AlgorithmConfig], tuple[Tensor, Tensor]]
"""A function from tokens and the run's options to two (B, T) tensors: each token's loss, and True if its clip was active."""


def policy_loss(surrogate: Surrogate, batch: TokenBatch, options: AlgorithmConfig, normaliser: Normaliser) -> LossTerms:
    """Return the surrogate + kl_coef x KL (if it is in the loss) - entropy_coef x entropy, aggregated as `options` says.

    The sums are `ratio`, `clip_fraction`, `log_ratio_clamped` and, with a reference, `kl`.
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
    """Return REINFORCE's loss -A log pi, without ratio or clip. Source: Williams (1992)."""
    return -batch.advantages * torch.where(batch.mask, batch.logprobs, 0.0), torch.zeros_like(batch.mask)


def clipped(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped surrogate of each token's ratio, see `clipped_surrogate`."""
    return clipped_surrogate(batch.log_ratio(), batch.advantages, *_clips(options))


def clipped_sequence(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped surrogate with one ratio for all tokens of a row: the product of its tokens' ratios (TRL's RLOO).

    See `clipped_surrogate`.
    """
    total = batch.log_ratio().sum(-1, keepdim=True).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    log_ratio = total.expand_as(batch.logprobs)
    return clipped_surrogate(log_ratio, batch.advantages, *_clips(options))


def clipped_sequence_mean(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return GSPO's loss: the clipped surrogate of the geometric mean of a row's ratios.

    The mean is r = exp(mean over the row's tokens of log ratio). The ratio of a token is sg(r) pi / sg(pi), where pi is the
    token's probability and sg stops the gradient. So each token has its own advantage and gradient. Source: arXiv 2507.18071,
    equations 7 and 14 (GSPO-token).
    """
    mean = batch.log_ratio().sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True).clamp(min=1)
    own = torch.where(batch.mask, batch.logprobs - batch.logprobs.detach(), 0.0)
    log_ratio = (own + mean.detach()).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    return clipped_surrogate(log_ratio, batch.advantages, *_clips(options))


def clipped_weight(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return CISPO's loss -sg(clipped ratio) A log pi, where sg stops the gradient.

    Only the weight is clipped, so every token keeps a gradient. With the convention `verl`, the ratio is limited to 1 -
    clip_low and 1 + clip_high. With `trl`, it is at most clip_high, an absolute cap, without a lower bound. Source: MiniMax-M1,
    arXiv 2506.13585, equations 4 and 5.
    """
    ratio = batch.log_ratio().exp().detach()
    assert options.clip_high is not None  # settled
    lowest, highest = (
        (1 - options.clip_low, 1 + options.clip_high) if options.clip_low is not None else (0.0, options.clip_high)
    )
    weight = ratio.clamp(lowest, highest)
    return -weight * batch.advantages * torch.where(batch.mask, batch.logprobs, 0.0), weight != ratio


def soft_gate(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return SAPO's loss -A sigmoid(tau (r - 1)) 4 / tau.

    There is no clip. The gradient gets smaller as the ratio r moves away from 1. tau is tau_positive if A > 0, otherwise
    tau_negative. So the gradient of tokens of bad answers gets smaller sooner. At r = 1, the gradient with respect to r is -A,
    the same as that of -A r. Source: arXiv 2511.20347, equations 5 and 6.
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
    """Return, by token, PPO's pessimistic loss and True if the clip was active; both (B, T).

    The loss is max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(log_ratio). With `dual_clip`, a token with A < 0 has
    a loss of at most -A dual_clip. Source: arXiv 1707.06347, equation 7; dual clip arXiv 1912.09729, equation 5 (on at 3 in
    verl, off in TRL).
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
    """Return the critic's loss per token, (B, T): 0.5 max((v - R)^2, (clip(v, V +- clip) - R)^2).

    v are the critic's values, V its values before the update, R the returns. Source: OpenAI's baselines and verl; without the
    clip, arXiv 1506.02438, section 5.
    """
    plain = (values - returns) ** 2
    if clip is None:
        return 0.5 * plain
    near = before + (values - before).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (near - returns) ** 2)


def importance_weights(
    proximal: Tensor, behavior: Tensor, mask: Tensor, cap: float, level: str = "token", beyond: str = "truncate"
) -> tuple[Tensor, Tensor]:
    """Return, by token, the truncated importance weight and True if it was truncated; both (B, T).

    The weight corrects for tokens that were sampled with other weights, or other arithmetic, than the update starts from. It is
    min(exp(proximal - behavior), cap), without a gradient, and 1 where `mask` is False. The cap bounds the variance, at the
    price of a bias. If sampler and trainer use the same weights, the importance weight is 1 up to rounding.

    The caller multiplies the advantage by this weight. A surrogate is proportional to its advantage, so the surrogate is
    weighted and the KL is not.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025), as in verl; the
    truncation is rho-bar of IMPALA, arXiv 1802.01561, equation 1; masking: IcePop (2025).

    Args:
        proximal: logprobs under the weights that the update starts from.
        behavior: logprobs as the sampler computed them.
        mask: True if the token trains.
        cap: the largest weight, at least 1.
        level: `token`: each token has its own weight. `sequence`: each token has the product over all tokens of its row.
        beyond: the treatment of weights above the cap: `truncate` sets them to the cap, `mask` sets them to 0.
    """
    difference = torch.where(mask, proximal - behavior, 0.0).detach()
    if level == "sequence":
        difference = torch.where(mask, difference.sum(-1, keepdim=True), 0.0)
    cut = difference > math.log(cap)
    weights = difference.clamp(max=math.log(cap)).exp()
    return (torch.where(cut, 0.0, weights) if beyond == "mask" else weights), cut


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return the KL estimate `logprobs - reference`, (B, T). It is unbiased, has high variance and can be negative.

    Its expected gradient is 0, so the estimate is useful only in rewards.
    """
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return the KL estimate 0.5 (logprobs - reference)^2, (B, T). It is biased and has low variance.

    Its expected gradient is that of the true KL.
    """
    return 0.5 * (logprobs - reference) ** 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return the KL estimate exp(d) - d - 1 with d = reference - logprobs, (B, T).

    It has low variance and is never negative. d is at most `MAX_LOG_RATIO`. Source: Schulman, "Approximating KL divergence"
    (2020); DeepSeekMath, arXiv 2402.03300, equation 4; the clamp as in verl.
    """
    difference = (reference - logprobs).clamp(max=MAX_LOG_RATIO)
    return difference.exp() - difference - 1


KL: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "k3-corrected": k3}
"""The KL estimators by name.

`k3-corrected` is k3 times the ratio in the loss. The ratio corrects the gradient of k3 for tokens that were sampled with older
weights, as TRL's `use_bias_correction_kl` does (DeepSeek-V3.2, arXiv 2512.02556).
"""


def aggregate(per_token: Tensor, mask: Tensor, name: str, normaliser: Normaliser, weights: Tensor | None = None) -> Tensor:
    """Combine a microbatch's losses per token, (B, T), by the method `name`. Return the microbatch's part of the minibatch's
    loss.

    The minibatch's loss is the sum of the parts of its microbatches. The methods are `token-mean` (DAPO), `seq-mean-token-mean`
    (the GRPO paper), `seq-mean-token-sum`, and Dr.GRPO's `seq-mean-token-sum-norm`: the sum divided by (number of episodes x
    `normaliser.width`), as in verl 0.9.1 and TRL.

    `token-mean` is a mean over tokens. The other methods are means over episodes: `seq` in their names means an episode. An
    episode has one training row for each of its chains. Its loss is the sum over these rows of the row's weight times the mean
    or sum of the row's tokens. `weights` (B,) has the weights, which add up to 1 in each episode; None: each is 1.
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
