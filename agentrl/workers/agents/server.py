"""A warm interpreter for agents. It has imported the agent's module. For each episode it forks a guardian, the process that
watches the agent.

The command is `python -P -m agentrl.workers.agents.server FD SPEC PATHS`. The interpreter first sends a message over the socket
FD. The message has the imported files and the source of the agent's module, or the error of the import. After that, the
interpreter receives one file descriptor per episode: the guardian's end of a socket. Its environment contains no secrets. It
ends when the worker has closed the other end of FD and all of its agents have ended. For programs SPEC is empty, because they
need no module.
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
    """Import the agent's module, and fork a guardian for each episode. Return when the worker has closed its socket and the
    last agent has ended.
    """
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
    """Import the agent. Return the function and the source of its module; the source is empty if it is not available."""
    from agentrl.workflow.agents.classes import as_function
    from agentrl.workflow.plugins import code_of, find

    function = as_function(find("agents", spec))
    try:
        return function, code_of("agents", spec)
    except (OSError, TypeError):
        return function, ""


def _own_files() -> list[str]:
    """Return the files of the imported modules that are not installed packages. If one of these files changes, the interpreter
    is stale.
    """
    installed = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(guardian.__file__)))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return sorted(file for file in files if file and not file.startswith(installed))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], json.loads(sys.argv[3]))
    os._exit(0)  # whatever threads the module has
