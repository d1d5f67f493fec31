"""`agentrl changes`: what changed in an iteration."""

from typing import Annotated, Any

import typer

from agentrl.cli.console import Json, say, show_json, show_rows
from agentrl.cli.options import MAX_INTEGER
from agentrl.cli.resolve_targets import NewestRun, pick_run, stored_reader
from agentrl.workflow.runtime.shown_text import cell, one_line

QUESTION_CHARS = 60


def changes(
    run: NewestRun = None,
    iteration: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_INTEGER, help="The iteration (from 1) [the newest that is done].", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what changed in an iteration: rewards, errors, tasks, and warning signs in its update."""
    from agentrl.workflow.analysis.run_health import list_update_troubles
    from agentrl.workflow.store.reads.iteration_changes import load_iteration_changes
    from agentrl.workflow.store.reads.iteration_rows import load_iteration
    from agentrl.workflow.store.reads.run_rows import describe_run

    db = stored_reader()
    run = pick_run(db, run)
    number = iteration or max(1, describe_run(db, run).iterations_done)
    details, changed = load_iteration(db, run, number), load_iteration_changes(db, run, number)
    troubles = list_update_troubles(run, details.iteration, details.updates, details.groups, details.algorithm)
    if as_json:
        fields = ("before", "numbers", "parts", "errors", "tasks", "again", "examples")
        lines = [{"text": trouble.text, "command": trouble.command} for trouble in troubles]
        show_json({"iteration": number, "troubles": lines, **{name: getattr(changed, name) for name in fields}})
        return
    rows = [{"what": row["name"], **_values(row)} for row in changed.numbers]
    rows += [{"what": f"part {row['part']}", **_values(row)} for row in changed.parts]
    rows += [{"what": f"errors: {row['tool'] or ''} {row['error_class']}", **_values(row)} for row in changed.errors]
    show_rows([row for row in rows if (row["before"], row["now"]) != (None, None)], ("what", "before", "now", "change"))
    if changed.tasks:
        tasks = [{**row, **_values(row), "question": one_line(row["question"], QUESTION_CHARS)} for row in changed.tasks]
        show_rows(tasks, ("task", "question", "since", "before", "now", "change", "worst=worst episode"), ("question",))
    for trouble in troubles:
        say(f"{trouble.text} {trouble.command}".rstrip())
    if worst := changed.examples["worst"]:
        say(f"The worst episode: agentrl replay {worst['id']}")


def _values(row: Any) -> dict[str, Any]:
    now, before = row["now"], row["before"]
    is_known = now is not None and before is not None
    return {"now": now, "before": before, "change": f"{'+' * (now > before)}{cell(now - before)}" if is_known else None}
