"""Reward curves: kept between two calls of `make learn`, summed up, judged, and as a table in Markdown."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

WINDOW = 5
"""A mean of so many iterations is compared."""
GOAL = 0.9
FALL = 0.1
"""Who ends by this below the best it had has fallen."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One run: mean reward and seconds of each of its iterations.

    Args:
        algorithm: or what else is compared: the agent.
        options: what was typed for it, but for its seed.
        start: the beginning of the sha256 of the weights that it started from.
    """

    algorithm: str
    seed: int
    options: str
    start: str
    rewards: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """The seeds of one algorithm together.

    Args:
        mean: the mean curve of the seeds, low and high its lowest and highest; each point is the mean of the last WINDOW.
        ends: of each seed, the mean of its last WINDOW iterations.
        crossed: the first iteration, from 1, at which a mean of WINDOW iterations of the mean curve is GOAL or more.
        crossings: the same of each seed.
        seconds: median of an iteration.
    """

    algorithm: str
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    ends: tuple[float, ...]
    crossed: int | None
    crossings: tuple[int | None, ...]
    seconds: float

    @property
    def last(self) -> float:
        """The last WINDOW iterations of all seeds."""
        return mean(self.ends)


def load(file: Path, word: str = "algorithm") -> list[Curve]:
    """The runs of a file that `save` wrote; none where there is no file.

    Args:
        word: the key under which a row has what is compared.
    """
    rows = json.loads(file.read_text()) if file.exists() else []
    return [_curve(list(some), word) for _, some in groupby(rows, key=lambda row: (row[word], row["seed"]))]


def save(file: Path, curves: Sequence[Curve], word: str = "algorithm") -> None:
    """Writes one row per iteration and line, whole or not at all."""
    ordered = sorted(curves, key=lambda curve: (curve.algorithm, curve.seed))
    lines = ",\n".join(json.dumps(row) for curve in ordered for row in _rows(curve, word))
    beside = file.with_suffix(".new")
    beside.write_text(f"[\n{lines}\n]\n")
    beside.replace(file)


def moving(values: Sequence[float]) -> tuple[float, ...]:
    """At each point the mean of the last WINDOW values, of fewer at the beginning."""
    return tuple(mean(values[max(0, end - WINDOW) : end]) for end in range(1, len(values) + 1))


def crossing(values: Sequence[float]) -> int | None:
    """The first iteration, from 1, that ends WINDOW iterations whose mean is GOAL or more."""
    means = moving(values)
    return next((at for at in range(WINDOW, len(means) + 1) if means[at - 1] >= GOAL), None)


def summed_up(curves: Sequence[Curve]) -> list[Summary]:
    """One for each algorithm, the best first."""
    by_name = groupby(sorted(curves, key=lambda curve: (curve.algorithm, curve.seed)), key=lambda curve: curve.algorithm)
    return sorted((_summary(name, list(some)) for name, some in by_name), key=lambda found: -found.last)


def failures(found: Sequence[Summary]) -> list[str]:
    """What was promised and is not so, of the algorithms that are there."""
    by_name = {summary.algorithm: summary for summary in found}
    grpo, ppo = by_name.get("grpo"), by_name.get("ppo")
    wrong = []
    if grpo and grpo.last < GOAL:
        wrong.append(f"grpo's last {WINDOW} iterations average {grpo.last:.3f}, less than {GOAL}")
    if grpo and ppo and (ppo.crossed is None or grpo.crossed is None or ppo.crossed > 2 * grpo.crossed):
        wrong.append(f"ppo crosses {GOAL} at {_at(ppo.crossed)}, not within twice grpo's {_at(grpo.crossed)} iterations")
    return wrong


def table(found: Sequence[Summary], word: str = "algorithm") -> list[str]:
    """In Markdown."""
    lines = [
        f"| {word} | mean of the last {WINDOW} (lowest to highest seed) | crosses {GOAL} at (each seed) | s/iteration | |",
        "|---|---|---|---|---|",
    ]
    return lines + [
        f"| {one.algorithm} | {one.last:.3f} ({min(one.ends):.3f} to {max(one.ends):.3f}) "
        f"| {_at(one.crossed)} ({', '.join(_at(at) for at in one.crossings)}) | {one.seconds:.2f} | {remark(one)} |"
        for one in found
    ]


def remark(one: Summary) -> str:
    """What a person should know who thinks of taking it: empty where it learned, and kept what it had learned."""
    best = max(one.mean[WINDOW - 1 :])
    if one.last < best - FALL:
        return f"fell from {best:.2f}"
    return f"stays below {GOAL}: see its file" if one.crossed is None else ""


def _at(iteration: int | None) -> str:
    return "never" if iteration is None else str(iteration)


def _summary(name: str, curves: Sequence[Curve]) -> Summary:
    columns = list(zip(*(curve.rewards for curve in curves), strict=True))
    smooth = list(zip(*(moving(curve.rewards) for curve in curves), strict=True))
    return Summary(
        name,
        mean=tuple(map(mean, smooth)),
        low=tuple(map(min, smooth)),
        high=tuple(map(max, smooth)),
        ends=tuple(mean(curve.rewards[-WINDOW:]) for curve in curves),
        crossed=crossing([mean(column) for column in columns]),
        crossings=tuple(crossing(curve.rewards) for curve in curves),
        seconds=median(second for curve in curves for second in curve.seconds),
    )


def _rows(curve: Curve, word: str) -> Iterator[dict[str, Any]]:
    run = {word: curve.algorithm, "seed": curve.seed}
    how = {"options": curve.options, "start": curve.start}
    for iteration, (reward, seconds) in enumerate(zip(curve.rewards, curve.seconds, strict=True), 1):
        yield {**run, "iteration": iteration, "reward": reward, "seconds": round(seconds, 3), **how}


def _curve(rows: Sequence[dict[str, Any]], word: str) -> Curve:
    run = rows[0]
    rewards, seconds = (tuple(row[key] for row in rows) for key in ("reward", "seconds"))
    return Curve(run[word], run["seed"], run["options"], run["start"], rewards, seconds)
