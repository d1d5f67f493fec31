"""The watcher of an interpreter's guardians, the processes that each watch one agent. If a guardian is killed, the watcher ends
all processes that its agent started.

The watcher runs in the interpreter, which is the next subreaper above its guardians. So the processes of a killed guardian, and
only these, become children of the interpreter. An agent cannot reach the interpreter. The watcher keeps the connection of each
guardian open until all processes of the agent have ended. Only then does the worker learn of the loss, and the episode can
start again.
"""

import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentrl.workers.agents import guardian


@dataclass
class Warden:
    """Forks and watches guardians. A guardian is the process that watches one agent.

    Args:
        control: the socket over which the worker sends one file descriptor per guardian; guardians do not inherit it.
        function: the function that guardians call; None for programs.
    """

    control: socket.socket
    function: Callable[..., Any] | None
    _guardians: dict[int, tuple[int, socket.socket]] = field(default_factory=dict)
    _own: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        guardian.adopt_orphans()
        self._own = frozenset(guardian.children(os.getpid()))  # what the agent's module started when it was imported

    def watch(self) -> None:
        """Fork a guardian for each file descriptor that arrives. Return when the other end of `control` is closed and the last
        guardian has ended.
        """
        is_wanted = True
        while is_wanted or self._guardians:
            for ready in self._ready(is_wanted):
                if ready in self._guardians:
                    self._end(ready)
                    continue
                _, descriptors, _, _ = socket.recv_fds(self.control, 1, 1)
                is_wanted = bool(descriptors)
                if is_wanted:
                    self._fork(socket.socket(fileno=descriptors[0]))

    def _ready(self, is_wanted: bool) -> list[int]:
        waiting = select.poll()
        for descriptor in (*self._guardians, *([self.control.fileno()] if is_wanted else [])):
            waiting.register(descriptor, select.POLLIN)
        return [descriptor for descriptor, _ in waiting.poll()]

    def _fork(self, connection: socket.socket) -> None:
        pid = os.fork()
        if pid:
            self._guardians[os.pidfd_open(pid)] = pid, connection
            return
        code = 1
        try:
            self.control.close()
            for descriptor, (_, other) in self._guardians.items():  # another's worker is to see when that one ends
                os.close(descriptor)
                other.close()
            guardian.guard(connection, self.function)
            code = 0
        finally:
            os._exit(code)

    def _end(self, descriptor: int) -> None:
        """End the processes that the agent of a finished guardian left, then close the guardian's connection."""
        pid, connection = self._guardians.pop(descriptor)
        os.waitpid(pid, 0)
        os.close(descriptor)
        guardian.end_descendants({*self._own, *(pid for pid, _ in self._guardians.values())})
        connection.close()
