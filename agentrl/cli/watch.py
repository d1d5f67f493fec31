"""`agentrl watch`: follows a run to its end."""

import sys

import typer

from agentrl.cli.console import Json, show, show_json, show_lines
from agentrl.cli.follow import follow, load_view, summary
from agentrl.cli.resolve_targets import NewestRun, pick_run, stored_database


def watch(run: NewestRun = None, as_json: Json = False) -> None:
    """Follow a run to its end. With --json, print its present state."""
    db = stored_database()
    run = pick_run(db, run)
    if as_json:
        from agentrl.workflow.store.reads.run_seconds import load_run_seconds

        view = load_view(db, run)
        fields = ("run", "iterations", "progress", "evals", "machines")
        show_json({**{name: getattr(view, name) for name in fields}, "seconds": view.seconds or load_run_seconds(db, run)})
        return
    view = follow(db, run, sys.stdout.isatty(), show)
    show_lines(summary(view))
    if view.run["status"] != "done":
        raise typer.Exit(1)
