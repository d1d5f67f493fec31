"""`agentrl changes`: whether something is wrong in a run, its largest changes of the mean reward, and what changed in one
iteration.
"""

from collections.abc import Iterator
from dataclasses import asdict
from shlex import quote
from typing import Annotated, Any

import typer

from agentrl.cli.console import Json, say, show, show_json, show_rows, show_wrapped
from agentrl.cli.options import MAX_INTEGER
from agentrl.cli.resolve_targets import NewestRun, pick_run, stored_reader
from agentrl.cli.run_view import OPEN_STATUSES
from agentrl.workflow.runtime.shown_text import cell, format_count, one_line

QUESTION_CHARS = 60
MAX_ERRORS = 5
"""The most classes of errors that are listed, the most frequent first."""


def changes(
    run: NewestRun = None,
    iteration: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_INTEGER, help="Show what changed in this iteration (from 1) instead.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say whether something is wrong in a run, and show the largest drop and the largest gain of its mean reward.

    With --iteration, show what changed in an iteration: rewards, errors, tasks, and warning signs in its update.
    """
    db = stored_reader()
    run = pick_run(db, run)
    if iteration is None:
        _show_run(db, run, as_json)
    else:
        _show_iteration(db, run, iteration, as_json)


def _show_run(db: Any, run: str, as_json: bool) -> None:
    from agentrl.workers.requests.run_verdict import judge_run
    from agentrl.workflow.analysis.run_health import describe_reward_change
    from agentrl.workflow.store.reads.iteration_changes import load_reward_extremes

    verdict, extremes = judge_run(db, run), load_reward_extremes(db, run)
    changed = {name: asdict(change) if change else None for name, change in (("drop", extremes.drop), ("gain", extremes.gain))}
    if as_json:
        show_json({**asdict(verdict), **changed})
        return
    below = [word for word, rows in (("notes", verdict.troubles), ("errors", verdict.errors)) if rows and verdict.is_healthy]
    show_wrapped(verdict.sentence + (f" The {' and '.join(below)} below are no problem." if below else ""))
    for trouble in verdict.troubles:
        show_wrapped(f"{'note' if trouble.is_note else 'problem'}: {trouble.text}", trouble.command)
    for row in verdict.errors[:MAX_ERRORS]:
        text = f"errors: {_error_name(row)} {format_count(row['errors'], 'time')} in {format_count(row['episodes'], 'episode')}"
        show_wrapped(text, f"agentrl episodes {run} --error {quote(one_line(row['error_class']))}")
    if verdict.health:
        facts = "; ".join(fact.text for fact in verdict.health.facts)
        show_wrapped(f"newest iteration, {verdict.health.iteration}: {facts}")
    for name, change in changed.items():
        if change is not None:
            text, cause = describe_reward_change(change)
            show(f"largest {name} of the mean reward: {text}")
            show_wrapped(f"  {cause}", f"agentrl changes {run} --iteration {change['iteration']}")
        else:
            show(f"largest {name} of the mean reward: none")
    if verdict.status not in OPEN_STATUSES:
        say(f"Where the seconds went: agentrl watch {run}")
    if verdict.health:
        say(f"What changed in the newest iteration: agentrl changes {run} --iteration {verdict.health.iteration}")


def _show_iteration(db: Any, run: str, number: int, as_json: bool) -> None:
    from agentrl.workers.requests.run_verdict import judge_iteration
    from agentrl.workflow.store.reads.iteration_changes import load_iteration_changes
    from agentrl.workflow.store.reads.iteration_rows import load_iteration

    details, changed = load_iteration(db, run, number), load_iteration_changes(db, run, number)
    troubles = judge_iteration(details, run)
    if as_json:
        fields = ("before", "numbers", "parts", "errors", "tasks", "again", "shared", "worst_count", "examples")
        lines = [{"text": trouble.text, "command": trouble.command} for trouble in troubles]
        show_json({"iteration": number, "troubles": lines, **{name: getattr(changed, name) for name in fields}})
        return
    rows = [{"what": row["name"], **_values(row)} for row in changed.numbers]
    rows += [{"what": f"part {row['part']}", **_values(row)} for row in changed.parts]
    rows += [{"what": f"errors: {_error_name(row)}", **_values(row)} for row in changed.errors]
    numbers = ("what", f"before=iteration {number - 1}", f"now=iteration {number}", "change")
    show_rows([row for row in rows if (row["before"], row["now"]) != (None, None)], numbers)
    if changed.tasks:
        tasks = [{**row, **_values(row), "question": one_line(row["question"], QUESTION_CHARS)} for row in changed.tasks]
        columns = (
            "task",
            "question",
            "previous=last sampled",
            "before=reward then",
            "now=reward now",
            "change",
            "worst=worst episode",
        )
        show_rows(tasks, columns, ("question",))
        say(f"`last sampled` is the last iteration before {number} that sampled the task. Rewards are the task's mean rewards.")
    for line in _list_task_notes(changed, number, len(details.groups) + details.left_out, run):
        say(line)
    for trouble in troubles:
        say(f"{trouble.text} {trouble.command}".rstrip())
    if all(trouble.is_note for trouble in troubles):
        say(f"Iteration {number} has no warning sign.")
    if worst := changed.examples["worst"]:
        others = changed.worst_count - 1
        tied = f" ({format_count(others, 'other episode')} with the same reward)" if others > 0 else ""
        say(f"The worst episode{tied}: agentrl replay {worst['id']}")


def _list_task_notes(changed: Any, number: int, tasks: int, run: str) -> Iterator[str]:
    """Yield sentences about the tasks that an iteration does not share with those before, and about the tasks left out."""
    from agentrl.workflow.store.reads.iteration_changes import MAX_TASKS

    if changed.before and tasks and not changed.shared:
        yield f"Iterations {changed.before} and {number} have no task in common."
    if new := (tasks - changed.again) * bool(changed.before):
        yield f"Left out: {format_count(new, 'task')} without a reward in this iteration or in an earlier one."
    if same := changed.again - len(changed.tasks):
        why = "with smaller changes or none" if len(changed.tasks) >= MAX_TASKS else "with the same mean reward as then"
        yield f"Left out: {format_count(same, 'task')} {why}. All: agentrl episodes {run} --iteration {number}"


def _error_name(row: Any) -> str:
    """Return the tool and the class of an error. The tool is empty for a call that could not be read, and None for an episode's
    own error.
    """
    tool = "" if row["tool"] is None else f"{row['tool'] or 'unreadable call'} "
    return f"{tool}{row['error_class']}"


def _values(row: Any) -> dict[str, Any]:
    now, before = row["now"], row["before"]
    is_known = now is not None and before is not None
    return {"now": now, "before": before, "change": f"{'+' * (now > before)}{cell(now - before)}" if is_known else None}
