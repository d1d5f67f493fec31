"""`agentrl logs`: shows the last lines of the embedded stack's logs, and follows the logs."""

import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from agentrl.cli.console import say, show
from agentrl.workflow.errors import NotFoundError, did_you_mean
from agentrl.workflow.runtime.process_output import read_end
from agentrl.workflow.runtime.shown_text import clean

PAUSE_SECONDS = 0.3
MAX_LINES = 10_000
END_BYTES = 1_000_000
MAX_LINE_CHARS = 2_000


def logs(
    role: Annotated[
        str | None,
        typer.Argument(
            metavar="ROLE",
            help="supervisor, redis, or a worker such as rollout [all].",
            show_default=False,
        ),
    ] = None,
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=1, max=MAX_LINES, help="Number of lines to show of each log.")
    ] = 20,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow: show new lines as they are written.")] = False,
) -> None:
    """Show the logs of this data folder's embedded stack. `agentrl worker` writes its log to its own terminal instead."""
    from agentrl.workflow.settings import settings

    files = _pick_logs(settings().stack_dir, role)
    places = {name: _show_end(name, file, lines, len(files) > 1) for name, file in files.items()}
    while follow:
        _show_new(files, places)
        time.sleep(PAUSE_SECONDS)


def _pick_logs(folder: Path, role: str | None) -> dict[str, Path]:
    there = {file.stem: file for file in sorted(folder.glob("*.log")) if file.is_file() and not file.is_symlink()}
    if not there:
        raise NotFoundError(f"No embedded stack has run in {str(folder.parent)!r} yet.", "Start one: agentrl up")
    log_name = role.replace(",", "-") if role else None
    logs = {name: file for name, file in there.items() if log_name in (None, name) or log_name in name.split("-")}
    if not logs:
        roles = {part for name in there for part in name.split("-")}
        raise NotFoundError(f"No process {str(role)!r:.60} has written a log here.", did_you_mean(str(role)[:60], roles))
    return logs


def _show_end(name: str, file: Path, lines: int, titled: bool) -> int:
    """Show the last lines of a log. Return the position after these lines, in bytes."""
    with file.open("rb") as log:
        newest = read_end(log, END_BYTES).removesuffix(b"\n").split(b"\n")[-lines:]
        end = log.tell()
    if titled:
        say(f"== {name}: {file}")
    _show_lines(newest)
    return end


def _show_new(files: Mapping[str, Path], places: dict[str, int]) -> None:
    for name, file in files.items():
        with file.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(places[name] if size >= places[name] else 0)  # a log that is shorter now was begun anew
            _show_lines(_read_whole_lines(log), f"{name}: " if len(files) > 1 else "")
            places[name] = log.tell()


def _read_whole_lines(log: BinaryIO) -> list[bytes]:
    """Read the complete lines, and set the file position after the last of them. A line longer than `END_BYTES` is split."""
    start = log.tell()
    data = log.read(END_BYTES)
    whole = data.rfind(b"\n") + 1 or (len(data) if len(data) == END_BYTES else 0)
    log.seek(start + whole)
    return data[:whole].removesuffix(b"\n").split(b"\n") if whole else []


def _show_lines(lines: Iterable[bytes], begin: str = "") -> None:
    for line in lines:
        text = line[: 4 * MAX_LINE_CHARS].decode(errors="replace")
        show(begin + clean(text[:MAX_LINE_CHARS]).replace("\n", " ") + ("..." if len(text) > MAX_LINE_CHARS else ""))
    sys.stdout.flush()
