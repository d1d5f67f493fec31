"""A paired test of two policies on the same tasks: the difference of their rewards, and whether chance explains it.

Each task is compared with itself, so the difficulty of tasks has no influence. The test is the sign-flip permutation test: if
the two policies were equally good, the difference on each task could equally well have the other sign. A "world" is one
combination of signs. The p-value is the share of all worlds in which the mean is at least as far from 0 as the observed mean.
It is exact if the differences have few values, as with rewards of 0 and 1. Otherwise it is estimated from `DRAWS` worlds, drawn
with a seed.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.workflow.stats.evaluation import IntervalBy, interval

DRAWS = 9_999
"""The number of worlds that are drawn if there are too many to enumerate. The smallest p-value is then 1 / (DRAWS + 1)."""

MAX_DRAWN = 20_000_000
"""The most differences in all drawn worlds together, which take about two seconds. With more than 2000 different differences,
fewer worlds are drawn.
"""

MAX_STEPS = 1_000_000
"""The most steps for enumerating worlds, which take about a second."""

SAME_TOLERANCE = 1e-9
"""The largest difference between two rewards that are treated as equal."""


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """The difference between two policies on the tasks for which both have a reward.

    Args:
        first, second: the mean reward of each policy over these tasks.
        difference: the mean of second - first.
        low, high: the ends of the 95% interval of the difference, by Student's t from the variance between tasks. The interval
            is wide for few tasks and infinite for one task. It may exceed -1 to 1, because a difference is not a share.
        p_value: the two-sided p-value; NaN if no task was compared.
        method: `exact` if all worlds were enumerated, else `drawn`.
        won, lost, tied: the numbers of tasks on which the second policy's reward is higher, lower or equal.
    """

    first: float
    second: float
    difference: float
    low: float
    high: float
    p_value: float
    method: Literal["exact", "drawn"]
    won: int
    lost: int
    tied: int

    @property
    def interval_by(self) -> IntervalBy:
        return "Student"

    @property
    def tasks(self) -> int:
        """The number of compared tasks."""
        return self.won + self.lost + self.tied


def compare_paired(first: Mapping[int, float], second: Mapping[int, float], seed: int = 0) -> PairedComparison:
    """Compare two policies by their mean rewards per task. A task for which one policy has no reward is left out.

    Args:
        first, second: the mean rewards by task.
        seed: the seed of the drawn worlds.
    """
    tasks = [task for task in first if task in second]
    if not tasks:
        nothing = math.nan
        return PairedComparison(nothing, nothing, nothing, nothing, nothing, nothing, "exact", 0, 0, 0)
    differences = [second[task] - first[task] for task in tasks]
    mean, margin = interval(differences)
    p_value, method = sign_flip(differences, seed)
    won, lost = sum(d > SAME_TOLERANCE for d in differences), sum(d < -SAME_TOLERANCE for d in differences)
    return PairedComparison(
        first=_mean(first, tasks),
        second=_mean(second, tasks),
        difference=mean,
        low=mean - margin,
        high=mean + margin,
        p_value=p_value,
        method=method,
        won=won,
        lost=lost,
        tied=len(tasks) - won - lost,
    )


def _mean(rewards: Mapping[int, float], tasks: Sequence[int]) -> float:
    return math.fsum(rewards[task] for task in tasks) / len(tasks)


def sign_flip(differences: Sequence[float], seed: int = 0) -> tuple[float, Literal["exact", "drawn"]]:
    """Return the two-sided p-value and its method. Under the null hypothesis, the differences are symmetric around 0.

    Differences are rounded to multiples of `SAME_TOLERANCE`. The p-value is the share of worlds whose mean is at least as far
    from 0 as the observed mean, within `SAME_TOLERANCE`.

    Fisher 1935, The Design of Experiments, section 21. If worlds are drawn, the observed world is added to them, so that the
    test keeps its level (Phipson and Smyth 2010, eq. 2).
    """
    sizes = Counter(round(abs(d) / SAME_TOLERANCE) for d in differences)
    del sizes[0]
    # In sums: each difference is rounded by half a step at most, in the observed world and in the other.
    seen = abs(sum(round(d / SAME_TOLERANCE) for d in differences)) - len(differences)
    worlds = _count_worlds(sizes)
    if worlds is not None:
        return min(1.0, math.fsum(share for total, share in worlds.items() if abs(total) >= seen)), "exact"
    draw, draws = random.Random(seed), min(DRAWS, MAX_DRAWN // len(sizes))
    extreme = sum(abs(_draw_world(sizes, draw)) >= seen for _ in range(draws))
    return (1 + extreme) / (1 + draws), "drawn"


def _count_worlds(sizes: Mapping[int, int]) -> dict[int, float] | None:
    """Return the share of worlds for each sum of differences; None if there are too many worlds to enumerate."""
    worlds, steps = {0: 1.0}, 0
    for size, count in sizes.items():
        steps += len(worlds) * (count + 1)
        if steps > MAX_STEPS:
            return None
        next_worlds: dict[int, float] = {}
        shares = [(size * (2 * up - count), math.comb(count, up) / 2**count) for up in range(count + 1)]
        for total, share in worlds.items():
            for moved, part in shares:
                next_worlds[total + moved] = next_worlds.get(total + moved, 0.0) + share * part
        worlds = next_worlds
    return worlds


def _draw_world(sizes: Mapping[int, int], draw: random.Random) -> int:
    """Draw a world, and return the sum of its differences. Random bits of 1 count the positive ones of each size."""
    return sum(size * (2 * draw.getrandbits(count).bit_count() - count) for size, count in sizes.items())
