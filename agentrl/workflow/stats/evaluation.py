"""Evaluates fresh episodes: the mean reward with its interval, the share of right episodes, and, separately, the number of
errors.

An episode is right if all decisive parts of its reward have their full value, 1. The decisive parts are those that the env
names in `correct`, or else the env's own parts with the largest weight (see `is_right`). So an episode does not become right by
a part of 0.1 for a well-formed answer, or wrong by a penalty. The rewards that a run adds have no influence.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentrl.workflow.trajectory import Group

Z95 = 1.959964
"""The two-sided 95% quantile of the normal distribution, and of Student's t with infinite degrees of freedom."""

T95 = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)
"""The two-sided 95% quantiles of Student's t with 1, 2, ... degrees of freedom, for which the expansion in `student_quantile`
is not accurate enough.
"""

IntervalBy = Literal["Wilson", "Student"]
"""The method of a 95% interval: Wilson's for a share, which stays within 0 to 1, or Student's for other means."""

FULL_VALUE = 1 - 1e-9
"""The lowest value of a reward part that is treated as its full value, 1."""


@dataclass(frozen=True, slots=True)
class Score:
    """The measures of an evaluation. Episodes that are not done are `errors`, and no mean includes them.

    Args:
        mean: the mean reward.
        low, high: the ends of the 95% interval of the mean.
        episodes: the number of done episodes.
        errors: the number of other episodes.
        tasks: the number of tasks with a done episode. Means are over these tasks.
        accuracy: the mean share of right episodes; None if no reward part decides what is right.
        pass_at: a mapping from k to the probability that one of k episodes of a task is right, for k = 1, 2, 4, ... and the
            group's size.
        interval_by: the method of the interval, see `bounds`; None if there is no mean.
    """

    mean: float
    low: float
    high: float
    episodes: int
    errors: int
    tasks: int = 0
    accuracy: float | None = None
    pass_at: Mapping[int, float] = field(default_factory=dict)
    interval_by: IntervalBy | None = None


def evaluate(groups: Sequence[Group], right: Collection[int] | None = None) -> Score:
    """Compute the measures of the groups. The mean is over tasks: it averages the mean reward of each task.

    Episodes of one task are correlated, so the independent units are tasks, not episodes.

    Args:
        groups: the groups, one for each task.
        right: the ids of the right episodes; None if no reward part decides what is right.
    """
    done = [[e for e in group.episodes if e.trainable] for group in groups]
    rewards = [[e.reward or 0.0 for e in some] for some in done if some]
    count = sum(map(len, done))
    errors = sum(len(group.episodes) for group in groups) - count
    if not rewards:
        return Score(math.nan, math.nan, math.nan, 0, errors)
    mean, low, high, by = bounds(rewards)
    counts = [(len(some), sum(e.id in right for e in some)) for some in done if some] if right is not None else []
    passed = pass_at_ks(counts, max(len(group.episodes) for group in groups))
    return Score(mean, low, high, count, errors, len(rewards), passed.get(1), passed, by)


def bounds(tasks: Sequence[Sequence[float]]) -> tuple[float, float, float, IntervalBy]:
    """Return the mean over tasks of each task's mean, the lower and upper end of its 95% interval, and the interval's method.

    If all values are 0 or 1, the mean is a share. Its interval is Wilson's for `effective_trials` trials. The interval of other
    means is Student's, which ignores any limits of the reward.
    """
    means = [math.fsum(values) / len(values) for values in tasks]
    mean, margin = interval(means)
    if any(value not in (0.0, 1.0) for values in tasks for value in values):
        return mean, mean - margin, mean + margin, "Student"
    low, high = wilson_interval(mean, effective_trials(means, [len(values) for values in tasks]))
    return mean, low, high, "Wilson"


def wilson_interval(share: float, trials: float) -> tuple[float, float]:
    """Return the 95% interval of a share, measured in `trials` independent trials. The interval contains the share and stays
    within 0 to 1.

    Wilson 1927, Probable inference, the law of succession, and statistical inference.
    """
    square = Z95**2 / trials
    middle = (share + square / 2) / (1 + square)
    margin = math.sqrt(share * (1 - share) * square + square**2 / 4) / (1 + square)
    return max(0.0, min(share, middle - margin)), min(1.0, max(share, middle + margin))


