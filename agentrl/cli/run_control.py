"""`agentrl resume`, `pause` and `cancel`. Each command may be repeated. It prints which work is kept, and which work will be
done again.
"""

from collections.abc import Mapping
from typing import Annotated, Any
from uuid import uuid4

import typer

from agentrl.cli.console import Json, say, show, show_json
from agentrl.cli.follow import follow_to_end
from agentrl.cli.options import RunName
from agentrl.cli.resolve_targets import stored_database
from agentrl.cli.run_view import iteration_numbers
from agentrl.workflow.config import MAX_INT
from agentrl.workflow.errors import ConfigError, ServiceError, StateError, WorkerError
from agentrl.workflow.runtime.shown_text import format_count


def _more_option(what: str) -> Any:
    return typer.Option(min=1, max=MAX_INT, metavar="N", help=f"Extend the run by this many {what}, even if it is done.")


def resume(
    run: RunName,
    epochs: Annotated[int | None, _more_option("epochs")] = None,
    iterations: Annotated[int | None, _more_option("iterations")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
    as_json: Json = False,
) -> None:
    """Resume a paused or failed run, start the missing workers of a run, or extend a run."""
    from agentrl.cli.ensure_workers import ready_workers, with_resume_hint
    from agentrl.workers.requests.requirements import requirements_of
    from agentrl.workers.stack import broker
    from agentrl.workers.stack.control_loop import send_missing
    from agentrl.workflow.datasets import changed_files
    from agentrl.workflow.models.lookup import check_base
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store import control_reads, extend_run, planning
    from agentrl.workflow.store.iterations import staleness_of

    if epochs and iterations:
        raise ConfigError("--epochs and --iterations exclude each other.", "Leave one out.")
    longer = bool(epochs or iterations)
    row = control_reads.load_run_to_serve(stored_database(), run)
    if longer:
        extend_run.check_extendable(row, row["stored"])
    else:
        planning.check_resumable(row)
    check_base(row["base"], row["base_hash"])
    split = row["config"].get("dataset", {}).get("split", "")
    for name in changed_files(row["manifest"].get("datasets", {}), split):
        say(f"{name} has changed since {row['name']} was submitted. The run continues with its original tasks.")
        say(f"To train on the new rows, submit another run: agentrl submit --dataset {name}")
    needs = requirements_of(row["config"], row["weights"], row["base"], row["output_dir"], rolls_out=not row["stored"])
    separate = staleness_of(row["config"]) > 0
    try:
        missing = ready_workers(row["name"], needs, separate, there=False, fit=True)  # before the run is running again
    except (ServiceError, WorkerError) as error:
        options = f" --epochs {epochs}" if epochs else f" --iterations {iterations}" if iterations else ""
        raise with_resume_hint(error, row["name"], options) from error
    if longer:
        before = extend_run.extend(stored_database(), run, uuid4().hex[:8], epochs, iterations)
    else:
        resumed = _set_going(row)
        if resumed is None:  # the workers that were started for it are through with it
            _show_run(row["name"], "done", row["status"], as_json)
            return
        before = resumed
    if not broker.is_in_memory(settings()):
        send_missing()  # sends even if no control loop runs
    _show_run(run, "running", before["status"], as_json, before["iterations"])
    for line in missing:
        say(line)
    if wait:
        follow_to_end(stored_database(), row["name"])
    else:
        say(f"Follow it: agentrl watch {run}")


def pause(run: RunName, as_json: Json = False) -> None:
    """Pause a run after the work in progress."""
    from agentrl.workflow.store import planning, run_names

    before = run_names.find_run(stored_database(), run)["status"]
    planning.stop(stored_database(), run, "paused", "paused by hand")
    _show_run(run, "paused", before, as_json)
    say(f"Resume it: agentrl resume {run}")


def cancel(run: RunName, as_json: Json = False) -> None:
    """End a run for good, and keep its rows."""
    from agentrl.workflow.store import planning, run_names

    before = run_names.find_run(stored_database(), run)["status"]
    planning.stop(stored_database(), run, "cancelled", "cancelled by hand")
    _show_run(run, "cancelled", before, as_json)


def _set_going(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    from agentrl.workflow.store import planning
    from agentrl.workflow.store.reads import run_rows

    try:
        return planning.resume(stored_database(), row["name"])
    except StateError:
        if run_rows.describe_run(stored_database(), row["name"]).status != "done":
            raise
        return None


def _show_run(run: str, status: str, before: str, as_json: bool, length: int | None = None) -> None:
    from agentrl.workflow.store.reads import run_rows

    row, now = run_rows.describe_run(stored_database(), run), run_rows.count_progress(stored_database(), run)
    committed, redone = _describe_kept(row, now), _describe_redone(status, now)
    if as_json:
        document = {"run": row["run"], "status": status, "before": before, "iterations": row["iterations"]}
        show_json({**document, "kept": committed, "redone": redone})
        return
    longer = length is not None and length < row["iterations"]
    still = "" if longer else " already"
    show(f"{row['run']}: {status}" + (still if before == status else f" (was {before})"))
    if longer:
        show(f"  longer: {length} -> {format_count(row['iterations'], 'iteration')}")
    show(f"  kept:   {committed}")
    show(f"  redone: {redone}")


def _describe_kept(row: Any, now: Any) -> str:
    planned = format_count(row["iterations"], "iteration")
    done = f"{row['iterations_done']} of {planned}, policy version {row['policy_version']}, "
    which = "open iteration" if not now or now["iteration"] == now["through"] else f"open {iteration_numbers(now)}"
    over = f"; {now['finished']} of {format_count(now['episodes'], 'episode')} of the {which} ended" if now else ""
    return f"{done}{format_count(row['episodes_done'], 'episode')} done{over}"


def _describe_redone(status: str, now: Any) -> str:
    if status == "cancelled" or not now:
        return "nothing"
    left = now["episodes"] - now["finished"]
    if not left:
        return (
            f"no episode; {iteration_numbers(now)} train{'s' * (now['iteration'] == now['through'])} with those that are done"
        )
    open_episodes = f"{format_count(left, 'episode')} of {iteration_numbers(now)} {'has' if left == 1 else 'have'} not"
    if not now["running"]:
        return f"nothing; {open_episodes} begun"
    begun = "1 of them continues from its" if now["running"] == 1 else f"{now['running']} of them continue from their"
    return f"{open_episodes} ended; {begun} last committed step. Only unfinished turns and uncommitted updates are repeated."
