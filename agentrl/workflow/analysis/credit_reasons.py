"""The reason for an episode's advantage, as numbers and as one line of text, computed from rewards and lengths only.

If the computed advantage differs from the recorded one, the explanation says so. If the advantage depends on a critic's values
or a KL in the rewards, only its mean over the episode is known.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from agentrl.workflow.algorithms import ROUNDING
from agentrl.workflow.token_chains import as_read, chains_of, reasons_not_to_train
from agentrl.workflow.trajectory import Episode

VERL_EPSILON, TRL_EPSILON, WHITEN_EPSILON = 1e-6, 1e-4, 1e-8
"""The same constants as in `training.advantages`, which needs torch."""
NO_RECORD = "No update has used it."
NOT_KNOWN = "The advantage is recorded, but not what it was computed from."
UNKNOWN = "the mean over its tokens of the advantages from the run's own code"


@dataclass(frozen=True, slots=True)
class Scored:
    """An episode of an update: id, group, reward in the reward set, number of trained tokens."""

    id: int
    group: int
    reward: float
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Credit:
    """The stored facts about an episode's advantage.

    Args:
        algorithm: the name of the algorithm; None if the run's config has none.
        options: the keys `algorithm.*` of the config.
        recorded: the advantage that the update recorded; None if no update used the episode.
        own: the episode itself; None if the episode cannot be trained on.
        group: the episodes of its group that can be trained on.
        update: a function that returns all episodes of the update; called only if the algorithm needs them.
    """

    algorithm: str | None
    options: Mapping[str, Any]
    recorded: float | None
    own: Scored | None
    group: Sequence[Scored]
    update: Callable[[], Sequence[Scored]] = field(default=tuple)


@dataclass(frozen=True, slots=True)
class Explained:
    """How an advantage is computed.

    Args:
        computed: the advantage; None if it cannot be computed.
        formula: the formula or the reason, in words.
        calculation: the formula with the episode's numbers; empty if there is none.
        numbers: the values in the calculation that no other field of the explanation has.
    """

    computed: float | None
    formula: str
    calculation: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def shown(self) -> dict[str, Any]:
        """Return the fields by name, and formula and calculation as one sentence (`how`)."""
        how = f"{self.formula}: {self.calculation}" if self.calculation else self.formula
        fields = {name: getattr(self, name) for name in ("computed", "formula", "calculation", "numbers")}
        return {**fields, "how": how}


def explain_credit(credit: Credit) -> dict[str, Any]:
    """Explain an episode's advantage. Return the recorded advantage (`value`), the fields of `Explained.shown`, and inputs.

    `agrees` is True if the computed advantage equals the recorded one; None if it cannot be computed.
    """
    rewards = [member.reward for member in credit.group]
    explanation: dict[str, Any] = {
        "value": credit.recorded,
        "algorithm": credit.algorithm,
        "reward": None if credit.own is None else credit.own.reward,
        "group_mean": fmean(rewards) if rewards and all(map(math.isfinite, rewards)) else None,
        "group_std": _deviation(rewards),
        "group_size": len(rewards),
    }
    if credit.recorded is None:
        return {**explanation, **Explained(None, NO_RECORD).shown(), "agrees": None}
    if credit.own is None or credit.algorithm is None or not all(map(math.isfinite, rewards)):
        return {**explanation, **Explained(None, NOT_KNOWN).shown(), "agrees": None}
    explained = _explanation(credit)
    agrees = _agree(explained.computed, credit.recorded)
    if agrees is False:
        explained = _explain_difference(explained, credit.recorded, credit.own)
    return {**explanation, **explained.shown(), "agrees": agrees}


def _explain_difference(explained: Explained, recorded: float, own: Scored) -> Explained:
    """Add to an explanation why the update recorded another advantage."""
    if recorded == 0:
        left_out = "because none of its tokens trains" if not own.tokens else "because sampler and trainer differ on its tokens"
        return replace(explained, formula=f"0: it was left out, {left_out}; else it would be {explained.formula}")
    remark = f"; the update recorded {recorded:.6g}: its rewards, or those it was compared with, have changed since"
    if explained.calculation:
        return replace(explained, calculation=f"{explained.calculation} {remark}")
    return replace(explained, formula=f"{explained.formula} {remark}")


def _agree(computed: float | None, recorded: float | None) -> bool | None:
    if computed is None or recorded is None:
        return None
    return math.isclose(computed, recorded, rel_tol=1e-5, abs_tol=10 * ROUNDING)


def _deviation(values: Sequence[float]) -> float | None:
    """Return the unbiased standard deviation: exactly 0 for equal values, None for fewer than two values."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return 0.0 if len(set(values)) == 1 else stdev(values)


