"""The preparation of an update: the rows of each step, and values of their tokens that do not change during the update. See
`training.trainer`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from agentrl.workflow.algorithms import find_gradient, resolve_options
from agentrl.workflow.config import RunConfig
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find
from agentrl.workflow.stats.group_variance import CUT_OFF, DIFFERENT, NO_ADVANTAGE, TOO_FEW_EPISODES
from agentrl.workflow.training.advantages import Advantages, Credit
from agentrl.workflow.training.losses import KL, Normaliser
from agentrl.workflow.training.reports import Metrics, Update
from agentrl.workflow.training.row_scorer import RowScorer
from agentrl.workflow.training.training_rows import Row, TokenLayout, pad
from agentrl.workflow.trajectory import TRUNCATED, Group

WHOLE = frozenset({"loss", "sampler_difference_max"})
"""The metrics that are not divided by the number of tokens."""


@dataclass(frozen=True, slots=True)
class TokenConstants:
    """Values of tokens that are computed before an update and stay the same in all of its steps; None if they are not needed.

    Each is flat, (tokens,), or laid out on the lines of a microbatch, (B, T - 1). `start` are the policy's logprobs before the
    update. The other names are those of `training.losses` and `training.advantages`.
    """

    advantages: Tensor
    start: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    def on_lines(self, places: Tensor, mask: Tensor, dtype: torch.dtype) -> "TokenConstants":
        """Lay out the values of a microbatch's tokens on its lines, (B, T - 1).

        Args:
            places: the flat indices of the microbatch's trained tokens.
            mask: (B, T - 1), True for each trained token.
            dtype: the dtype of the result.
        """
        flat = {one.name: getattr(self, one.name) for one in fields(self)}
        constants = {name: values[places].to(mask.device, dtype) for name, values in flat.items() if values is not None}
        return TokenConstants(**{name: pad(values, mask) for name, values in constants.items()})


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The rows of one optimizer step.

    Args:
        rows: only the training rows that have a gradient.
        normaliser: the counts over all rows of the step, also those without a gradient.
    """

    rows: Sequence[Row]
    normaliser: Normaliser

    def means(self, sums: Metrics) -> dict[str, float]:
        """Turn sums over the rows' trained tokens into means, and compute the effective sample size as a share of these tokens.

        The effective sample size of weights w of n tokens is (sum w)^2 / (n sum w^2). It is 1 if all weights are equal, and
        near 0 if few tokens have all the weight (Kong, 1992).
        """
        read = sum(sum(row.loss_mask) for row in self.rows)
        means = {name: value if name in WHOLE else value / read for name, value in sums.items()}
        squares = means.pop("importance_square", 0.0)
        if "importance_weight" in means:
            means["effective_sample_size"] = means["importance_weight"] ** 2 / squares if squares else 0.0
        return means


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """An update before its first step.

    Args:
        tokens: the layout of the tokens of all used episodes.
        minibatches: one for each optimizer step of a pass over the rows; at least one.
        beside: metrics of the update that the report of each optimizer step repeats.
        whole: metrics that only the report of the complete update has.
        advantages, dropped: see `Update`.
    """

    tokens: TokenLayout
    minibatches: Sequence[Minibatch]
    constants: TokenConstants
    beside: Metrics
    whole: Metrics
    advantages: Mapping[int, float]
    dropped: Mapping[int, str]


def select_groups(groups: Sequence[Group], needs_group: bool) -> tuple[list[Group], dict[int, str]]:
    """Return the groups with only their trainable episodes and, by slot, the reason why each remaining group is dropped.

    A group needs 2 trainable episodes for a group-relative algorithm, and 1 for any other.
    """
    usable, dropped = [], {}
    for group in groups:
        done = tuple(episode for episode in group.episodes if episode.trainable)
        if len(done) >= (2 if needs_group else 1):
            usable.append(Group(group.task, done, group.slot))
        else:
            dropped[group.slot] = f"{len(done)} of {len(group.episodes)} episodes can train"
    return usable, dropped


