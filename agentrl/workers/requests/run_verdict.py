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
    has_no_signal,
    is_all_right,
    list_failures,
    list_flat_lines,
    list_health_facts,
    list_iteration_troubles,
    list_update_troubles,
)
from agentrl.workflow.store.driver_reader import Row, sql_read_transaction
from agentrl.workflow.store.reads import run_rows
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
from agentrl.workflow.tables.views import IterationRow


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
        is_healthy: False if something is wrong. None if nothing is known, because no iteration has ended.
        sentence: the verdict in words.
        troubles: the problems, and the remarks that are no problems.
        health: the facts about the newest finished iteration; None if no iteration has ended.
    """

    run: str
    status: str
    is_healthy: bool | None
    sentence: str
    troubles: Sequence[Trouble]
    health: NewestHealth | None


@sql_read_transaction
def judge_run(tx: Any, run: str) -> RunVerdict:
    """Return whether something is wrong in a run, or was in one of its iterations. Raise NotFoundError if there is no such
    run.
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
    troubles = [Trouble(f"It waits: {summary.waits_for}")] if summary.waits_for else []
    troubles += list_run_troubles(tx, row, row.run, newest) + list_iteration_troubles(row.run, records, algorithm)
    problems = [trouble for trouble in troubles if not trouble.is_note]
    return RunVerdict(
        run=row.run,
        status=row.status,
        is_healthy=False if problems else True if iterations else None,
        sentence=describe_health(row, len(iterations), troubles),
        troubles=[*problems, *(trouble for trouble in troubles if trouble.is_note)],
        health=describe_newest(tx, row, newest[0], algorithm) if newest else None,
    )


def list_run_troubles(tx: Any, run: Row, typed: str, newest: Sequence[IterationRow]) -> list[Trouble]:
    """Return what went wrong in a run, and how to go on. Call this inside a transaction.

    Args:
        run: a row of v_runs.
        typed: the name or number of the run in the commands.
        newest: the run's newest FLAT_ITERATIONS finished iterations, the newest first.
    """
    troubles = []
    if has_no_signal(run, newest):
        facts = run_rows.describe_flat_rewards(tx, run["run"], newest[-1].iteration)
        if lines := list_flat_lines(facts):
            troubles.append(Trouble("; ".join(line.strip() for line in lines), is_note=is_all_right(facts)))
    if run["status"] in ("planned", "running"):
        return troubles
    failure = run_rows.find_most_frequent_failure(tx, run["run"])
    troubles += list_failures(failure, run_rows.find_most_frequent_agent_error(tx, run["run"]), typed)
    if run["status"] in ("paused", "failed"):
        troubles.append(Trouble("Resume it when the cause is gone.", f"agentrl resume {typed}"))
    return troubles


def describe_newest(tx: Any, run: Row, iteration: IterationRow, algorithm: str | None) -> NewestHealth:
    """Return the facts about a finished iteration of the run. Call this inside a transaction. `algorithm` is None for a run
    that does not train.
    """
    solved = load_solved_groups(tx, run["id"], iteration.iteration, only_flat=True)
    return NewestHealth(iteration.iteration, list_health_facts(iteration, len(solved), algorithm))


def judge_iteration(details: IterationDetails, typed: str) -> tuple[str, list[Trouble]]:
    """Return how many groups an iteration has, as text, and what is wrong in the iteration. `typed` is the name or number of
    the run in the commands.
    """
    counts = GroupCounts(len(details.groups) + details.left_out, details.flat, details.right)
    record = IterationRecord(details.iteration, details.updates, counts)
    return describe_groups(counts, details.iteration), list_update_troubles(typed, record, details.algorithm)