def _explanation(credit: Credit) -> Explained:
    explain = _EXPLAIN.get(credit.algorithm or "")
    if explain is None:
        return Explained(None, UNKNOWN)
    if credit.options.get("kl_in") == "reward" and credit.options.get("kl_coef"):
        return Explained(None, "a KL, which is not stored, was taken off the rewards token by token: the mean over its tokens")
    return explain(credit)


def _own_reward(credit: Credit) -> float:
    assert credit.own is not None
    return credit.own.reward


def _offset(credit: Credit) -> tuple[float, float]:
    """Return the reward minus the mean of the group, and that mean. The first is exactly 0 if all rewards are equal."""
    rewards = [member.reward for member in credit.group]
    mean = fmean(rewards)
    return (0.0 if len(set(rewards)) == 1 else _own_reward(credit) - mean), mean


def _epsilon(credit: Credit) -> float:
    return TRL_EPSILON if credit.options.get("convention") == "trl" else VERL_EPSILON


def _relative_to_group(credit: Credit) -> Explained:
    offset, mean = _offset(credit)
    scale = credit.options.get("scale") or ("none" if credit.algorithm == "dr_grpo" else "group")
    reward, rewards = _own_reward(credit), [member.reward for member in credit.group]
    plain = Explained(offset, "reward - group mean", f"{reward:g} - {mean:.4g} = {offset:.4g}", {"offset": offset})
    if scale == "none":
        return plain
    if scale == "group" and len(rewards) == 1:
        return Explained(reward / (1 + _epsilon(credit)), "a group of one keeps its reward", f"{reward:g}")
    among = rewards if scale == "group" else [member.reward for member in credit.update()]
    spread = _deviation(among)
    if spread is None:
        return plain
    value = offset / (spread + _epsilon(credit))
    whose = "group" if scale == "group" else "update"
    return Explained(
        value,
        f"(reward - group mean) / (deviation of the {whose} + {_epsilon(credit):g})",
        f"({reward:g} - {mean:.4g}) / ({spread:.4g} + {_epsilon(credit):g}) = {value:.4g}",
        {"offset": offset, "deviation": spread, "epsilon": _epsilon(credit)},
    )


def _leave_one_out(credit: Credit) -> Explained:
    offset, mean = _offset(credit)
    count = len(credit.group)
    value = offset * (count / max(1, count - 1))
    others = (mean * count - _own_reward(credit)) / max(1, count - 1)
    calculation = f"{_own_reward(credit):g} - {others:.4g} = {value:.4g}"
    return Explained(value, f"reward - mean of the other {count - 1}", calculation, {"others_mean": others})


def _best_of_group(credit: Credit) -> Explained:
    rewards = sorted((member.reward for member in credit.group), reverse=True)
    if len(rewards) < 2 or _own_reward(credit) < rewards[0] or rewards[0] == rewards[1]:
        several = len(rewards) > 1 and rewards[0] == rewards[1] == _own_reward(credit)
        return Explained(
            0.0, "0: " + ("several episodes are equally good" if several else "only the best of a group gets an advantage")
        )
    spread = _deviation(rewards) or 0.0
    value = (rewards[0] - rewards[1]) / (spread + VERL_EPSILON)
    calculation = f"({rewards[0]:g} - {rewards[1]:g}) / ({spread:.4g} + {VERL_EPSILON:g}) = {value:.4g}"
    return Explained(value, "its lead over the second best", calculation, {"second": rewards[1], "deviation": spread})


