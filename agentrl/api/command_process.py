"""Commands that the Python API runs in a process of the command line, so that there is one way to train.

What a command remarks is printed here as it comes; what it refuses is raised as the error that it was there.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.api.store_location import COMMAND, StoreLocation
from agentrl.workflow.errors import AgentRLError

SAID = "agentrl: "
"""What the line of an error begins with."""
NEXT = "Follow it: "
"""What the line begins with that says how to follow a run, which is followed here."""


def ask(place: StoreLocation, *words: str, environment: Mapping[str, str] | None = None, quiet: bool = False) -> Any:
    """Run a command and return the JSON that it prints; its remarks go to stderr.

    Raises:
        AgentRLError: what the command refused, in its words.
    """
    child = subprocess.Popen(
        [*COMMAND, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=place.environment(**(environment or {})),
        start_new_session=True,  # Ctrl-C is for whoever asked, who waits for what is half written
    )
    with child:
        assert child.stdout is not None
        assert child.stderr is not None
        error: list[str] = []
        for line in child.stderr:
            if error or line.startswith(SAID):
                error.append(line)
            elif not quiet and not line.startswith(NEXT):
                print(line.rstrip("\n"), file=sys.stderr)
        printed = child.stdout.read()
    if child.returncode:
        raise error_of(child.returncode, "".join(error))
    return json.loads(printed)


def error_of(code: int, said: str) -> AgentRLError:
    """Return the error that a command ended with."""
    message, _, hint = said.rstrip().removeprefix(SAID).rpartition("\n  ") if "\n  " in said else (said.strip(), "", "")
    kinds: list[type[AgentRLError]] = [AgentRLError, *_kinds(AgentRLError)]
    kind = next((kind for kind in kinds if kind.exit_code == code), AgentRLError)
    return kind(message.removeprefix(SAID) or f"The command ended with {code}.", hint)


def _kinds(kind: type[AgentRLError]) -> Iterator[type[AgentRLError]]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds(each)


def follow(place: StoreLocation, run: str) -> Iterator[str]:
    """Yield the lines of `agentrl watch` until the run ends or stops."""
    environment = place.environment(PYTHONUNBUFFERED="1")
    child = subprocess.Popen(
        [*COMMAND, "watch", run],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    with child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                yield line.rstrip("\n")
        finally:
            child.terminate()
