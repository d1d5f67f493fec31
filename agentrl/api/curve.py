"""A run's rewards over its iterations: as numbers, as a line of text, and as SVG in a notebook."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.api import html
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.tables.views import EvalRow, IterationRow

if TYPE_CHECKING:
    import pandas

WIDTH, HEIGHT, MARGIN = 480, 160, 40
MAX_POINTS = 480
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Curve:
    """The mean rewards of a run's finished iterations, and the held-out rewards of its policies.

    Args:
        run: the run's name.
        iterations: the numbers of the iterations, counted from 1.
        rewards: the mean reward of each iteration; None if no episode of the iteration was scored.
        evals: the version and the held-out reward of each policy that was evaluated, sorted by version. Iteration k makes
            version k; version 0 is the policy at the start.
    """

    run: str
    iterations: tuple[int, ...]
    rewards: tuple[float | None, ...]
    evals: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, run: str, rows: Sequence[IterationRow], evals: Sequence[EvalRow]) -> "Curve":
        """Make the curve of a run from its iterations and the evaluations of its policies."""
        done = [row for row in rows if row.status == "done"]
        measured = {row.policy_version: row.mean_reward for row in evals if row.mean_reward is not None}
        iterations, rewards = tuple(row.iteration for row in done), tuple(row.mean_reward for row in done)
        return cls(run, iterations, rewards, tuple(sorted(measured.items())))

    def __len__(self) -> int:
        return len(self.iterations)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a DataFrame with the columns `reward` and `eval`, indexed by iteration. `eval` is the held-out reward of the
        policy that the iteration made, unlike `v_iterations.eval_reward`; the row 0 has that of the policy at the start.
        """
        import pandas

        rewards, evals = dict(zip(self.iterations, self.rewards, strict=True)), dict(self.evals)
        index = sorted({*rewards, *evals})
        values = {"reward": [rewards.get(at) for at in index], "eval": [evals.get(at) for at in index]}
        return pandas.DataFrame(values, index=pandas.Index(index, name="iteration"), dtype="float64")

    def __repr__(self) -> str:
        rewards = [reward for reward in self.rewards if reward is not None]
        if not rewards:
            return f"<curve of {self.run}: no iteration has ended>"
        low, high = min(rewards), max(rewards)
        points = _thinned(rewards, 40)
        levels = (round((len(BLOCKS) - 1) * (point - low) / (high - low)) if high > low else 0 for point in points)
        line = "".join(BLOCKS[level] for level in levels)
        return f"<curve of {self.run}: {rewards[0]:.3f} {line} {rewards[-1]:.3f}, {format_count(len(self), 'iteration')}>"

    def _repr_html_(self) -> str:
        rewards = [(at, reward) for at, reward in zip(self.iterations, self.rewards, strict=True) if reward is not None]
        series = [line for line in (("reward", rewards, "#1f77b4"), ("held out", self.evals, "#d62728")) if line[1]]
        if not series:
            return f"<p>{html.text(repr(self))}</p>"
        places, values = zip(*(point for _, points, _ in series for point in points), strict=True)
        low, high, ends = min(values), max(values), (min(places), max(places))
        lines = "".join(_line(points, ends, low, high, color) for _, points, color in series)
        legend = "".join(f"<tspan fill='{color}' dx='12'>{name}</tspan>" for name, _, color in series)
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' role='img' "
            f"font-family='sans-serif' font-size='11'><title>{html.text(self.run, 80)}</title>"
            f"<text x='{MARGIN}' y='12' fill='currentColor'>{html.text(self.run, 80)}{legend}</text>"
            f"<text x='0' y='{MARGIN // 2 + 8}' fill='currentColor'>{high:.3g}</text>"
            f"<text x='0' y='{HEIGHT - 16}' fill='currentColor'>{low:.3g}</text>"
            f"<text x='{WIDTH - MARGIN}' y='{HEIGHT - 2}' fill='currentColor'>{ends[1]}</text>{lines}</svg>"
        )


def _line(points: Sequence[tuple[int, float]], ends: tuple[int, int], low: float, high: float, color: str) -> str:
    step = max(1, len(points) // MAX_POINTS)
    first, last = ends
    placed = " ".join(
        f"{MARGIN + (WIDTH - 2 * MARGIN) * (at - first) / max(1, last - first):.1f},"
        f"{HEIGHT - 20 - (HEIGHT - 50) * (value - low) / ((high - low) or 1.0):.1f}"
        for at, value in [*points[::step], points[-1]]
    )
    dots = "".join(f"<circle cx='{x}' cy='{y}' r='2' fill='{color}'/>" for x, y in (one.split(",") for one in placed.split()))
    return f"<polyline points='{placed}' fill='none' stroke='{color}' stroke-width='1.5'/>{dots if len(points) < 60 else ''}"


def _thinned(values: Sequence[float], max_points: int) -> Sequence[float]:
    return values if len(values) <= max_points else [values[len(values) * n // max_points] for n in range(max_points)]
