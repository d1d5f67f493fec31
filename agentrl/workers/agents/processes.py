"""The processes of a worker's agents: a warm interpreter for each agent, and a supervisor (`guardian`) for each running
agent.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agentrl.workers.agents import domain
from agentrl.workers.agents.guardian import AgentReport, Order, receive, send
from agentrl.workflow.errors import InfraError
from agentrl.workflow.plugins import code_folder
from agentrl.workflow.runtime.socket_pair import socket_pair
from agentrl.workflow.settings import settings

START_SECONDS = 120.0
"""The longest time for the import of an agent's module."""
MAX_SERVERS = 8
"""The most warm interpreters at once; the least recently used one ends first."""
LOOK_SECONDS = 0.5
KEPT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
KEPT_PREFIXES = ("LC_", "PYTHON", "SSL_CERT_")


class AgentUnready(Exception):
    """The agent's module cannot be imported here."""


class _Unwanted(Exception):
    """The agent's start was cancelled."""


def clean_environment() -> dict[str, str]:
    """Return this process's environment without database, broker and secrets, for an agent."""
    return {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}


@dataclass
class AgentServer:
    """A warm interpreter (`server`). The constructor waits until it is ready or `is_stopped`; `source` is the source of the
    agent's module.
    """

    spec: str
    is_stopped: Callable[[], bool]
    source: str = field(init=False)
    _control: socket.socket = field(init=False)
    _process: "subprocess.Popen[bytes]" = field(init=False)
    _stamps: Mapping[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self._control, theirs = socket_pair()
        command = [sys.executable, "-P", "-m", "agentrl.workers.agents.server"]
        paths = [*sys.path, str(code_folder(settings()))]  # its environment names no data folder
        command += [str(theirs.fileno()), self.spec, json.dumps(paths)]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=clean_environment(),
                start_new_session=True,  # what a terminal interrupts is the worker, whose end ends it
            )
        self._await()
        reply = receive(self._control)
        if reply is None or "error" in reply:
            self._kill()
            raise AgentUnready(reply["error"] if reply else "its interpreter ended while it was imported")
        self.source = reply["source"]
        self._stamps = {file: _stamp(file) for file in reply["files"]}

    def _await(self) -> None:
        """Wait until the interpreter reports or ends."""
        deadline = time.monotonic() + START_SECONDS
        self._control.settimeout(LOOK_SECONDS)
        while True:
            with suppress(TimeoutError):
                self._control.recv(1, socket.MSG_PEEK)
                self._control.settimeout(START_SECONDS)
                return
            if self.is_stopped():
                self._kill()
                raise _Unwanted
            if time.monotonic() > deadline:
                self._kill()
                raise AgentUnready(f"it was not imported within {START_SECONDS:.0f} s")

    @property
    def is_fresh(self) -> bool:
        """Return whether the interpreter runs and no file that it imported has changed since."""
        return self._process.poll() is None and all(_stamp(file) == stamp for file, stamp in self._stamps.items())

    def begin(self) -> socket.socket:
        """Fork a guardian and return the socket that leads to it."""
        ours, theirs = socket_pair()
        with theirs:
            socket.send_fds(self._control, [b"x"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Let the interpreter end as soon as its running agents have ended; wait a moment for it."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LOOK_SECONDS)
        _ending[:] = [process for process in (*_ending, self._process) if process.poll() is None]

    def _kill(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


_ending: "list[subprocess.Popen[bytes]]" = []
"""Interpreters that are closed while their last agents still run."""


def _stamp(file: str) -> object:
    try:
        stat = Path(file).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


@dataclass(eq=False)
class _InterpreterSlot:
    """The place of one agent's interpreter. Its lock is needed to start, use or end the interpreter."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    server: AgentServer | None = None

    def end(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            server.close()


@dataclass
class AgentServers:
    """The warm interpreters of this process, one per agent. While one of them starts, others can be used and started."""

    _places: "OrderedDict[str, _InterpreterSlot]" = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, spec: str, is_stopped: Callable[[], bool]) -> socket.socket:
        """Fork a guardian from an interpreter that has imported the agent's present code, and return its socket.

        Raises:
            _Unwanted: `is_stopped` came first.
            AgentUnready: the agent cannot be imported.
            InfraError: the interpreter was lost.
        """
        with self._fresh(spec, is_stopped) as server:
            guardian = server.begin()
        self._end_oldest()
        return guardian

    def source(self, spec: str) -> str:
        """Return the present source of the agent's module, read by an interpreter of its own; empty for a program.

        Raises:
            AgentUnready: the agent cannot be imported.
            InfraError: the interpreter was lost.
        """
        with self._fresh(spec, lambda: False) as server:
            source = server.source
        self._end_oldest()
        return source

    @contextmanager
    def _fresh(self, spec: str, is_stopped: Callable[[], bool]) -> Iterator[AgentServer]:
        """Give the up-to-date interpreter of that agent, and keep other threads from using it meanwhile."""
        domain.hide()
        with self._lock:
            place = self._places.setdefault(spec, _InterpreterSlot())
            self._places.move_to_end(spec)
        while not place.lock.acquire(timeout=LOOK_SECONDS):
            if is_stopped():
                raise _Unwanted
        try:
            if place.server is None or not place.server.is_fresh:
                place.end()
                place.server = AgentServer(spec, is_stopped)
            yield place.server
        except OSError as error:
            place.end()
            raise InfraError(f"The interpreter of the agent {spec!r} is gone: {error}.") from error
        finally:
            place.lock.release()

    def close(self) -> None:
        """End all interpreters."""
        with self._lock:
            places = list(self._places.values())
        for place in places:
            with place.lock:
                place.end()

    def _end_oldest(self) -> None:
        """End the least recently used interpreters beyond the limit, except those that are being started or used."""
        with self._lock:
            warm = [place for place in self._places.values() if place.server is not None]
        for place in warm[: max(0, len(warm) - MAX_SERVERS)]:
            if place.lock.acquire(blocking=False):
                try:
                    place.end()
                finally:
                    place.lock.release()


servers = AgentServers()
"""The warm interpreters of this process."""


def run(order: Order, spec: str, is_stopped: Callable[[], bool]) -> AgentReport | None:
    """Run an agent to its end; return None if `is_stopped` ended it.

    Raises:
        AgentUnready: its module cannot be imported.
        InfraError: its processes were lost.
    """
    try:
        connection = servers.begin(spec, is_stopped)
    except _Unwanted:
        return None
    with connection as guardian:
        try:
            send(guardian, asdict(order))
            guardian.settimeout(LOOK_SECONDS)
            while not is_stopped():
                with suppress(TimeoutError):
                    if not guardian.recv(1, socket.MSG_PEEK):
                        raise InfraError("The agent's supervisor process is gone.")
                    guardian.settimeout(None)
                    return AgentReport(**receive(guardian))
        except OSError as error:
            raise InfraError(f"The agent's supervisor process is gone: {error}.") from error
    return None
