"""The state of a watched run, and texts about its parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.cli.console import format_decimals

OPEN_STATUSES = ("planned", "running")

Row = Any


@dataclass
class RunView:
    """The state of a run: its row, its finished iterations, the counts of its open ones, its failures, a warning, and the
    evaluations of its own policies; what a search gained, why there is nothing to learn from, and the run's pages in
    trackers, all in lines."""

    run: Row
    iterations: list[Row] = field(default_factory=list)
    progress: Row = field(default_factory=dict)
    failure: Row = field(default_factory=dict)
    agent_error: Row = field(default_factory=dict)
    sampled_on: str = ""
    warning: str = ""
    evals: list[Row] = field(default_factory=list)
    gained: list[str] = field(default_factory=list)
    flat: list[str] = field(default_factory=list)
    trackers: list[str] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each finished iteration that has one."""
        return [row["mean_reward"] for row in self.iterations if row["mean_reward"] is not None]

    @property
    def is_active(self) -> bool:
        """Whether the run, or an evaluation of a done run, goes on."""
        left = self.run["status"] == "done" and any(row["status"] in OPEN_STATUSES for row in self.evals)
        return left or self.run["status"] in OPEN_STATUSES

    @property
    def has_episodes(self) -> bool:
        """Whether there is an episode to look at, with a turn or with an end."""
        open_ones = self.progress and (self.progress["finished"] or self.progress["sampled_tokens"])
        return bool(self.rewards or self.failure or open_ones or self.run["episodes_done"])

    @property
    def scores(self) -> list[float]:
        """Mean reward on the held-out tasks of each version that was measured."""
        return [row["mean_reward"] for row in self.evals if row["mean_reward"] is not None]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second in the newest five finished iterations."""
        seconds = sum(iteration_seconds(self.iterations)[-5:])
        return sum(row["tokens"] for row in self.iterations[-5:]) / seconds if seconds else None

    @property
    def seconds_left(self) -> float | None:
        """The time left at the pace of the newest ten finished iterations."""
        newest = [seconds for seconds in iteration_seconds(self.iterations)[-10:] if seconds]
        left = self.run["iterations"] - self.run["iterations_done"]
        return left * sum(newest) / len(newest) if newest else None


def iteration_seconds(rows: Sequence[Row]) -> list[float]:
    """Return the seconds of each iteration after the end of the one before: rollouts that go on during updates count once."""
    seconds, ended = [], None
    for row in rows:
        shared = (ended - row["started_at"]).total_seconds() if ended and row["started_at"] else 0.0
        seconds.append(max(0.0, (row["seconds"] or 0.0) - max(0.0, shared)))
        ended = row["finished_at"] or ended
    return seconds


def held_out_line(view: RunView) -> str:
    """Return the curve of the held-out scores, in one line."""
    run, scores = view.run, view.scores
    went = format_decimals(scores[0]) if len(scores) == 1 else f"{format_decimals(scores[0])} -> {format_decimals(scores[-1])}"
    best = (
        ""
        if run["best_version"] is None
        else f", best {format_decimals(run['best_reward'])}: {run['run']}@{run['best_version']}"
    )
    return f"held out {went}{best}"


def iteration_numbers(now: Row) -> str:
    """Return the open iterations: `iteration 3`, or `iterations 3 to 4` if rollouts go on during updates."""
    start, end = now["iteration"], now["through"]
    return f"iteration {start}" if start == end else f"iterations {start} to {end}"
