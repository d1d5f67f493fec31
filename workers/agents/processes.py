"""Agents' processes as their worker holds them: warm interpreters by agent, and one guardian for each running agent."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agentrl.workers.agents import domain
from agentrl.workers.agents.guardian import Order, Report, receive, send
from agentrl.workflow.errors import InfraError

START_SECONDS = 120.0
"""Time for an agent's module to be imported."""
MOST_SERVERS = 8
"""Warm interpreters at once; the one that was asked for least recently ends first."""
LOOK_SECONDS = 0.5
KEPT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
KEPT_PREFIXES = ("LC_", "PYTHON", "SSL_CERT_")


class AgentUnready(Exception):
    """The agent cannot be started here: its module cannot be imported."""


def clean_environment() -> dict[str, str]:
    """What of this process's environment an agent may see: no database, no broker, no secret."""
    return {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}


@dataclass
class AgentServer:
    """A warm interpreter (`server`)."""

    spec: str
    _control: socket.socket = field(init=False)
    _process: "subprocess.Popen[bytes]" = field(init=False)
    _stamps: Mapping[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "agentrl.workers.agents.server"]
        command += [str(theirs.fileno()), self.spec, json.dumps(sys.path)]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=clean_environment()
            )
        self._control.settimeout(START_SECONDS)
        try:
            said = receive(self._control)
        except TimeoutError as error:
            self.close()
            raise AgentUnready(f"it was not imported within {START_SECONDS:.0f} s") from error
        if said is None or "error" in said:
            self.close()
            raise AgentUnready(said["error"] if said else "its interpreter ended while it was imported")
        self._stamps = {file: _stamp(file) for file in said["files"]}

    @property
    def is_fresh(self) -> bool:
        """Whether it lives, and none of the files that it imported has changed since."""
        return self._process.poll() is None and all(_stamp(file) == stamp for file, stamp in self._stamps.items())

    def begin(self) -> socket.socket:
        """A new guardian's socket."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"x"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Ends it; guardians that run go on."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LOOK_SECONDS)
            return
        self._process.kill()
        self._process.wait()


def _stamp(file: str) -> object:
    try:
        stat = Path(file).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


@dataclass
class AgentServers:
    """The warm interpreters of this process, by agent."""

    _servers: "OrderedDict[str, AgentServer]" = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, spec: str) -> socket.socket:
        """A new guardian's socket, from an interpreter that has imported what the agent is now.

        Raises:
            AgentUnready: it cannot be imported.
            InfraError: the interpreter is gone.
        """
        with self._lock:
            server = self._servers.get(spec)
            if server is None or not server.is_fresh:
                if server is not None:
                    del self._servers[spec]
                    server.close()
                server = self._servers[spec] = AgentServer(spec)
            self._servers.move_to_end(spec)
            while len(self._servers) > MOST_SERVERS:
                self._servers.popitem(last=False)[1].close()
            try:
                return server.begin()
            except OSError as error:
                self._servers.pop(spec).close()
                raise InfraError(f"The interpreter of the agent {spec!r} is gone: {error}.") from error

    def close(self) -> None:
        """Ends all of them."""
        with self._lock:
            while self._servers:
                self._servers.popitem()[1].close()


servers = AgentServers()
"""Those of this process."""


def run(order: Order, spec: str, is_stopped: Callable[[], bool]) -> Report | None:
    """Runs an agent to its end; None where it was ended since `is_stopped`.

    Raises:
        AgentUnready: its module cannot be imported.
        InfraError: its processes were lost.
    """
    domain.hide()
    with servers.begin(spec) as guardian:
        try:
            send(guardian, asdict(order))
            guardian.settimeout(LOOK_SECONDS)
            while not is_stopped():
                with suppress(TimeoutError):
                    if not guardian.recv(1, socket.MSG_PEEK):
                        raise InfraError("The process that watched the agent is gone.")
                    guardian.settimeout(None)
                    return Report(**receive(guardian))
        except OSError as error:
            raise InfraError(f"The process that watched the agent is gone: {error}.") from error
    return None
