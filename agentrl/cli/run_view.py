"""The state of a followed run, and texts about its parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.cli.console import format_decimals

OPEN_STATUSES = ("planned", "running")

Row = Any


@dataclass
class RunView:
    """The state of a run.

    Attributes:
        progress: the counts of the run's open iterations.
        failure, agent_error: the most frequent failure, and the most frequent error of the agent.
        sampled_on: the reason why more episodes than planned are sampled.
        warning: why the run is waiting, or the error of most of its open episodes.
        gained: lines about the gain of a prompt search.
        flat: lines that say why there is no training signal.
        trackers: lines with the run's pages in trackers.
        machines: the newest row of `v_machine` of each host that reports its load at present.
        seconds: for a run that has ended, where its seconds went. See `load_run_seconds`.
        lost_workers: for a run that has ended, how many workers were lost.
    """

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
    machines: list[Row] = field(default_factory=list)
    seconds: list[Row] = field(default_factory=list)
    lost_workers: int = 0

    @property
    def rewards(self) -> list[float]:
        """The mean rewards of the finished iterations. An iteration without a mean reward is left out."""
        return [row["mean_reward"] for row in self.iterations if row["mean_reward"] is not None]

    @property
    def is_active(self) -> bool:
        """True if the run is still running, or the run is done and one of its evaluations is still running."""
        left = self.run["status"] == "done" and any(row["status"] in OPEN_STATUSES for row in self.evals)
        return left or self.run["status"] in OPEN_STATUSES

    @property
    def has_episodes(self) -> bool:
        """True if an episode has ended or has a turn."""
        open_ones = self.progress and (self.progress["finished"] or self.progress["sampled_tokens"])
        return bool(self.rewards or self.failure or open_ones or self.run["episodes_done"])

    @property
    def scores(self) -> list[float]:
        """The mean held-out reward of each evaluated version."""
        return [row["mean_reward"] for row in self.evals if row["mean_reward"] is not None]

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens per second over the newest five finished iterations."""
        seconds = sum(iteration_seconds(self.iterations)[-5:])
        return sum(row["tokens"] for row in self.iterations[-5:]) / seconds if seconds else None

    @property
    def seconds_left(self) -> float | None:
        """The expected remaining time, in seconds, estimated from the newest ten finished iterations."""
        newest = [seconds for seconds in iteration_seconds(self.iterations)[-10:] if seconds]
        left = self.run["iterations"] - self.run["iterations_done"]
        return left * sum(newest) / len(newest) if newest else None


def iteration_seconds(rows: Sequence[Row]) -> list[float]:
    """Return the duration of each iteration, in seconds. Time in which two iterations overlap counts only for the earlier
    one.
    """
    seconds, ended = [], None
    for row in rows:
        shared = (ended - row["started_at"]).total_seconds() if ended and row["started_at"] else 0.0
        seconds.append(max(0.0, (row["seconds"] or 0.0) - max(0.0, shared)))
        ended = row["finished_at"] or ended
    return seconds


def held_out_line(view: RunView) -> str:
    """Return one line about the held-out scores: the first, the last and the best."""
    run, scores = view.run, view.scores
    went = format_decimals(scores[0]) if len(scores) == 1 else f"{format_decimals(scores[0])} -> {format_decimals(scores[-1])}"
    best = (
        ""
        if run["best_version"] is None
        else f", best {format_decimals(run['best_reward'])}: {run['run']}@{run['best_version']}"
    )
    return f"held out {went}{best}"


def iteration_numbers(now: Row) -> str:
    """Return the open iterations as text: `iteration 3`, or `iterations 3 to 4` if rollouts continue during updates."""
    start, end = now["iteration"], now["through"]
    return f"iteration {start}" if start == end else f"iterations {start} to {end}"