def _optimal_baseline(credit: Credit) -> Explained:
    rewards = [member.reward for member in credit.group]
    lengths = [member.tokens for member in credit.group]
    if not sum(lengths):
        return Explained(None, "reward - mean of the group, weighed by length")
    mean = fmean(rewards)
    offsets = [0.0 if len(set(rewards)) == 1 else reward - mean for reward in rewards]
    offset, _ = _offset(credit)
    shift = sum(length * lead for length, lead in zip(lengths, offsets, strict=True)) / sum(lengths)
    value = offset - shift
    return Explained(
        value,
        "reward - mean of the group, weighed by the tokens that each sampled",
        f"{_own_reward(credit):g} - {mean + shift:.4g} = {value:.4g}",
        {"baseline": mean + shift, "tokens": float(credit.own.tokens if credit.own else 0)},
    )


def _group_baseline_whitened(credit: Credit) -> Explained:
    update = credit.update()
    means = _group_means(update)
    offset, mean = _offset(credit)
    offsets = [
        (0.0 if equal else member.reward - among, member.tokens) for member in update for among, equal in [means[member.group]]
    ]
    moments = _moments(offsets)
    if moments is None:
        return Explained(0.0, "0: all tokens of the update have the same lead over their groups")
    centre, variance = moments
    value = (offset - centre) / math.sqrt(variance + WHITEN_EPSILON)
    return Explained(
        value,
        "reward - group mean, whitened over all tokens of the update",
        f"({_own_reward(credit):g} - {mean:.4g} - {centre:.4g}) / {math.sqrt(variance):.4g} = {value:.4g}",
        {"offset": offset, "update_mean": centre, "update_deviation": math.sqrt(variance)},
    )


def _group_means(update: Sequence[Scored]) -> dict[int, tuple[float, bool]]:
    rewards: dict[int, list[float]] = {}
    for member in update:
        rewards.setdefault(member.group, []).append(member.reward)
    return {group: (fmean(some), len(set(some)) == 1) for group, some in rewards.items()}


def _moments(values: Sequence[tuple[float, int]]) -> tuple[float, float] | None:
    """Return the mean and the unbiased variance; None if all values are equal."""
    count = sum(times for _, times in values)
    if count < 2 or len({value for value, times in values if times}) < 2:
        return None
    mean = sum(value * times for value, times in values) / count
    return mean, sum(times * (value - mean) ** 2 for value, times in values) / (count - 1)


def _returns_to_go(credit: Credit) -> Explained:
    discount = credit.options.get("discount")
    discounting = "" if discount in (None, 1, 1.0) else f", discounted by {discount:g} a token"
    return Explained(None, f"the mean over its tokens of the later rewards{discounting}; it earned {_own_reward(credit):g}")


def _returns_whitened(credit: Credit) -> Explained:
    return Explained(None, f"{_returns_to_go(credit).formula}; whitened over all tokens of the update")


def _by_a_critic(credit: Credit) -> Explained:
    return Explained(None, "the mean over its tokens of advantages from a critic's values (not stored); whitened")


_EXPLAIN: Mapping[str, Callable[[Credit], Explained]] = {
    **dict.fromkeys(("grpo", "dapo", "dr_grpo", "cispo", "gspo", "sapo"), _relative_to_group),
    "rloo": _leave_one_out,
    "pass_at_k": _best_of_group,
    "opo": _optimal_baseline,
    "reinforce_plus_plus_baseline": _group_baseline_whitened,
    "reinforce": _returns_to_go,
    "reinforce_plus_plus": _returns_whitened,
    **dict.fromkeys(("ppo", "turn_ppo"), _by_a_critic),
}
"""For each algorithm, the function that explains an advantage.

A test compares the names with those of the shipped algorithms.
"""