def episode_advantages(credited: Advantages, tokens: TokenLayout) -> dict[int, float]:
    """Return the advantage of each episode by its id: the mean over its trained tokens, or 0 if no token trains.

    If all tokens have the same advantage, the result is exactly that number.
    """
    advantages = {}
    for episode, line, length in zip(tokens.episodes, credited.advantages, tokens.lengths.tolist(), strict=True):
        values = line[:length]
        alike = length and bool((values == values[0]).all())
        advantages[episode.id] = float(values[0]) if alike else float(values.mean()) if length else 0.0
    return advantages


class UpdatePreparation:
    """The preparation of an update: it selects the rows, computes the constants, and assigns advantages. `corrects` says
    whether the update uses importance weights.
    """

    def __init__(self, policy: Policy, config: RunConfig, scorer: RowScorer, corrects: bool = False) -> None:
        self._corrects = corrects
        self._masks = config.update.mask_truncated
        self._policy = policy
        self._config = config
        self._scorer = scorer
        self._options = resolve_options(config.algorithm)
        self._algorithm = find_gradient(config.algorithm.name)
        self._credit: Credit = find("credits", self._algorithm.credit)

    def prepare(
        self, groups: Sequence[Group], iteration: int, critic: nn.Linear | None, kl_coef: float
    ) -> PreparedUpdate | Update:
        """Prepare the update on these groups. If no token can train, return the skipped update with its reason."""
        usable_groups, dropped = select_groups(groups, self._algorithm.needs_group)
        episodes = [episode for group in usable_groups for episode in group.episodes]
        if not episodes:
            return Update(dropped=dropped, skipped=TOO_FEW_EPISODES)
        tokens = TokenLayout.of(episodes)
        if not tokens.rows:  # every prompt filled the context
            none = {episode.id: 0.0 for episode in episodes}
            return Update(advantages=none, dropped=dropped, skipped="no episode has a token that trains")
        strayed = self._scorer.sampler_mismatch(tokens)
        cut_off = {number for number, episode in enumerate(episodes) if self._masks and episode.stop_reason in TRUNCATED}
        idle = strayed | cut_off
        constants, credited, beside = self._credit_tokens(tokens, usable_groups, idle, critic, kl_coef)
        advantages = episode_advantages(credited, tokens)
        if not all(map(math.isfinite, advantages.values())):  # nothing of it can be learned, or written down
            return Update(dropped=dropped, skipped="an advantage is not a finite number", bad=True)
        dropped |= _idle_reasons(usable_groups, {DIFFERENT: strayed, CUT_OFF: cut_off - strayed})
        minibatches = self._minibatches(tokens, idle, constants.advantages)
        if not minibatches:
            reason = DIFFERENT if strayed else NO_ADVANTAGE
            return Update(advantages=advantages, dropped=dropped, skipped=reason)
        constants = self._add_logprobs(tokens, minibatches, constants)
        staleness, limit = self._config.rollout.max_staleness, self._config.update.max_sampler_difference
        whole = {} if limit is None else {"sampler_dropped": float(len(strayed))}
        whole |= {"truncated_dropped": float(len(cut_off))} if self._masks else {}
        whole |= {"staleness": float(min(iteration, staleness))} if staleness else {}
        return PreparedUpdate(tokens, minibatches, constants, beside, whole, advantages, dropped)

    def _credit_tokens(
        self, tokens: TokenLayout, groups: Sequence[Group], idle: Set[int], critic: nn.Linear | None, kl_coef: float
    ) -> tuple[TokenConstants, Advantages, dict[str, float]]:
        """Compute the values and logprobs that the advantages need, and the advantages. Episodes in `idle` get advantage 0.

        Returns:
            The constants of the tokens, the advantages, and the metrics that are the same for all steps of the update.
        """
        options = self._options
        metrics = {"kl_coef": kl_coef} if options.kl_coef else {}
        start, values, reference, penalty = None, None, None, None
        in_reward = options.kl_coef > 0 and options.kl_in == "reward"
        if critic is not None or in_reward:
            start, values = self._scorer.read_constants(tokens, tokens.rows, self._policy.training, critic)
        if start is not None and in_reward:
            reference, _ = self._scorer.read_constants(tokens, tokens.rows, self._policy.reference)
            estimate = KL[options.kl_estimator](tokens.by_episode(start), tokens.by_episode(reference))
            penalty, metrics["kl"] = kl_coef * estimate, float(estimate[tokens.mask].mean())
        earned = tokens.make_earned(groups, penalty, None if values is None else tokens.by_episode(values))
        credited = self._credit(earned, options)
        active = torch.tensor([number not in idle for number in range(len(tokens.episodes))])
        credited = replace(credited, advantages=credited.advantages * active[:, None])
        returns = None if credited.returns is None else credited.returns[tokens.mask]
        if credited.returns is not None and earned.values is not None:
            metrics["explained_variance"] = explained_variance(earned.values, credited.returns, earned.mask)
        return TokenConstants(credited.advantages[tokens.mask], start, reference, values, returns), credited, metrics

    def _minibatches(self, tokens: TokenLayout, idle: Set[int], advantages: Tensor) -> list[Minibatch]:
        """Return one minibatch per optimizer step.

        Leave out steps without any gradient, because only momentum would move the weights. If no token of a row has an
        advantage, the row has no gradient, unless the loss has a KL, an entropy bonus or a value loss. The counts include such
        a row, but the model does not read it.
        """
        options, limits, episodes = self._options, self._config.rollout, len(tokens.episodes)
        step = self._config.update.batch_size or episodes
        all_teach = bool(options.entropy_coef or self._algorithm.critic or (options.kl_coef and options.kl_in == "loss"))
        minibatches = []
        for first in range(0, episodes, step):
            part = [row for row in tokens.rows if first <= row.episode < first + step and row.episode not in idle]
            rows = [row for row in part if all_teach or advantages[tokens.places([row])].any()]
            trained, width = sum(sum(row.loss_mask) for row in part), limits.max_steps * limits.max_new_tokens
            counts = Normaliser(trained, len(part), width, len({row.episode for row in part}))
            minibatches += [Minibatch(rows, counts)] if rows else []
        return minibatches

    def _add_logprobs(self, tokens: TokenLayout, minibatches: Sequence[Minibatch], constants: TokenConstants) -> TokenConstants:
        """Add the logprobs that the steps need: those of the reference, and those of the policy before the update.

        An update of one step needs no policy logprobs, except for importance weights with LoRA dropout.
        """
        used = [row for minibatch in minibatches for row in minibatch.rows]
        one_step = len(minibatches) * self._config.update.epochs == 1
        if one_step and not (self._corrects and self._config.model.lora_dropout):  # an importance weight has no dropout
            constants = replace(constants, start=None)  # the step's own are the same, with its dropout
        elif constants.start is None:
            constants = replace(constants, start=self._scorer.read_constants(tokens, used, self._policy.training)[0])
        if constants.reference is None and self._options.kl_coef > 0:
            constants = replace(constants, reference=self._scorer.read_constants(tokens, used, self._policy.reference)[0])
        return constants


def _idle_reasons(groups: Sequence[Group], idle: Mapping[str, Set[int]]) -> dict[int, str]:
    """Return, by slot, how many of the group's episodes do not train, and why.

    Args:
        idle: by reason, the numbers of the episodes that do not train, counted from 0 over the episodes of all groups.
    """
    slots = [group.slot for group in groups for _ in group.episodes]
    reasons: dict[int, str] = {}
    for reason, numbers in idle.items():
        for slot, count in Counter(slots[number] for number in numbers).items():
            text = f"{count} of {slots.count(slot)} episodes: {reason}"
            reasons[slot] = f"{reasons[slot]}; {text}" if slot in reasons else text
    return reasons


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over the tokens.

    It is 1 for a perfect critic. It is 0 for a critic that is no better than the mean, and if all returns are equal.
    """
    chosen, expected = returns[mask], values[mask]
    if len(chosen) < 2 or not float(chosen.var()):
        return 0.0
    return 1 - float((chosen - expected).var() / chosen.var())
