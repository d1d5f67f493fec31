"""What an evaluation says: the mean reward of fresh episodes with its uncertainty, errors counted apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from workflow.trajectory import Group

Z95 = 1.959964
"""Two-sided 95% quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Score:
    """Mean reward of `episodes` done ones with its 95% interval; `errors` ended otherwise and are not in the mean."""

    mean: float
    low: float
    high: float
    episodes: int
    errors: int


def evaluate(groups: Sequence[Group]) -> Score:
    """The mean over tasks of each task's mean reward; its interval comes from the spread between tasks.

    Episodes of one task are alike, so that tasks, not episodes, are what is independent.
    """
    rewards = [[e.reward for e in group.episodes if e.trainable and e.reward is not None] for group in groups]
    means = [sum(values) / len(values) for values in rewards if values]
    done = sum(len(values) for values in rewards)
    errors = sum(len(group.episodes) for group in groups) - done
    if not means:
        return Score(math.nan, math.nan, math.nan, 0, errors)
    mean = sum(means) / len(means)
    if len(means) < 2:
        return Score(mean, mean, mean, done, errors)
    variance = sum((value - mean) ** 2 for value in means) / (len(means) - 1)
    margin = Z95 * math.sqrt(variance / len(means))
    return Score(mean, mean - margin, mean + margin, done, errors)
