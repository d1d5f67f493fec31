"""Whether something is wrong in a run or in an iteration. The web page and the terminal read the same facts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.analysis.run_health import (
    FLAT_ITERATIONS,
    GroupCounts,
    HealthFact,
    IterationRecord,
    Trouble,
    describe_groups,
    describe_health,
    find_failures,
    find_iteration_troubles,
    has_no_signal,
    is_all_right,
    join_troubles,
    list_checked,
    list_flat_lines,
    list_health_facts,
    list_update_troubles,
)
from agentrl.workflow.store.driver_reader import Row, sql_read_transaction
from agentrl.workflow.store.reads import run_rows
from agentrl.workflow.store.reads.evidence_rows import count_error_classes
from agentrl.workflow.store.reads.iteration_rows import (
    IterationDetails,
    IterationFilter,
    UpdateFilter,
    count_groups,
    list_iterations,
    list_updates,
    load_solved_groups,
)
from agentrl.workflow.store.reads.paging import iterate_rows
from agentrl.workflow.store.reads.run_details import load_summaries
from agentrl.workflow.tables.views import IterationRow, RunRow


@dataclass(frozen=True, slots=True)
class NewestHealth:
    """The facts about the newest finished iteration of a run."""

    iteration: int
    facts: Sequence[HealthFact]


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """Whether something is wrong in a run.

    Args:
        run, status: the run's name and status.
        is_healthy: False if something is wrong. None if nothing is known, because no iteration with episodes has ended.
        sentence: the verdict in words.
        troubles: the problems, then the remarks that are no problems; one for each cause.
        health: the facts about the newest finished iteration; None if no iteration has ended.
        errors: the result of `count_error_classes`. A healthy run may have errors, if they are few.
    """

    run: str
    status: str
    is_healthy: bool | None
    sentence: str
    troubles: Sequence[Trouble]
    health: NewestHealth | None
    errors: Sequence[Row]


@sql_read_transaction
def judge_run(tx: Any, run: str) -> RunVerdict:
    """Return whether something is wrong in a run, or was in one of its iterations. `run` is the run's name or number; the
    commands name the run with it. Raise NotFoundError if there is no such run.
    """
    row = run_rows.describe_run(tx, run)
    summary = load_summaries(tx, [row])[row.id]
    algorithm = summary.algorithm if row.kind == "train" else None
    iterations = [*iterate_rows(list_iterations, tx, IterationFilter(row.run, status="done"))]
    updates: dict[int, list[Row]] = {}
    for update in iterate_rows(list_updates, tx, UpdateFilter(row.run)):
        updates.setdefault(update.iteration, []).append(update)
    counts = {number: GroupCounts(*numbers) for number, numbers in count_groups(tx, row.id).items()}
    records = [
        IterationRecord(one, updates.get(one.iteration, ()), counts.get(one.iteration, GroupCounts())) for one in iterations
    ]
    newest = iterations[: -FLAT_ITERATIONS - 1 : -1]
    of_run = {"waits": Trouble(f"It waits: {summary.waits_for}")} if summary.waits_for else {}
    of_run |= _find_run_troubles(tx, row, run, newest)
    troubles = join_troubles(of_run, find_iteration_troubles(run, records, algorithm))
    is_wrong, checked = any(not trouble.is_note for trouble in troubles), list_checked(records, algorithm)
    if row.status in ("paused", "failed"):  # a problem only if no other problem is the cause
        resume = Trouble("Resume it when the cause is gone.", f"agentrl resume {run}", is_note=is_wrong)
        troubles, is_wrong = [*troubles, resume] if is_wrong else [resume, *troubles], True
    return RunVerdict(
        run=row.run,
        status=row.status,
        is_healthy=False if is_wrong else True if checked else None,
        sentence=describe_health(row, len(iterations), checked, troubles),
        troubles=troubles,
        health=_describe_newest(tx, row, newest[0], algorithm) if newest else None,
        errors=count_error_classes(tx, row.run),
    )


def _find_run_troubles(tx: Any, run: RunRow, typed: str, newest: Sequence[IterationRow]) -> dict[str, Trouble]:
    """Return what went wrong in a run, by subject.

    Args:
        typed: the name or number of the run in the commands.
        newest: the run's newest FLAT_ITERATIONS finished iterations, the newest first.
    """
    troubles = {}
    if has_no_signal(run, newest):
        facts = run_rows.describe_flat_rewards(tx, run.run, newest[-1].iteration)
        if lines := list_flat_lines(facts):
            is_solved = is_all_right(facts)
            troubles["solved" if is_solved else "groups"] = Trouble("; ".join(map(str.strip, lines)), is_note=is_solved)
    if run.status in ("planned", "running"):
        return troubles
    failure, agents = run_rows.find_most_frequent_failure(tx, run.run), run_rows.find_most_frequent_agent_error(tx, run.run)
    return troubles | find_failures(failure, agents, run.episodes_done, typed)


def _describe_newest(tx: Any, run: RunRow, iteration: IterationRow, algorithm: str | None) -> NewestHealth:
    solved = load_solved_groups(tx, run.id, iteration.iteration, only_flat=True)
    return NewestHealth(iteration.iteration, list_health_facts(iteration, len(solved), algorithm))


def judge_iteration(details: IterationDetails, typed: str) -> list[Trouble]:
    """Return what is wrong in an iteration. `typed` is the name or number of the run in the commands."""
    record = IterationRecord(details.iteration, details.updates, _count_groups(details))
    return list_update_troubles(typed, record, details.algorithm)


def describe_iteration_groups(details: IterationDetails) -> str:
    """Return how many groups an iteration has, and how many of them teach nothing, as text."""
    return describe_groups(_count_groups(details), details.iteration)


def _count_groups(details: IterationDetails) -> GroupCounts:
    return GroupCounts(len(details.groups) + details.left_out, details.flat, details.right)
