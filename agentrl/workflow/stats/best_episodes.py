"""Selects stored episodes for offline training: the best of each task, or pairs from each group. The functions are pure and
need no tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Candidate:
    """An episode that can be selected: it is done, untainted and has a reward. `group` and `task` are database ids."""

    id: int
    group: int
    task: int
    reward: float


def select_best(candidates: Sequence[Candidate], min_reward: float | None = None, limit: int | None = None) -> list[Candidate]:
    """Return the best candidates of each task, ordered by id: at most `limit` per task, each with a reward of at least
    `min_reward`.

    If rewards are equal, the older candidate is preferred, because an older policy is closer to the weights at the start.
    """
    good = [one for one in candidates if min_reward is None or one.reward >= min_reward]
    ranked = sorted(good, key=lambda one: (one.task, -one.reward, one.id))
    best = [one for _, some in groupby(ranked, key=lambda one: one.task) for one in list(some)[:limit]]
    return sorted(best, key=lambda one: one.id)


def select_pairs(candidates: Sequence[Candidate], limit: int = 1) -> list[tuple[Candidate, Candidate]]:
    """Return at most `limit` pairs (better, worse) per group: best and worst, second best and second worst, and so on.

    No episode is in two pairs, and the rewards of a pair differ.
    """
    ranked = sorted(candidates, key=lambda one: (one.group, -one.reward, one.id))
    pairs = []
    for _, members in groupby(ranked, key=lambda one: one.group):
        some = list(members)
        opposed = zip(some[: len(some) // 2], reversed(some), strict=False)
        pairs += [(better, worse) for better, worse in opposed if better.reward > worse.reward][:limit]
    return pairs
