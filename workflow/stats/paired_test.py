"""Two policies on the same tasks: by how much their rewards differ, and whether that could be chance.

Each task is compared with itself, so that hard and easy ones do not blur the difference. The test is the sign-flip permutation
test: if the two were alike, each task's difference could as well have the other sign; the p-value is the share of all such
worlds in which the mean is at least as far from 0 as it is. Exact where the differences take few values, as with rewards of 0
and 1; else of `DRAWS` drawn worlds, keyed by a seed.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.workflow.stats.evaluation import IntervalBy, interval

DRAWS = 9_999
"""Worlds drawn where they are too many to be counted; the smallest p-value is then 1 / (DRAWS + 1)."""

MOST_STEPS = 1_000_000
"""Steps of counting, at most: about a second."""

SAME_TOLERANCE = 1e-9
"""Differences that differ by less are one."""


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """How much better the second is than the first on the tasks that both have a reward for.

    Args:
        first, second: their means over these tasks.
        difference, low, high: mean of second - first, with its 95% interval from the spread between tasks: Student's t, so
            that few tasks have a wide one, and one task has none (infinite). It may leave -1 to 1: no difference is a share.
        p_value: two-sided; NaN without a task.
        method: whether the worlds were all counted or drawn.
        won, lost, tied: tasks on which the second has more, less, the same.
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
        """Whose the interval is."""
        return "Student"

    @property
    def tasks(self) -> int:
        """How many were compared."""
        return self.won + self.lost + self.tied


def compare_paired(first: Mapping[int, float], second: Mapping[int, float], seed: int = 0) -> PairedComparison:
    """Compares the mean rewards of tasks; those that only one of them has are left out.

    Args:
        seed: keys the drawn worlds.
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
    """The two-sided p-value of differences that are alike around 0 if nothing differs.

    Fisher 1935, The Design of Experiments, section 21. Drawn worlds count this one too, so that the test keeps its level
    (Phipson and Smyth 2010, eq. 2).
    """
    sizes = Counter(round(abs(d) / SAME_TOLERANCE) for d in differences)
    del sizes[0]
    seen = abs(sum(round(d / SAME_TOLERANCE) for d in differences)) - len(differences)  # each was rounded by half at most
    worlds = _count_worlds(sizes)
    if worlds is not None:
        return min(1.0, math.fsum(share for total, share in worlds.items() if abs(total) >= seen)), "exact"
    draw = random.Random(seed)
    extreme = sum(abs(_draw_world(sizes, draw)) >= seen for _ in range(DRAWS))
    return (1 + extreme) / (1 + DRAWS), "drawn"


def _count_worlds(sizes: Mapping[int, int]) -> dict[int, float] | None:
    """Sum of the flipped differences -> the share of worlds with it; None where they are too many."""
    worlds, steps = {0: 1.0}, 0
    for size, count in sizes.items():
        steps += len(worlds) * (count + 1)
        if steps > MOST_STEPS:
            return None
        found: dict[int, float] = {}
        shares = [(size * (2 * up - count), math.comb(count, up) / 2**count) for up in range(count + 1)]
        for total, share in worlds.items():
            for moved, part in shares:
                found[total + moved] = found.get(total + moved, 0.0) + share * part
        worlds = found
    return worlds


def _draw_world(sizes: Mapping[int, int], draw: random.Random) -> int:
    """The sum in one world: of the differences of each size as many are positive as bits are set."""
    return sum(size * (2 * draw.getrandbits(count).bit_count() - count) for size, count in sizes.items())
