"""Follows a run: live on a terminal, or else with one line per finished iteration. At the end it prints a summary."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import typer

from agentrl.cli.console import (
    console,
    format_decimals,
    format_duration,
    format_interval,
    say,
)
from agentrl.cli.plot import plot
from agentrl.cli.run_view import OPEN_STATUSES, Row, RunView, held_out_line, iteration_seconds
from agentrl.cli.screen import live_lines
from agentrl.workflow.runtime.shown_text import Line, cell, format_count, one_line

if TYPE_CHECKING:
    from agentrl.workflow.store.reads.search_tree import SearchTree

POLL_SECONDS = 0.5
LINE_EVERY, FEW_ITERATIONS, MAX_SILENCE_SECONDS = 8, 16, 15.0
"""The rule for lines without a terminal. A run with up to `FEW_ITERATIONS` iterations has a line for each iteration. A longer
run has a line for every `LINE_EVERY`-th iteration, and for the first that ends after `MAX_SILENCE_SECONDS` without a line.
If an iteration takes longer than that, a line shows its progress.
"""
ALONE_SECONDS = 10.0
"""The time without a control loop after which a warning is shown, in seconds."""
ENDED_STATUSES = ("done", "cancelled")

TOO_FEW_NOTE = " (trains on the episodes that exist)"
SKIPPED_NOTE = " (skips the update of that iteration: none of its episodes can train)"
"""The note about what `resume` does with an open iteration whose episodes have all ended. If some of its episodes are done, the
note is `TOO_FEW_NOTE` instead.
"""

RESUME_HINT = "After fixing that"
"""The beginning of the hint for a failed run, before the command `agentrl resume`."""


def follow_to_end(db: Any, run: str) -> None:
    """Follow a run as `watch` does, with all output on stderr. Exit with 1 if its status is not done."""
    view = follow(db, run, sys.stderr.isatty(), say)
    for text, _ in summary(view):
        say(text)
    if view.run["status"] != "done":
        raise typer.Exit(1)


def load_view(db: Any, run: str, before: RunView | None = None) -> RunView:
    """Return the current state of the run. Only iterations that are not in `before` are read."""
    from agentrl.workflow.store.reads import run_rows
    from agentrl.workflow.store.reads.eval_results import EvalFilter, list_evals
    from agentrl.workflow.store.reads.iteration_rows import IterationFilter, list_iterations
    from agentrl.workflow.store.reads.load_rows import FRESH_SECONDS, load_machines
    from agentrl.workflow.store.reads.paging import iterate_rows
    from agentrl.workflow.store.reads.run_seconds import load_run_seconds
    from agentrl.workflow.store.run_reports import list_reports

    iterations = [] if before is None else before.iterations
    evals = [*iterate_rows(list_evals, db, EvalFilter(run))]  # before the row, which names the best one
    row = run_rows.describe_run(db, run)
    after = iterations[-1]["iteration"] if iterations else 0
    rows = iterate_rows(list_iterations, db, IterationFilter(run, after=after))
    fresh = [iteration for iteration in rows if iteration.status in ENDED_STATUSES]
    is_open = row["status"] in OPEN_STATUSES
    return RunView(
        row,
        [*iterations, *fresh],
        run_rows.count_progress(db, run),
        {} if is_open else run_rows.find_most_frequent_failure(db, run),
        {} if is_open else run_rows.find_most_frequent_agent_error(db, run),
        run_rows.why_sampling_on(db, run),
        evals=evals,
        gained=_gained(db, row),
        flat=before.flat if before is not None and not fresh else _flat_lines(db, row, [*iterations, *fresh]),
        trackers=[
            f"{report.tracker}: {report.error or report.url}" for report in list_reports(db, run) if report.error or report.url
        ],
        machines=load_machines(db, FRESH_SECONDS).newest() if is_open else [],
        seconds=[] if is_open else load_run_seconds(db, run),
        lost_workers=0 if is_open else run_rows.count_lost_workers(db, run),
    )


def _flat_lines(db: Any, run: Row, iterations: Sequence[Row]) -> list[str]:
    """Return lines that say why the newest iterations had no training signal."""
    from agentrl.workflow.analysis.run_health import FLAT_ITERATIONS, has_no_signal, list_flat_lines
    from agentrl.workflow.store.reads import run_rows

    if not has_no_signal(run, iterations):
        return []
    return list_flat_lines(run_rows.describe_flat_rewards(db, run["run"], iterations[-FLAT_ITERATIONS]["iteration"]))


def _gained(db: Any, row: Row) -> list[str]:
    if row["kind"] != "search" or row["status"] in OPEN_STATUSES:
        return []
    from agentrl.workflow.store.reads.search_tree import load_search_tree

    return gain_lines(load_search_tree(db, row["run"]))


def follow(db: Any, run: str, live: bool, write: Any) -> RunView:
    """Show the run until it ends or is paused. Ctrl-C prints the command that cancels the run, and exits with 130."""
    view, seen = None, time.monotonic()
    try:
        with _Live() if live else _Lines(write) as screen:
            while True:
                view = load_view(db, run, view)
                if view.run["status"] != "done":  # a done run needs no control loop
                    if is_somebody_working(db):
                        seen = time.monotonic()
                    alone = _no_control_loop_hint(run) if time.monotonic() - seen > ALONE_SECONDS else ""
                    view.warning = alone or _wait_line(db, view.run) or _failing_line(db, view)
                screen.show(view)
                if not view.is_active:
                    return view
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        say(f"Detached; the run continues. Stop it: agentrl cancel {run}")
        raise


@dataclass
class _Lines:
    """The display without a terminal: one line per finished iteration."""

    write: Any
    listed_count: int = 0
    written_count: int = 0
    wrote: float = -MAX_SILENCE_SECONDS
    began: float = field(default_factory=lambda: time.monotonic())
    measured: set[int] = field(default_factory=set)
    warned: str = ""
    flat: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ending: object) -> None:
        return None

    def show(self, view: RunView) -> None:
        for row, seconds in list(zip(view.iterations, iteration_seconds(view.iterations), strict=True))[self.listed_count :]:
            if view.run["kind"] != "search" and self._is_due(row, view.run["iterations"]):  # its mean reward says nothing
                self.write(iteration_line(row, view.run["iterations"], seconds))
                self.wrote = time.monotonic()
                self.written_count += 1
        self.listed_count = len(view.iterations)
        for row in view.evals:
            if row["status"] not in OPEN_STATUSES and row["id"] not in self.measured:
                self.measured.add(row["id"])
                self.write(eval_line(row, view.run["best_version"]))
        if view.flat and not self.flat:
            for line in view.flat:
                self.write(line)
        self.flat = view.flat
        if view.progress and time.monotonic() - max(self.wrote, self.began) >= MAX_SILENCE_SECONDS:
            self.write(progress_line(view))
            self.wrote = time.monotonic()
        if view.warning and view.warning != self.warned:
            say(view.warning)
        self.warned = view.warning
        self._say_left_out(view)

    def _say_left_out(self, view: RunView) -> None:
        left_out = self.listed_count - self.written_count
        if left_out and not view.is_active and view.run["kind"] != "search":
            query = f"SELECT * FROM v_iterations WHERE run = '{view.run['run']}'"
            say(f'Left out: the lines of {format_count(left_out, "iteration")}. All: agentrl sql "{query}"')

    def _is_due(self, row: Row, iterations: int) -> bool:
        is_listed = iterations <= FEW_ITERATIONS or row["iteration"] % LINE_EVERY == 0 or row["iteration"] == iterations
        return (
            is_listed
            or row["status"] == "cancelled"
            or bool(row["skipped"])
            or time.monotonic() - self.wrote >= MAX_SILENCE_SECONDS
        )


class _Live:
    """The display on a terminal, updated in place."""

    def __init__(self) -> None:
        from rich.live import Live

        self.live = Live(console=console(stderr=not sys.stdout.isatty()), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self.live.__enter__()
        return self

    def __exit__(self, *ending: Any) -> None:
        self.live.__exit__(*ending)

    def show(self, view: RunView) -> None:
        from rich.text import Text

        size = self.live.console.size
        self.live.update(Text("\n".join(live_lines(view, size.width, size.height))), refresh=True)


def progress_line(view: RunView) -> str:
    """Return one line about the open iterations."""
    now = view.progress
    which = cell(now["iteration"]) + (f"-{now['through']}" if now["through"] > now["iteration"] else "")
    counted = f"{now['finished']} of {format_count(now['episodes'], 'episode')} ended, {now['sampled_tokens']:,} tokens sampled"
    return f"iteration {which}/{view.run['iterations']}  {counted}"


def iteration_line(row: Row, iterations: int, seconds: float) -> str:
    """Return one line about a finished iteration that took this many seconds."""
    if row["status"] == "cancelled":
        return f"iteration {row['iteration']}/{iterations}  cancelled"
    parts = [
        f"iteration {row['iteration']}/{iterations}",
        f"epoch {row['epoch']}",
        f"reward {cell(row['mean_reward'])}",
        f"episodes {row['trainable']}/{row['episodes']}",
        *([f"groups {row['groups'] - row['dropped_groups']}/{row['groups']}"] if row["more_groups"] else []),
        f"tokens {row['tokens']}",
        f"calls {row['tool_calls']}",
        f"loss {cell(row['loss'])}",
        *([f"explained variance {cell(row['explained_variance'])}"] if row["explained_variance"] is not None else []),
        f"{seconds:.1f} s",
        *([f"staleness {row['staleness']}"] if row["staleness"] else []),
    ]
    return "  ".join([*parts, f"no step: {row['skipped']}"] if row["skipped"] else parts)


def eval_line(row: Row, best: int | None) -> str:
    """Return one line about the evaluation of a version."""
    head = f"held out  version {row['policy_version']}"
    if row["mean_reward"] is None:
        return f"{head}  {row['status']}  {row['reason']}".rstrip()
    parts = [head, f"mean {cell(row['mean_reward'])}", format_interval(row), f"n {row['episodes']}", f"errors {row['errors']}"]
    return "  ".join([*parts, "best so far"] if row["policy_version"] == best else parts)


def summary(view: RunView) -> list[Line]:
    """Return lines that describe the course of the run, and commands that show details."""
    run, name = view.run, view.run["run"]
    lines = [(f"{name}: {run['status']}" + (f" after {format_duration(run['seconds'])}" if run["seconds"] else ""), "bold")]
    if run["reason"]:
        lines.append((f"  {run['reason']}", "yellow"))
    lines += [(f"  {line}", "") for line in view.gained]
    if view.rewards and not view.gained:
        lines.append((f"  {_describe_rewards(view.rewards)}", ""))
        lines += [(line, "cyan") for line in plot(view.rewards)]
    if view.scores:
        lines.append((f"  {held_out_line(view)}", ""))
    lines += [(f"  {line}", "") for line in _seconds_lines(view)]
    if view.lost_workers:
        lost = f"{format_count(view.lost_workers, 'worker')} {'was' if view.lost_workers == 1 else 'were'} lost"
        lines.append((f"  {lost}, and the work went on from the last commit: agentrl events {name}", ""))
    lines += [(f"  {line}", "yellow") for line in view.flat]
    lines += [(f"  {line}", "") for line in view.trackers]
    lines += _failure_lines(view)
    if run["status"] in ("paused", "failed"):
        now = view.progress
        over = now and now["finished"] == now["episodes"]
        meant = (TOO_FEW_NOTE if now["done"] else SKIPPED_NOTE) if over else ""
        lines.append((f"  {'Resume it' if run['status'] == 'paused' else RESUME_HINT}: agentrl resume {name}{meant}", ""))
    if not view.has_episodes:
        return lines
    curve = f"    agentrl sql \"SELECT iteration, mean_reward, kl, tokens FROM v_iterations WHERE run = '{name}'\""
    listed = f"agentrl episodes {name}" + (" --max-reward 0" if view.rewards else "")
    return [
        *lines,
        ("  Look closer:", ""),
        (f"    {listed if run['episodes_done'] or not view.rewards else trained_on_query(name)}", ""),
        ("    agentrl replay EPISODE", ""),
        *([(f"    agentrl prompts {name}", "")] if run["kind"] == "search" else []),
        *([(curve, "")] if view.rewards and run["kind"] != "search" else []),
    ]


LEAST_SECONDS = 0.1
"""The shortest time that is divided."""


def _seconds_lines(view: RunView) -> list[str]:
    """Return lines that say where the run's seconds went. The parts add up to the total."""
    from agentrl.workflow.store.reads.run_seconds import REST, REST_MEANS

    lines = []
    for of, title in (
        ("run", "seconds of the run"),
        ("episodes", "seconds of its episodes, which run at the same time, added up"),
    ):
        rows = [row for row in view.seconds if row["of"] == of]
        total = sum(row["seconds"] for row in rows)
        if total < LEAST_SECONDS:
            continue
        lines.append(f"{title}: {total:.1f}")
        lines += [f"  {row['part']:<26} {row['seconds']:>9.1f} {row['share']:>6.1%}" for row in rows]
        if any(row["part"] == REST for row in rows):
            lines.append(f"  ({REST}, for example: {REST_MEANS[of]})")
        if of == "run" and view.evals:
            lines.append(f"  (not included: the seconds of {format_count(len(view.evals), 'evaluation')})")
    return lines


