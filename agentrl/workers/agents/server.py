"""A warm interpreter for agents: it has imported the agent's module, and forks a guardian for each episode.

`python -P -m agentrl.workers.agents.server FD SPEC PATHS` first sends over the socket FD what it imported (the files, and the
source
of the agent's module), or why it cannot. Then it receives one descriptor per episode: the guardian's end of a socket. It starts
with an environment without secrets. It ends when the worker closes the other end of FD and all of its agents have ended. SPEC
is empty for programs, which need no module.
"""

import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from agentrl.workers.agents import guardian
from agentrl.workers.agents.rehearsal import rehearse
from agentrl.workers.agents.warden import Warden

WORDS = 2000


def main(control: socket.socket, spec: str, paths: list[str]) -> None:
    """Serve until the other end of the socket is closed and the last agent has ended."""
    sys.path[:] = paths
    try:
        function, source = _load(spec) if spec else (None, "")
        rehearse()
    except BaseException as error:  # noqa: BLE001 - anybody's module; its words go to the worker
        guardian.send(control, {"error": f"{type(error).__name__}: {error}"[:WORDS]})
        return
    guardian.send(control, {"files": _own_files(), "source": source})
    Warden(control, function).watch()


def _load(spec: str) -> tuple[Callable[..., Any], str]:
    """Import the agent; return the function and the source of its module, empty for a program."""
    from agentrl.workflow.agents.classes import as_function
    from agentrl.workflow.plugins import code_of, find

    function = as_function(find("agents", spec))
    try:
        return function, code_of("agents", spec)
    except (OSError, TypeError):
        return function, ""


def _own_files() -> list[str]:
    """Return the files of imported modules that are not installed packages: a change of one makes the interpreter stale."""
    installed = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(guardian.__file__)))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return sorted(file for file in files if file and not file.startswith(installed))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], json.loads(sys.argv[3]))
    os._exit(0)  # whatever threads the module has
