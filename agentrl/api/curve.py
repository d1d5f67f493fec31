"""A run's rewards over its iterations: as numbers, as a line of text, and as SVG in a notebook."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.api import html
from agentrl.workflow.tables.views import IterationRow

if TYPE_CHECKING:
    import pandas

WIDTH, HEIGHT, MARGIN = 480, 160, 40
MAX_POINTS = 480
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Curve:
    """The finished iterations of a run: the mean reward of each, and its held-out reward if one was measured.

    Args:
        run: the run's name.
        iterations: the numbers of the iterations, counted from 1.
        rewards: the mean reward of each iteration; None if no episode of the iteration was scored.
        evals: for each iteration, the held-out reward of the policy with which the iteration began; None if that policy was not
            evaluated.
    """

    run: str
    iterations: tuple[int, ...]
    rewards: tuple[float | None, ...]
    evals: tuple[float | None, ...]

    @classmethod
    def of(cls, run: str, rows: Sequence[IterationRow]) -> "Curve":
        """Make the curve of a run from its iteration rows."""
        done = [row for row in rows if row.status == "done"]
        return cls(
            run,
            tuple(row.iteration for row in done),
            tuple(row.mean_reward for row in done),
            tuple(row.eval_reward for row in done),
        )

    def __len__(self) -> int:
        return len(self.iterations)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a DataFrame with the columns `reward` and `eval`, indexed by iteration."""
        import pandas

        values = {"reward": self.rewards, "eval": self.evals}
        return pandas.DataFrame(values, index=pandas.Index(self.iterations, name="iteration"), dtype="float64")

    def __repr__(self) -> str:
        rewards = [reward for reward in self.rewards if reward is not None]
        if not rewards:
            return f"<curve of {self.run}: no iteration has ended>"
        low, high = min(rewards), max(rewards)
        points = _thinned(rewards, 40)
        levels = (round((len(BLOCKS) - 1) * (point - low) / (high - low)) if high > low else 0 for point in points)
        line = "".join(BLOCKS[level] for level in levels)
        return f"<curve of {self.run}: {rewards[0]:.3f} {line} {rewards[-1]:.3f}, {len(self)} iterations>"

    def _repr_html_(self) -> str:
        columns = (("reward", self.rewards, "#1f77b4"), ("held out", self.evals, "#d62728"))
        values = [value for _, column, _ in columns for value in column if value is not None]
        if not values:
            return f"<p>{html.text(repr(self))}</p>"
        low, high = min(values), max(values)
        lines = "".join(_line(self.iterations, column, low, high, color) for _, column, color in columns)
        legend = "".join(
            f"<tspan fill='{color}' dx='12'>{name}</tspan>"
            for name, column, color in columns
            if any(value is not None for value in column)
        )
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' role='img' "
            f"font-family='sans-serif' font-size='11'><title>{html.text(self.run, 80)}</title>"
            f"<text x='{MARGIN}' y='12' fill='currentColor'>{html.text(self.run, 80)}{legend}</text>"
            f"<text x='0' y='{MARGIN // 2 + 8}' fill='currentColor'>{high:.3g}</text>"
            f"<text x='0' y='{HEIGHT - 16}' fill='currentColor'>{low:.3g}</text>"
            f"<text x='{WIDTH - MARGIN}' y='{HEIGHT - 2}' fill='currentColor'>{self.iterations[-1]}</text>{lines}</svg>"
        )


def _line(iterations: Sequence[int], values: Sequence[float | None], low: float, high: float, color: str) -> str:
    points = [(at, value) for at, value in zip(iterations, values, strict=True) if value is not None]
    if not points:
        return ""
    step = max(1, len(points) // MAX_POINTS)
    first, last = iterations[0], iterations[-1]
    placed = " ".join(
        f"{MARGIN + (WIDTH - 2 * MARGIN) * (at - first) / max(1, last - first):.1f},"
        f"{HEIGHT - 20 - (HEIGHT - 50) * (value - low) / ((high - low) or 1.0):.1f}"
        for at, value in [*points[::step], points[-1]]
    )
    dots = "".join(f"<circle cx='{x}' cy='{y}' r='2' fill='{color}'/>" for x, y in (one.split(",") for one in placed.split()))
    return f"<polyline points='{placed}' fill='none' stroke='{color}' stroke-width='1.5'/>{dots if len(points) < 60 else ''}"


def _thinned(values: Sequence[float], max_points: int) -> Sequence[float]:
    return values if len(values) <= max_points else [values[len(values) * n // max_points] for n in range(max_points)]
