"""Rewards: a file here scores an Episode. See `Reward` and `score`."""

import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping

from workflow.errors import RewardError
from workflow.plugins import find
from workflow.trajectory import Episode

Reward = Callable[[Episode], float]
"""A finished episode -> a finite number. One that raises fails its episode; it never counts as 0."""

MAX_NAME = 64
"""Characters in the name that a hook gives to a reward part, at most."""


def score(episode: Episode, weights: Mapping[str, float]) -> dict[str, float]:
    """The named parts of an episode's reward, each by the reward file of that name.

    Raises:
        RewardError: a reward raised, or returned what is no finite number.
    """
    parts = {}
    for name in weights:
        try:
            value = float(find("rewards", name)(episode))
        except (Exception, SystemExit) as error:
            raise RewardError(f"reward {name!r} raised {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise RewardError(f"reward {name!r} returned {value}")
        parts[name] = value
    return parts


def checked(parts: Mapping[str, float], source: str) -> dict[str, float]:
    """The parts that `source`, a hook, returned.

    Raises:
        RewardError: a value is no finite number, or a name is empty, too long or cannot be printed.
    """
    for name, value in parts.items():
        if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
            raise RewardError(f"{source} names a part {name[:200]!r}: a name has 1 to {MAX_NAME} printable characters")
        if not math.isfinite(value):
            raise RewardError(f"{source} returned {value} for {name!r}")
    return dict(parts)


def total(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The scalar: the weighted sum of the parts; a part without a weight (from a hook) counts 1.

    Raises:
        RewardError: the sum is too large for a number.
    """
    reward = sum(value * weights.get(name, 1.0) for name, value in parts.items())
    if not math.isfinite(reward):
        raise RewardError(f"the weighted sum of the reward parts is {reward}")
    return reward


def code_hash(weights: Mapping[str, float]) -> str:
    """Hash of the weights and of the whole file each reward is in: two sets with the same hash were scored by the same code."""
    files = {name: inspect.getsource(sys.modules[find("rewards", name).__module__]) for name in weights}
    text = "\0".join(f"{name}={weight}\0{files[name]}" for name, weight in sorted(weights.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