BY_EPISODE = ("grpo", "dapo", "dr_grpo", "cispo", "gspo", "sapo", "rloo", "pass_at_k", "opo", "reinforce_plus_plus_baseline")
"""The algorithms in which all tokens of an episode have the same advantage."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Adjacent trained tokens of a step. `value` is the return of the last token. The return of each earlier token is that of
    the next one, times the discount.
    """

    step: int
    tokens: int
    value: float


def returns_of(episode: Episode, discount: float) -> list[Stretch]:
    """Return, by step, the returns of the episode's trained tokens. A token's return is the discounted sum of the rewards from
    that token on.

    The steps are in the order of the episode's training rows. `episode` must have its reward and the rewards of its steps. See
    `training.training_rows`, which assigns rewards to tokens.
    """
    read, numbers = as_read(episode)
    idle = reasons_not_to_train(read)
    taught = [step for steps in chains_of(read) for step in steps if step.index not in idle and step.trainable_tokens]
    rest = float(episode.reward or 0.0) - sum(step.reward for step in read.steps)
    last = {step.chain: step.index for step in taught}
    stretches: list[Stretch] = []
    following, chain = 0.0, None
    for step in reversed(taught):
        earned = step.reward
        if last[step.chain] == step.index:
            earned += rest + sum(one.reward for one in read.steps if one.index > step.index and one.chain != step.chain)
        at_end = earned + (discount * following if step.chain == chain else 0.0)
        stretches.append(Stretch(numbers[step.index], step.trainable_tokens, at_end))
        following, chain = at_end * discount ** (step.trainable_tokens - 1), step.chain
    return stretches[::-1]


def credit_by_returns(
    episodes: Sequence[Episode], episode: int, discount: float, whitened: bool
) -> Mapping[int, Sequence[float]]:
    """Return the advantage of each token of one episode, by step, for an algorithm that uses discounted sums of later rewards.
    `episodes` are all episodes of the update, from which whitening takes mean and deviation. If `whitened` is False, it may
    have only the one episode.
    """
    returns = {member.id: returns_of(member, discount) for member in episodes}
    move, scale = _whitening([*returns.values()], discount) if whitened else (0.0, 1.0)
    return {stretch.step: _token_values(stretch, discount, move, scale) for stretch in returns.get(episode, ())}


def _token_values(stretch: Stretch, discount: float, move: float, scale: float) -> list[float]:
    if discount == 1.0:
        return [(stretch.value - move) * scale] * stretch.tokens
    last = stretch.tokens - 1
    return [(stretch.value * discount ** (last - place) - move) * scale for place in range(stretch.tokens)]


def _whitening(episodes: Sequence[Sequence[Stretch]], discount: float) -> tuple[float, float]:
    """Return the mean of the returns of all tokens, and 1 / their standard deviation. Both are 0 if all returns are equal."""
    stretches = [stretch for returns in episodes for stretch in returns]
    count = sum(stretch.tokens for stretch in stretches)
    longest = max((stretch.tokens for stretch in stretches), default=0)
    alike = len({stretch.value for stretch in stretches}) < 2 and (discount == 1.0 or longest < 2)
    if count < 2 or alike:
        return 0.0, 0.0
    mean = sum(_sum(stretch.value, discount, stretch.tokens) for stretch in stretches) / count
    # Squares of distances, stretch by stretch: the difference of two large sums would lose them.
    squares = sum(_squares(stretch, discount, mean) for stretch in stretches)
    return mean, 1.0 / math.sqrt(squares / (count - 1) + WHITEN_EPSILON)


def _squares(stretch: Stretch, discount: float, mean: float) -> float:
    if discount == 1.0:
        return stretch.tokens * (stretch.value - mean) ** 2
    return sum((value - mean) ** 2 for value in _token_values(stretch, discount, 0.0, 1.0))


def _sum(value: float, discount: float, tokens: int) -> float:
    """Return value (1 + discount + discount^2 + ...), a sum of `tokens` terms."""
    return value * tokens if discount == 1.0 else value * (1 - discount**tokens) / (1 - discount)
