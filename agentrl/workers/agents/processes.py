"""The processes of a worker's agents: a warm interpreter for each agent function, and a supervisor process (`guardian`) for
each running agent.
"""

import json
import os
import re
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from agentrl.workers.agents import domain
from agentrl.workers.agents.guardian import AgentReport, Order, receive, send
from agentrl.workflow.errors import InfraError
from agentrl.workflow.plugins import code_folder
from agentrl.workflow.runtime.socket_pair import socket_pair
from agentrl.workflow.settings import settings

START_SECONDS = 120.0
"""The longest import of an agent's module, in seconds."""
MAX_SERVERS = 8
"""The most warm interpreters at once. If there are more, the least recently used interpreter ends."""
LOOK_SECONDS = 0.5
KEPT = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
KEPT_PREFIXES = ("LC_", "PYTHON")
_HASHED = re.compile(r"[0-9a-f]{8}\.\d+")
"""The pattern of the names of certificates in a folder that OpenSSL can search."""


class AgentUnready(Exception):
    """The error that this worker cannot import the agent's module."""


class _Unwanted(Exception):
    """The exception that ends a start because the agent is no longer needed."""


def clean_environment() -> dict[str, str]:
    """Return the environment that agents receive: a part of this process's environment, and the location of the certificates.
    The database, the broker and all secrets are left out.
    """
    variables = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
    return variables | _certificates(os.environ.get("SSL_CERT_FILE", ""), os.environ.get("SSL_CERT_DIR", ""))


@cache
def _certificates(bundle: str, folder: str) -> dict[str, str]:
    """Return the variables with which agents find the certificates that this process trusts.

    Args:
        bundle, folder: the values of SSL_CERT_FILE and SSL_CERT_DIR in this process; empty if it has none.

    A new client reads the whole bundle, which takes about 20 ms of processor time, although agents use plain HTTP. From a
    folder, OpenSSL reads a certificate only when it needs it. So if the bundle is the system's, and the system has the same
    certificates in a folder, agents get only the folder.
    """
    system = ssl.get_default_verify_paths()
    try:
        in_bundle = Path(system.openssl_cafile).read_text(errors="replace").count("BEGIN CERTIFICATE")
        in_folder = sum(bool(_HASHED.fullmatch(name)) for name in os.listdir(system.openssl_capath))
        given = ((bundle, system.openssl_cafile), (folder, system.openssl_capath))
        if in_folder >= in_bundle and all(Path(path).samefile(own) for path, own in given if path):
            return {"SSL_CERT_DIR": system.openssl_capath}
    except OSError:  # one of them does not exist
        pass
    return {name: value for name, value in (("SSL_CERT_FILE", bundle), ("SSL_CERT_DIR", folder)) if value}


