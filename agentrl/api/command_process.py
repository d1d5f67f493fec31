"""Runs commands of the command line in a child process, so the Python API trains in the same way as the terminal."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from agentrl.api.run import Run
from agentrl.api.store import COMMAND, StoreLocation
from agentrl.workflow.errors import AgentRLError

ERROR_PREFIX = "agentrl: "
FOLLOW_PREFIX = "Follow it: "
"""The start of the remark that says how to follow a run. It is not printed, because this process follows the run already."""


def ask(place: StoreLocation, *arguments: str, environment: Mapping[str, str] | None = None, quiet: bool = False) -> Any:
    """Run a command, and return the JSON that it prints. The command's remarks are printed to stderr. Raise AgentRLError if the
    command failed. The error has the class that belongs to the exit code.

    Args:
        quiet: True to leave out the remarks.
    """
    child = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=place.environment(**(environment or {})),
        start_new_session=True,  # Ctrl-C reaches this process alone: the command finishes what it writes
    )
    with child:
        assert child.stdout is not None
        assert child.stderr is not None
        error: list[str] = []
        for line in child.stderr:
            if error or line.startswith(ERROR_PREFIX):
                error.append(line)
            elif not quiet and not line.startswith(FOLLOW_PREFIX):
                print(line.rstrip("\n"), file=sys.stderr)
        printed = child.stdout.read()
    if child.returncode:
        raise error_of(child.returncode, "".join(error))
    return json.loads(printed)


def error_of(code: int, text: str) -> AgentRLError:
    """Convert a failed command's exit code and error text to the exception of the Python API."""
    message, _, hint = text.rstrip().removeprefix(ERROR_PREFIX).rpartition("\n  ") if "\n  " in text else (text.strip(), "", "")
    kinds: list[type[AgentRLError]] = [AgentRLError, *_kinds(AgentRLError)]
    kind = next((kind for kind in kinds if kind.exit_code == code), AgentRLError)
    return kind(message.removeprefix(ERROR_PREFIX) or f"The command ended with {code}.", hint)


def _kinds(kind: type[AgentRLError]) -> Iterator[type[AgentRLError]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _kinds(subclass)


def follow(place: StoreLocation, run: Run) -> None:
    """Print the lines of `agentrl watch` until the run ends or stops. A notebook also draws the growing curve."""
    child = subprocess.Popen(
        [*COMMAND, "watch", run.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=place.environment(PYTHONUNBUFFERED="1"),
        start_new_session=True,
    )
    with child, _growing_curve(run) as draw:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                print(line.rstrip("\n"), flush=True)
                draw()
        finally:
            child.terminate()


@contextmanager
def _growing_curve(run: Run) -> Iterator[Callable[[], None]]:
    """Show the curve of the run in a notebook."""
    shell = sys.modules.get("IPython")
    if shell is None or not hasattr(shell.get_ipython(), "kernel"):
        yield lambda: None
        return
    display = import_module("IPython.display").display(run.curve(), display_id=True)
    try:
        yield lambda: display.update(run.curve())
    finally:
        display.update(run.curve())