def trained_on_query(run: str) -> str:
    """Return the command that lists the episodes on which a run trained, for a run that trains on stored episodes."""
    return f"agentrl sql \"SELECT episode_id, task, advantage, fate FROM v_ledger WHERE run = '{run}' LIMIT 50\""


def _failure_lines(view: RunView) -> list[Line]:
    from agentrl.workflow.analysis.run_health import find_failures

    troubles = find_failures(view.failure, view.agent_error, view.run["episodes_done"], view.run["run"]).values()
    return [
        line for one in troubles for line in ((f"  {one.text}", "yellow" if one.is_note else "red"), (f"    {one.command}", ""))
    ]


def _describe_rewards(rewards: Sequence[float]) -> str:
    some = max(1, len(rewards) // 10)
    if len(rewards) == 1:
        return f"reward {format_decimals(rewards[0])} (one iteration)"
    first, last = sum(rewards[:some]) / some, sum(rewards[-some:]) / some
    meant = "the first and the last of" if some == 1 else f"mean of the first and the last {some} of"
    return f"reward {format_decimals(first)} -> {format_decimals(last)} ({meant} {len(rewards)} iterations)"


def is_somebody_working(db: Any) -> bool:
    """Return True if a control loop is running, or a supervisor that will start one."""
    from agentrl.workers.stack import embedded
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store import leases

    where = settings()
    return leases.service_holder(db, "control") is not None or (
        not where.broker_url and embedded.find_supervisor(where) is not None
    )


def _wait_line(db: Any, run: Row) -> str:
    from agentrl.workflow.store import blocked_runs

    waited = blocked_runs.find_wait_reason(db, run["id"])
    return f"{run['run']} waits: {waited}" if waited else ""


def _failing_line(db: Any, view: RunView) -> str:
    """Return a warning if most of the episodes that ended in the open iterations have failed; else an empty string. The text
    has no number that grows, because each new text is written.
    """
    from agentrl.workflow.analysis.run_health import MAX_ERROR_CHARS
    from agentrl.workflow.store.reads import run_rows

    now, name = view.progress, view.run["run"]
    if not now or 2 * now["done"] >= now["finished"]:
        return ""
    failure = run_rows.find_most_frequent_failure(db, name)
    if not failure:
        return ""
    listed = f"agentrl episodes {name} --status {failure['status']}"
    return f"Most episodes of iteration {now['iteration']} fail, with: {one_line(failure['error'], MAX_ERROR_CHARS)} ({listed})"


def _no_control_loop_hint(run: str) -> str:
    from agentrl.workflow.settings import settings

    start = "agentrl worker control" if settings().broker_url else f"agentrl resume {run}"
    return f"No control loop is running, so {run} may not make progress. Start one: {start}"


def gain_lines(tree: "SearchTree") -> list[str]:
    """Return lines about what a prompt search gained."""
    gain = tree.gain
    if gain is None:
        return [tree.sentences]
    interval = format_interval({"low": gain.low, "high": gain.high, "interval_by": gain.interval_by})
    difference = f"difference {cell(gain.difference)}, {interval}, p {cell(gain.p_value)} ({gain.method})"
    return [tree.sentences, f"  {difference}; better on {gain.won}, worse on {gain.lost}, equal on {gain.tied}"]
