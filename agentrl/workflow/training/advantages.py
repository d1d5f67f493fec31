"""Advantages: how much better than expected each sampled token was. The functions are pure, and take only tensors.

The tensors contain only the sampled tokens that train, one after another. Tokens between them, such as the text of a tool's
result, are left out, so values, returns and advantages skip that text. (verl's REINFORCE++ multiplies the running return by the
mask. There, a terminal reward does not reach the tokens before the last tool text.)

Values, returns and advantages do not pass from one chain to another (`workflow.token_chains`). The reward of a chain's last
token includes the rewards of later steps of other chains.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.workflow.config import AlgorithmConfig
from agentrl.workflow.errors import StateError

VERL_EPSILON = 1e-6
TRL_EPSILON = 1e-4
WHITEN_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """The rewards of an update's tokens: N episodes of up to T tokens, padded on the right.

    Args:
        rewards: (N, T) float64. The last token of a step has the step's reward. The rewards that belong to no
            step are at the last token of each chain. If the KL is in the reward, kl_coef x KL is subtracted at each token.
        mask: (N, T), True for a token and False for padding.
        turns: (N, T), the index of the step that sampled each token.
        groups: (N,), an integer that identifies the group of each episode.
        values: (N, T) float64, the critic's prediction at each token: the sum of the rewards from this token on. None if the
            algorithm has no critic.
        outcomes: (N,) float64, each episode's recorded reward; None: the sum of its tokens' rewards. Use recorded rewards to
            find equal ones: sums in different orders may differ in the last digit.
        chains: (N, T), the number of each token's chain; None: each episode is one chain.
    """

    rewards: Tensor
    mask: Tensor
    turns: Tensor
    groups: Tensor
    values: Tensor | None = None
    outcomes: Tensor | None = None
    chains: Tensor | None = None

    @property
    def totals(self) -> Tensor:
        """The reward of each episode, (N,)."""
        return torch.where(self.mask, self.rewards, 0.0).sum(-1) if self.outcomes is None else self.outcomes


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantage of each token, (N, T), and, with a critic, the target of each token's value, (N, T)."""

    advantages: Tensor
    returns: Tensor | None = None


Credit = Callable[[TokenRewards, AlgorithmConfig], Advantages]
"""A function from the tokens' rewards and the run's options to one advantage per token."""


# Whole episodes against their group: all tokens of one share its advantage.


def group_relative(rewards: Tensor, epsilon: float = VERL_EPSILON) -> Tensor:
    """Return GRPO's advantages within one group: A = (R - mean) / (std + epsilon), std unbiased.

    Args:
        rewards: (G,), the scalar rewards of one group's episodes.
        epsilon: 1e-6 (the default, as in verl) or 1e-4 (as in TRL). With a smaller epsilon, A depends less on the scale of the
            rewards. Whether all rewards are equal is tested exactly, without epsilon.

    Returns:
        (G,) float64. Equal rewards give exactly 0. In a group of one episode, the advantage is the reward, as in verl (mean 0,
            std 1).

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision).
    """
    if len(rewards) == 1:
        return rewards.double() / (1 + epsilon)
    return center_on_mean(rewards) / (rewards.double().std() + epsilon)


def center_on_mean(rewards: Tensor) -> Tensor:
    """Return R - mean of one group (G,); exactly 0 if all rewards are equal. Source: Dr.GRPO, arXiv 2503.20783, equation 3."""
    rewards = rewards.double()
    # The rounded mean of equal numbers need not be that number, and the tiny rest may be divided by something as tiny.
    if torch.equal(rewards, rewards[:1].expand_as(rewards)):
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


