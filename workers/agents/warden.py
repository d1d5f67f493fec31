"""The warden of a guardian: should something kill that, the warden ends what its agent left, in whatever session it is.

It is a process of its own above the guardian, and the next subreaper: what loses the guardian becomes its child. The agent can
reach it no more than its guardian. It holds the guardian's connection, so that the worker hears of the loss only when nothing
of the agent is left, and the episode can begin anew.
"""

import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from agentrl.workers.agents import guardian


def watch(connection: socket.socket, function: Callable[..., Any] | None) -> None:
    """Forks the guardian, which carries out the order that comes over the connection, and waits for its end."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    guardian.adopt_orphans()
    pid = os.fork()
    if pid == 0:
        guardian.guard(connection, function)
        return
    os.waitpid(pid, 0)
    guardian.end_descendants()
