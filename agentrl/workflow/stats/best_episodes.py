"""Selects stored episodes for offline training: the best of each task, or pairs from each group. These are pure functions that
need no tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Candidate:
    """A done, untainted episode with a reward. `group` and `task` are ids of rows."""

    id: int
    group: int
    task: int
    reward: float


def select_best(candidates: Sequence[Candidate], min_reward: float | None = None, limit: int | None = None) -> list[Candidate]:
    """Candidates of at least `min_reward`, at most `limit` per task, in the order of their ids.

    Of a task's candidates the best are taken, and of equals the oldest: older policies are closer to the start.
    """
    good = [one for one in candidates if min_reward is None or one.reward >= min_reward]
    ranked = sorted(good, key=lambda one: (one.task, -one.reward, one.id))
    best = [one for _, some in groupby(ranked, key=lambda one: one.task) for one in list(some)[:limit]]
    return sorted(best, key=lambda one: one.id)


def select_pairs(candidates: Sequence[Candidate], limit: int = 1) -> list[tuple[Candidate, Candidate]]:
    """At most `limit` pairs (better, worse) per group: best and worst, second best and second worst, ...

    No episode is in two pairs, and the rewards of a pair differ.
    """
    ranked = sorted(candidates, key=lambda one: (one.group, -one.reward, one.id))
    pairs = []
    for _, members in groupby(ranked, key=lambda one: one.group):
        some = list(members)
        opposed = zip(some[: len(some) // 2], reversed(some), strict=False)
        pairs += [(better, worse) for better, worse in opposed if better.reward > worse.reward][:limit]
    return pairs
