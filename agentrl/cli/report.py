"""`agentrl report`: writes a run to trackers, also long after the run has ended, and shows its pages in the trackers."""

from contextlib import ExitStack
from typing import Annotated, Any

import typer

from agentrl.cli.console import Json, say, show, show_json
from agentrl.cli.options import RunName
from agentrl.cli.resolve_targets import stored_database
from agentrl.workflow.config import ReportConfig, build
from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.runtime.shown_text import format_count

_SAMPLES = ReportConfig.model_fields["samples"].description


def report(
    run: RunName,
    to: Annotated[
        str, typer.Option("--to", metavar="TRACKERS", help="wandb,trackio,tensorboard,mlflow or package.module:name.")
    ] = "",
    samples: Annotated[int, typer.Option("--report-samples", min=0, max=100, help=f"{_SAMPLES}.")] = 0,
    as_json: Json = False,
) -> None:
    """Write a run to trackers, or list the trackers that have it. Steps that a tracker already has are not written again."""
    from agentrl.workflow.plugins import find
    from agentrl.workflow.store import run_names, run_reports

    db = stored_database()
    row = run_names.find_run(db, run)
    trackers = build({"report.to": to}).report.to if to else ()
    if samples and not trackers:
        raise ConfigError("--report-samples requires --to.", "Add --to wandb.")
    for name in trackers:
        find("trackers", name)
    if trackers:
        run_reports.add_reports(db, row["name"], trackers, samples)
    chosen = [entry for entry in run_reports.list_reports(db, row["name"]) if not trackers or entry.tracker in trackers]
    if trackers and row["status"] == "running":
        _leave_to_control(db, row["name"])
    elif trackers:
        _write(db, chosen)
    rows = [entry for entry in run_reports.list_reports(db, row["name"]) if not trackers or entry.tracker in trackers]
    if as_json:
        names = ("tracker", "iteration", "url", "samples", "status", "error")
        show_json([{name: getattr(entry, name) for name in names} for entry in rows])
    for entry in () if as_json else rows:
        show(f"{entry.tracker}: {format_count(entry.iteration, 'iteration')}{f'; {entry.url}' if entry.url else ''}")
    if not rows:
        say(f"{row['name']} has no reports. Write one: agentrl report {row['name']} --to tensorboard")
    if trackers and row["status"] != "running":
        _check_written(row["name"], rows)


def _check_written(run: str, rows: list[Any]) -> None:
    """Print which reports another process is writing. Raise ServiceError if a report could not be written."""
    if others := [row.tracker for row in rows if not (row.error or row.status)]:
        say(f"Another process is writing {', '.join(others)}. Check again later: agentrl report {run}")
    if failed := [row.error for row in rows if row.error]:
        raise ServiceError("\n  ".join(failed))


def _leave_to_control(db: Any, run: str) -> None:
    from agentrl.workers.stack.presence import missing_control_hints

    say(f"{run} is running: the control loop writes its steps. Show them: agentrl report {run}")
    for line in missing_control_hints(db):
        say(line)


def _write(db: Any, chosen: list[Any]) -> None:
    from agentrl.workers.stack.embedded import log_file
    from agentrl.workers.stack.report_processes import ReportProcess
    from agentrl.workflow.settings import settings

    settings().stack_dir.mkdir(parents=True, exist_ok=True)
    with log_file(settings(), "reporter").open("ab") as output, ExitStack() as ends:
        processes = [ReportProcess(row, output.fileno()) for row in chosen]
        for process in processes:
            ends.callback(process.kill)
        for process in processes:
            process.process.wait()
            process.reap(db)