def effective_trials(shares: Sequence[float], sizes: Sequence[int]) -> float:
    """Return the number of independent trials whose mean has the same variance as the mean of the tasks' shares.

    With one episode per task, this is the number of tasks. With several episodes, it is the effective sample size p (1 - p) /
    variance, in which the variance is that of the tasks' mean. This size is reduced by the squared ratio of the normal quantile
    to Student's, because few tasks estimate the variance badly. The result is at least the number of tasks, and at most the
    number of episodes. If all shares are equal, it is the number of tasks.

    Korn and Graubard 1998, Confidence intervals for proportions with small expected number of positive counts estimated from
    survey data.

    Args:
        shares: the share of right episodes of each task.
        sizes: the number of episodes of each task.
    """
    tasks, mean = len(shares), math.fsum(shares) / len(shares)
    if max(shares) == min(shares):
        return tasks
    variance = math.fsum((share - mean) ** 2 for share in shares) / (tasks - 1) / tasks
    worth = mean * (1 - mean) / variance * (Z95 / student_quantile(tasks - 1)) ** 2
    return min(max(worth, tasks), tasks**2 / math.fsum(1 / size for size in sizes))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent values, and half the width of its 95% interval. With one value, the width is infinite.

    The interval is Student's t with n - 1 degrees of freedom, because few values estimate their variance badly. Student 1908,
    The probable error of a mean.
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.inf
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, student_quantile(len(values) - 1) * math.sqrt(variance / len(values))


def student_quantile(freedom: int) -> float:
    """Return the two-sided 95% quantile of Student's t with `freedom` degrees of freedom, which must be at least 1. The error
    is below 1e-5.

    From 10 degrees on, this is the Cornish-Fisher expansion around the normal quantile: Abramowitz and Stegun 1964, eq. 26.7.5.
    """
    if freedom <= len(T95):
        return T95[freedom - 1]
    z = Z95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))


def pass_at_ks(counts: Sequence[tuple[int, int]], size: int) -> dict[int, float]:
    """Return pass@k for k = 1, 2, 4, ... and `size`. For each k, only tasks with at least k done episodes are used.

    Args:
        counts: for each task, the number of done episodes and the number of right episodes.
        size: the number of episodes planned per task.
    """
    ks = sorted({size, *(2**power for power in range(size.bit_length()))} - {0})
    chances = {k: [pass_at(n, c, k) for n, c in counts if n >= k] for k in ks}
    return {k: math.fsum(values) / len(values) for k, values in chances.items() if values}


def pass_at(n: int, c: int, k: int) -> float:
    """Return the probability that k of n episodes, drawn without replacement, include at least one of the c right episodes.

    This is an unbiased estimate of pass@k. Chen et al. 2021, arXiv 2107.03374, eq. 1: 1 - C(n - c, k) / C(n, k), for 1 <= k <=
    n.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def is_right(
    parts: Mapping[str, float], weights: Mapping[str, float], correct: Collection[str] = (), env_parts: Collection[str] = ()
) -> bool | None:
    """Return True if all decisive parts of an episode's reward have their full value; None if no part is decisive.

    The decisive parts are those named in `correct`. If `correct` is empty, they are the env's own parts with the largest
    weight; several parts may have this weight. Parts in `env_parts`, which the env computes itself, have weight 1. All other
    parts belong to the run and are never decisive. Otherwise a run's penalty, which is never above 0, could make every episode
    wrong.

    Args:
        parts: the parts of the episode's reward.
        weights: the weights of the env's named rewards.
        correct: the parts that the env names as decisive.
        env_parts: the names of the parts that the env computes itself.
    """
    says = correct or _heaviest(weights, env_parts)
    return all(parts.get(name, 0.0) >= FULL_VALUE for name in says) if says else None


def _heaviest(weights: Mapping[str, float], env_parts: Collection[str]) -> Collection[str]:
    max_weight = max(weights.values(), default=0.0)
    if env_parts and max_weight < 1:
        return env_parts
    heaviest = [name for name, weight in weights.items() if weight == max_weight > 0]
    return [*heaviest, *env_parts] if max_weight == 1 else heaviest
