"""What it costs to run model-written code: a plain interpreter, a cold sandbox, a warm one, a session's cell.

All four take turns in each round, so that the machine's load meets them alike. The plain interpreter is the sandbox's own,
started as cheaply as this process can. Rates are of as many threads as programs at once.
"""

import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace

from agentrl.workflow.sandbox import CodeResult
from agentrl.workflow.sandbox.boxed import Boxed
from agentrl.workflow.sandbox.find import find_bwrap
from agentrl.workflow.sandbox.self_test import interpreters
from agentrl.workflow.settings import Settings
from bench.performance.report import Comparison, Measured, Table, load

CODE = "print(1)"
ROUNDS, CALLS = 7, 15
AT_ONCE = (1, 2, 4)
RATE_CALLS = 40
PLAIN = "plain python -I"


def measure() -> Measured:
    """Milliseconds per program of each kind, and programs per second."""
    settings = Settings()
    python = next(python for python, _ in interpreters(settings))
    with ExitStack() as stack:
        warm = find_bwrap(settings)
        assert isinstance(warm, Boxed)
        stack.enter_context(closing(warm))
        cold = stack.enter_context(closing(Boxed(replace(warm.launch, nests=False))))
        session = stack.enter_context(closing(cold.session()))
        kinds: dict[str, Callable[[], object]] = {
            PLAIN: lambda: subprocess.run([python, "-I", "-c", CODE], stdout=subprocess.PIPE, check=True),
            "cold": lambda: right(cold.run(CODE)),
            "warm": lambda: right(warm.run(CODE)),
            "cell": lambda: right(session.run(CODE)),
        }
        times = taken(kinds)
        rates = {kind: [rated(kinds[kind], at_once) for at_once in AT_ONCE] for kind in ("cold", "warm")}
    return told(times, rates)


def right(result: CodeResult) -> None:
    """The program ran, and said what it says."""
    if result.output != "1\n":
        raise RuntimeError(f"{CODE} ended as {result}")


def taken(kinds: dict[str, Callable[[], object]]) -> dict[str, list[list[float]]]:
    """Milliseconds, by kind and round; a first round warms up and does not count."""
    times: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for number in range(ROUNDS + 1):
        rounds = {kind: [timed(act) for _ in range(CALLS)] for kind, act in kinds.items()}
        for kind, seen in rounds.items():
            if number:
                times[kind].append(seen)
    return times


def timed(act: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def rated(act: Callable[[], object], at_once: int) -> float:
    """Calls per second of so many threads."""
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda _: act(), range(2 * at_once)))
        began = time.perf_counter()
        list(pool.map(lambda _: act(), range(RATE_CALLS)))
        return RATE_CALLS / (time.perf_counter() - began)


def told(times: dict[str, list[list[float]]], rates: dict[str, list[float]]) -> Measured:
    """Tables of medians, 95th percentiles and rates; each kind against the plain interpreter, round by round."""
    medians = {kind: [statistics.median(seen) for seen in rounds] for kind, rounds in times.items()}
    every = {kind: sorted(value for seen in rounds for value in seen) for kind, rounds in times.items()}
    rows = [[kind, statistics.median(seen), seen[int(len(seen) * 0.95)]] for kind, seen in every.items()]
    latency = Table(f"{CODE!r}, ms", ("kind", "median", "p95"), rows, load())
    columns = ("kind", *(f"{at_once} at once" for at_once in AT_ONCE))
    rate = Table("programs per second", columns, [[kind, *found] for kind, found in rates.items()], load())
    against = [Comparison(f"sandbox, {kind}", medians[kind], medians[PLAIN], "ms", PLAIN, "less") for kind in ("warm", "cell")]
    against.append(Comparison("sandbox, warm rate", rates["warm"], rates["cold"], "programs/s", "cold", "more"))
    return Measured([latency, rate], against)
