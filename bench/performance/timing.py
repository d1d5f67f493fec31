"""How long something takes, with its spread: what is compared takes turns, so that a busy machine slows all of it."""

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType


def alternate(
    tries: Mapping[str, Callable[[], object]],
    rounds: int = 5,
    warm_up: bool = True,
    clocks: Mapping[str, Callable[[], float]] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Times each of them so often, in turns, after one turn that only warms up. Seconds by name.

    Without the warm-up a round of minutes is not done for nothing. `clocks` of those that have another than the wall's.
    """
    taken: dict[str, list[float]] = {name: [] for name in tries}
    for number in range(-1 if warm_up else 0, rounds):
        for name, work in tries.items():
            clock = clocks.get(name, time.perf_counter)
            began = clock()
            work()
            if number >= 0:
                taken[name].append(clock() - began)
    return taken


def p95(seconds: list[float]) -> float:
    """All but one in twenty are as fast (of fewer than twenty: the slowest)."""
    return sorted(seconds)[-1 - len(seconds) // 20]