def relative_to_group(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """Return the advantages of GRPO: the reward minus the group's mean, divided as the option `scale` says.

    - "group" divides by the standard deviation of the group's rewards.
    - "batch" divides by the standard deviation of all rewards of the update. So a group with almost equal rewards is not
      amplified (TRL's `scale_rewards="batch"`; arXiv 2508.08221).
    - "none" does not divide. This gives Dr.GRPO.
    """
    epsilon = TRL_EPSILON if options.convention == "trl" else VERL_EPSILON
    if options.scale == "group":
        return _credit_groups(earned, lambda rewards: group_relative(rewards, epsilon))
    credited = _credit_groups(earned, center_on_mean)
    totals = earned.totals
    if options.scale == "batch" and len(totals) > 1:
        return Advantages(credited.advantages / (totals.double().std() + epsilon))
    return credited


def leave_one_out(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """Return RLOO's advantages: R - the mean reward of the group's other episodes = (R - mean) G / (G - 1).

    Source: arXiv 2402.14740, equation 8.
    """
    return _credit_groups(earned, lambda rewards: center_on_mean(rewards) * (len(rewards) / max(1, len(rewards) - 1)))


def best_of_group(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """Return Pass@k's advantages: 0 for all episodes of a group except the best one.

    The advantage of the best episode is its reward minus the second best reward, divided by the standard deviation of the
    group's rewards. If several episodes share the best reward, all advantages are 0. Source: arXiv 2503.19595 (an unbiased
    gradient of the expected best of k), as in verl.
    """

    def credit(rewards: Tensor) -> Tensor:
        advantages = torch.zeros_like(rewards)
        if len(rewards) > 1:
            (first, second), (place, _) = rewards.topk(2)
            advantages[place] = (first - second) / (rewards.std() + VERL_EPSILON) if first > second else 0.0
        return advantages

    return _credit_groups(earned, credit)


def optimal_baseline(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """Return OPO's advantages: R - sum(length R) / sum(length), over the episodes of a group.

    The length is the number of sampled tokens. This baseline has the least variance if gradients grow with length. Source:
    arXiv 2505.23585, equation 9.
    """
    lengths = earned.mask.sum(-1).double()

    def credit(rewards: Tensor, lengths: Tensor) -> Tensor:
        # Relative to the mean first, so that equal rewards give exactly 0.
        offsets = center_on_mean(rewards)
        return offsets - (lengths * offsets).sum() / lengths.sum()

    advantages = torch.zeros_like(lengths)
    totals = earned.totals.double()
    for group in torch.unique(earned.groups):
        members = earned.groups == group
        advantages[members] = credit(totals[members], lengths[members])
    return _credit_all_tokens(advantages, earned.mask)


def group_baseline_whitened(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """Return the advantages of REINFORCE++ with baseline: R - mean of the group, whitened over all tokens of the update.

    Source: arXiv 2501.03262, equation 9.
    """
    return Advantages(whiten(_credit_groups(earned, center_on_mean).advantages, earned.mask))


# Token by token.


def returns_to_go(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """Return REINFORCE's advantages: for each token, the discounted sum of its reward and all later ones, without a baseline.

    With discount 1 and one terminal reward, the advantage of every token is that reward. Source: Williams (1992).
    """
    return Advantages(_returns(earned, options))


def returns_whitened(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """Return REINFORCE++'s advantages: the discounted sum of rewards from each token on, whitened over all tokens of the
    update.

    Source: arXiv 2501.03262, equations 5 to 7. Unlike in verl, the return skips the tokens of tools (see the module).
    """
    return Advantages(whiten(_returns(earned, options), earned.mask))


def gae(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """Return the advantages of generalised advantage estimation over sampled tokens. Advantages are whitened, returns are not.

    delta_t = r_t + discount V_t+1 - V_t; A_t = delta_t + discount lambda A_t+1. V and A are 0 after the last token. The returns
    are A + V, with A from before the whitening. Source: arXiv 1506.02438, equations 11 to 16; whitening as in verl and OpenAI's
    lm-human-preferences.
    """
    values = _values(earned)
    advantages = _accumulate_backwards(earned, values, *_decays(options))
    return Advantages(whiten(advantages, earned.mask), torch.where(earned.mask, advantages + values, 0.0))


def turn_gae(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """Return the advantages of GAE over turns, then over the tokens of each turn. Advantages are whitened, returns are not.

    A turn k is one decision. Its value V_k is the value of its first token, and its reward r_k is the sum of its tokens'
    rewards. Over turns, A_k = delta_k + discount lambda A_k+1, delta_k = r_k + discount V_k+1 - V_k. Inside a turn, the last
    token has A_t = r_t + discount (V_k+1 + lambda A_k+1) - V_t, and earlier tokens have A_t = r_t + V_t+1 - V_t + lambda A_t+1.

    There is no discount inside a turn: time passes only between turns. So a turn's length does not change how far back a reward
    reaches. The advantage of a token does not contain the KL penalty of earlier tokens. With discount and lambda 1, the result
    equals that of `gae`. The returns are A + V at each token.

    Source: after VAGEN's Bi-Level GAE, arXiv 2510.16907. There, the advantage of a turn's last token is A_k.
    """
    values = _values(earned)
    discount, lambda_ = _decays(options)
    advantages = torch.zeros_like(values)
    for row, (turns, mask) in enumerate(zip(earned.turns, earned.mask, strict=True)):
        length = int(mask.sum())
        if not length:
            continue
        starts = [0, *(1 + (turns[1:length] != turns[: length - 1]).nonzero()[:, 0]).tolist()]
        chains = [0] * length if earned.chains is None else earned.chains[row, :length].tolist()
        rewards, value = earned.rewards[row].tolist(), values[row].tolist()
        row_advantages = [0.0] * length
        after = 0.0  # V + lambda A of the turn that follows
        for start, end in reversed(list(zip(starts, [*starts[1:], length], strict=True))):
            after = after if end < length and chains[end] == chains[end - 1] else 0.0  # nothing follows a chain's last turn
            row_advantages[end - 1] = rewards[end - 1] + discount * after - value[end - 1]
            for t in range(end - 2, start - 1, -1):
                row_advantages[t] = rewards[t] + value[t + 1] - value[t] + lambda_ * row_advantages[t + 1]
            after = value[start] + lambda_ * (math.fsum(rewards[start:end]) + discount * after - value[start])
        advantages[row, :length] = torch.tensor(row_advantages, dtype=advantages.dtype)
    return Advantages(whiten(advantages, earned.mask), torch.where(earned.mask, advantages + values, 0.0))


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return (values - mean) / sqrt(variance + 1e-8) where the mask is True, and 0 elsewhere.

    The mean and the unbiased variance are those of the values under the mask. If all values are equal, or there is only one,
    the result is exactly 0.
    """
    chosen = values[mask]
    if not len(chosen) or torch.equal(chosen, chosen[:1].expand_as(chosen)):
        return torch.zeros_like(values)
    return torch.where(mask, (values - chosen.mean()) * (chosen.var() + WHITEN_EPSILON).rsqrt(), 0.0)


def _credit_groups(earned: TokenRewards, credit: Callable[[Tensor], Tensor]) -> Advantages:
    totals = earned.totals.double()
    advantages = torch.zeros_like(totals)
    for group in torch.unique(earned.groups):
        members = earned.groups == group
        advantages[members] = credit(totals[members])
    return _credit_all_tokens(advantages, earned.mask)


def _credit_all_tokens(per_episode: Tensor, mask: Tensor) -> Advantages:
    return Advantages(torch.where(mask, per_episode[:, None], 0.0))


def _returns(earned: TokenRewards, options: AlgorithmConfig) -> Tensor:
    assert options.discount is not None  # settled
    zeros = torch.zeros_like(earned.rewards)
    return _accumulate_backwards(earned, zeros, options.discount, 1.0)


def _decays(options: AlgorithmConfig) -> tuple[float, float]:
    assert options.discount is not None  # settled
    assert options.gae_lambda is not None
    return options.discount, options.gae_lambda


def _values(earned: TokenRewards) -> Tensor:
    if earned.values is None:
        raise StateError("This advantage needs a critic's values, but the algorithm has no critic.")
    return torch.where(earned.mask, earned.values, 0.0)


def _accumulate_backwards(earned: TokenRewards, values: Tensor, discount: float, lambda_: float) -> Tensor:
    """Compute A_t = delta_t + discount lambda A_t+1, (N, T), in each chain from its last token to its first; 0 for padding."""
    rewards, mask = earned.rewards, earned.mask
    chains = torch.zeros_like(mask, dtype=torch.long) if earned.chains is None else earned.chains
    advantages = torch.zeros_like(values)
    following, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    chain = torch.full_like(chains[:, 0], -1)
    for t in range(values.shape[1] - 1, -1, -1):
        goes_on = ~mask[:, t] | (chains[:, t] == chain)
        following, next_value = torch.where(goes_on, following, 0.0), torch.where(goes_on, next_value, 0.0)
        chain = torch.where(mask[:, t], chains[:, t], chain)
        delta = rewards[:, t] + discount * next_value - values[:, t]
        following = torch.where(mask[:, t], delta + discount * lambda_ * following, following)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], following, 0.0)
    return advantages