@dataclass
class AgentServer:
    """A warm interpreter (`server`). The constructor waits until the interpreter is ready or `is_stopped` returns True.

    Attributes:
        spec: the import path of the agent; empty for programs.
        is_stopped: the function that returns True if the start must be given up.
        source: the source of the agent's module.
    """

    spec: str
    is_stopped: Callable[[], bool]
    source: str = field(init=False)
    _control: socket.socket = field(init=False)
    _idle: list[socket.socket] = field(default_factory=list)
    _is_closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
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
        try:
            self._await()
            reply = receive(self._control)
            if reply is None and self._was_killed():
                raise InfraError("The agent's interpreter was killed, by a user or by the kernel (out of memory).")
            if reply is None or "error" in reply:
                raise AgentUnready(reply["error"] if reply else "the interpreter ended while it imported the agent's module")
        except BaseException:
            self._kill()
            raise
        self.source = reply["source"]
        self._stamps = {file: _stamp(file) for file in reply["files"]}

    def _await(self) -> None:
        """Wait until the interpreter sends its report or ends.

        Raises:
            _Unwanted: `is_stopped` returned True.
            AgentUnready: the import took longer than START_SECONDS.
        """
        deadline = time.monotonic() + START_SECONDS
        self._control.settimeout(LOOK_SECONDS)
        while True:
            with suppress(TimeoutError):
                self._control.recv(1, socket.MSG_PEEK)
                self._control.settimeout(START_SECONDS)
                return
            if self.is_stopped():
                raise _Unwanted
            if time.monotonic() > deadline:
                raise AgentUnready(f"the agent's module was not imported within {START_SECONDS:.0f} s")

    @property
    def is_fresh(self) -> bool:
        """True if the interpreter is running and no file that it imported has changed."""
        return self._process.poll() is None and all(_stamp(file) == stamp for file, stamp in self._stamps.items())

    def begin(self) -> socket.socket:
        """Return a socket that is connected to a guardian, the process that watches one agent. If no guardian is idle, let the
        interpreter fork one.
        """
        while self._idle:  # only `close` takes guardians away too, and never at the same time
            guardian = self._idle.pop()
            if not select.select([guardian], [], [], 0)[0]:
                return guardian
            guardian.close()  # it has ended
        ours, theirs = socket_pair()
        with theirs:
            socket.send_fds(self._control, [b"x"], [theirs.fileno()])
        return ours

    def keep(self, guardian: socket.socket) -> None:
        """Keep the socket of a guardian (the process that watches an agent) for the next agent. If the interpreter is closed,
        end the guardian.
        """
        with self._lock:
            guardian.close() if self._is_closed else self._idle.append(guardian)

    def close(self) -> None:
        """Tell the interpreter to end as soon as its running agents have ended. Wait for its end at most LOOK_SECONDS."""
        self._control.close()
        with self._lock:
            self._is_closed = True
            for guardian in self._idle:
                guardian.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LOOK_SECONDS)
        with _ending_lock:
            _ending[:] = [process for process in (*_ending, self._process) if process.poll() is None]

    def _was_killed(self) -> bool:
        """Return whether the interpreter, whose end of the connection is closed, was ended by SIGKILL."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LOOK_SECONDS)
        return self._process.returncode == -signal.SIGKILL

    def _kill(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


_ending: "list[subprocess.Popen[bytes]]" = []
"""The interpreters that are closed but whose last agents are still running."""

_ending_lock = threading.Lock()


def _stamp(file: str) -> object:
    try:
        stat = Path(file).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


@dataclass(eq=False)
class _InterpreterSlot:
    """The slot for one agent's interpreter. A thread must hold its lock to start, use or end the interpreter."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    server: AgentServer | None = None

    def end(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            server.close()


@dataclass
class AgentServers:
    """The warm interpreters of this process, one for each agent. The start of one interpreter does not block the others."""

    _places: "OrderedDict[str, _InterpreterSlot]" = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, spec: str, is_stopped: Callable[[], bool]) -> tuple[AgentServer, socket.socket]:
        """Return an interpreter that has imported the agent's current code, and the socket of one of its guardians, the
        processes that watch agents.

        Raises:
            _Unwanted: `is_stopped` returned True before that.
            AgentUnready: the agent cannot be imported.
            InfraError: the interpreter was lost.
        """
        with self._fresh(spec, is_stopped) as server:
            guardian = server.begin()
        self._end_oldest()
        return server, guardian

    def source(self, spec: str) -> str:
        """Return the current source of the agent's module, as the agent's interpreter has imported it; empty for a program.

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
        """Yield an interpreter that has imported the agent's current code. During the `with` block, no other thread uses it."""
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
        """If there are more than MAX_SERVERS interpreters, end the least recently used ones. Interpreters that are starting or
        in use are kept.
        """
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
    """Run an agent and wait for its end. Return None if `is_stopped` returned True before the agent ended.

    Raises:
        AgentUnready: the agent's module cannot be imported.
        InfraError: the interpreter, or the process that watches the agent, was lost.
    """
    try:
        server, guardian = servers.begin(spec, is_stopped)
    except _Unwanted:
        return None
    takes_more = False
    try:
        send(guardian, vars(order))
        guardian.settimeout(LOOK_SECONDS)
        while not is_stopped():
            with suppress(TimeoutError):
                if not guardian.recv(1, socket.MSG_PEEK):
                    raise InfraError("The agent's supervisor process is gone.")
                guardian.settimeout(None)
                report, takes_more = receive(guardian)
                return AgentReport(**report)
    except OSError as error:
        raise InfraError(f"The agent's supervisor process is gone: {error}.") from error
    finally:
        server.keep(guardian) if takes_more else guardian.close()
    return None
