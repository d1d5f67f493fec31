"""`agentrl ui`: shows the database rows in a browser, and exports a run as one file."""

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.console import say, show
from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.settings import PAGE_HOST, PAGE_PORT

if TYPE_CHECKING:
    import socket

    from agentrl.workers.page.read_only import ReadOnlyStore

LIMIT_MB = 5.0


def ui(
    host: Annotated[str, typer.Option(help="Address to listen at; other machines need the printed token.")] = PAGE_HOST,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = PAGE_PORT,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open a browser.")] = False,
    database_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Another store [AGENTRL_DATABASE_URL].", show_default=False)
    ] = None,
    actions: Annotated[bool, typer.Option("--actions", help="Add buttons that verify, fork, rescore, tag, ...")] = False,
    demo: Annotated[bool, typer.Option("--demo", help="Show the demo run of the package.")] = False,
    export: Annotated[
        str | None, typer.Option(metavar="RUN", help="Export this run as one file instead.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="File for --export [RUN.html].", show_default=False)
    ] = None,
    episode: Annotated[
        list[int] | None,
        typer.Option(metavar="EPISODE", help="Episode that --export must include; repeatable.", show_default=False),
    ] = None,
    limit_mb: Annotated[float, typer.Option(min=1, max=1000, help="Maximum size of the exported file, in MB.")] = LIMIT_MB,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Show the database in a browser: runs, curves, groups, transcripts, tokens. The page only reads, and updates during runs.

    The command needs no other service and contacts no other host. Ctrl-C ends it.
    """
    from agentrl.workers.page import page_server

    if export is None and (out is not None or episode or force):
        raise ConfigError(
            "--out, --episode and --force require --export.", "For example: agentrl ui --export RUN --out run.html"
        )
    if demo and database_url is not None:
        raise ConfigError("--demo and --database-url exclude each other.", "Choose one.")
    store = _open_store(database_url, demo)
    if export is not None:
        _export(store, export, out, episode or [], limit_mb, force)
        return
    from secrets import token_urlsafe

    from agentrl.workers.page.routes.store_routes import describe_place

    with closing(_listen(host, port)) as listening:
        opened = page_server.prepare_door(listening, token_urlsafe(24), actions)
        show(f"agentrl ui at {opened.link}")
        say(f"{'With actions' if actions else 'Read-only'}: {describe_place(store)['place']}. Ctrl-C ends it.")
        if opened.rules.token:
            say(
                "Warning: other machines can reach the page over plain HTTP, and everyone who has the link can read everything."
            )
        if not no_browser:
            _open_browser(opened.first_link)
        page_server.serve_page(store, listening, opened.rules)


def _open_store(url: str | None, demo: bool) -> "ReadOnlyStore":
    from agentrl.workers.page.read_only import ReadOnlyStore
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store.reads import run_rows

    if demo:
        from agentrl.workers.page.demo import open_demo

        return ReadOnlyStore(open_demo())
    here = settings()
    where = here if url is None else here.model_copy(update={"database_url": url, "database_reader_url": ""})
    store = ReadOnlyStore(where)
    run_rows.find_newest_run(store)
    return store


def _listen(host: str, port: int) -> "socket.socket":
    from agentrl.workers.stack.listening import bind

    try:
        return bind(host, port, "")
    except ServiceError as error:
        with closing(bind(host, 0)) as other:
            free = other.getsockname()[1]
        raise ServiceError(f"Cannot listen at {host}:{port}: {_reason(error)}.", f"Type: agentrl ui --port {free}") from error


def _reason(error: ServiceError) -> str:
    cause = error.__cause__
    return str(getattr(cause, "strerror", None) or error.message)


def _open_browser(link: str) -> None:
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    import webbrowser

    webbrowser.open(link)


def _export(store: "ReadOnlyStore", run: str, out: Path | None, episodes: list[int], limit_mb: float, force: bool) -> None:
    import re

    from agentrl.workers.page.export import write_export

    file = out or Path(re.sub(r"[^\w.@-]+", "-", run).strip("-.")[:100] + ".html")
    left_out = write_export(store, run, file, episodes, int(limit_mb * 1_000_000), force, say)
    show(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
    if left_out:
        say(f"{left_out} A larger file contains more: --limit-mb {2 * limit_mb:.0f}")
