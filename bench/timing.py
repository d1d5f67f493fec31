"""How long something takes, with its spread: what is compared takes turns, so that a busy machine slows all of it."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of some repetitions, each."""

    seconds: tuple[float, ...]

    @property
    def least(self) -> float:
        """The fastest: what it takes where nothing else runs."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    @property
    def p95(self) -> float:
        """All but one in twenty are as fast (of fewer than twenty: the slowest)."""
        return sorted(self.seconds)[-1 - len(self.seconds) // 20]


def alternate(tries: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, Spread]:
    """Times each of them so often, in turns, after one turn that only warms up."""
    taken: dict[str, list[float]] = {name: [] for name in tries}
    for repetition in range(repetitions + 1):
        for name, work in tries.items():
            began = time.perf_counter()
            work()
            if repetition:
                taken[name].append(time.perf_counter() - began)
    return {name: Spread(tuple(seconds)) for name, seconds in taken.items()}
