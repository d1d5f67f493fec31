"""Python processes that start in a third of a second instead of five: forked from one that has everything imported.

The fork server begins no thread and opens nothing. For each request on its socket it forks a child that becomes what `python`
with these arguments would be, and hands it over: the process that asked is the child's parent, so that a `subprocess.Popen`
signals it and waits for it. A child has a fork server of its own, by which the commands, supervisors and workers of agentrl
that it starts with `subprocess` are forked too.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from runpy import run_module
from types import ModuleType
from typing import Any

from agentrl.workflow.settings import settings
from bench.faults import loop
from bench.faults.experiment import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG

DEADLINE_SECONDS = 240.0
ALONE = {"AGENTRL_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
FLAGS = ("-P", "-u")
FORKED = ("agentrl.cli", "agentrl.workers.stack.supervisor", "agentrl.workers.stack.worker", "agentrl.workers.ranks.rank")
"""Modules that a forked process forks if it starts them; anything else that it starts is executed."""
READ_AT_IMPORT = ("HF_HOME",)
"""Variables that an imported module has read: a process for which they differ is executed."""
WITHOUT_SERVER = "agentrl.workers.stack.worker"
"""A module that starts none of `FORKED`, and so needs no fork server."""
MAX_DESCRIPTORS = 16
FREE_DESCRIPTOR = 512
"""From this number on, no descriptor is in use."""

_libc = ctypes.CDLL(None)
_site_path: list[str] = []
_own_server: "ForkServer | None" = None  # the one that this process, itself forked, has from its start


@dataclass(frozen=True)
class ForkServer:
    """The end of the socket that belongs to the process `owner`, the only one that may ask."""

    requests: socket.socket
    owner: int
    lock: threading.Lock
    forked_by_children: Collection[str] = FORKED
    """Modules that the processes that it forks will fork in turn."""

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """Fork a child of this process; return its pid."""
        message = json.dumps(request).encode()
        with self.lock:
            # The server's grandchild falls to this process, the closest of its ancestors that adopts.
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
            socket.send_fds(self.requests, [len(message).to_bytes(8, "big")], list(descriptors))
            self.requests.sendall(message)
            pid = int.from_bytes(_receive(self.requests, 8), "big")
            _receive(self.requests, 1)
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        return pid

    def execute_child(self, process: "subprocess.Popen[Any]", *given: Any) -> None:
        """Start the process of a `Popen`, as its method `_execute_child` does."""
        words, _, _, _, pass_fds, cwd, environment = given[:7]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = given[10:16]
        streams = [end if end != -1 else own for own, end in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "words": [str(word) for word in words[1:]],
            "cwd": str(cwd or os.getcwd()),
            "environment": dict(os.environ if environment is None else environment),
            "new_session": given[21],
            "descriptors": [0, 1, 2, *pass_fds],
            "forked_modules": list(self.forked_by_children),
        }
        process.pid = self.fork(request, [*streams, *pass_fds])
        process._child_created = True  # type: ignore[attr-defined]
        process._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Child:
    """A forked process and its log."""

    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def exit_code(self) -> int | None:
        """What it exited with, minus the signal that killed it; None while it lives."""
        return self.process.poll()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def end(self) -> int:
        """Wait for its end; return what it exited with."""
        try:
            return self.process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.pid} does not end\n{self.log.read_text()}") from None


@dataclass
class Nursery:
    """Starts Python processes by a fork server, as children of this process; `folder` is for whoever needs one."""

    server: ForkServer
    folder: Path
    environment: Mapping[str, str]
    _count: int = 0

    def popen(self, words: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start `sys.executable` with arguments, as `subprocess.Popen` would."""
        server = self.server

        class Forked(subprocess.Popen[bytes]):
            def _execute_child(self, *given: Any) -> None:
                server.execute_child(self, *given)

        return Forked([sys.executable, *words], **options)

    @contextmanager
    def forking_programs(self) -> Iterator[None]:
        """Fork the Python programs that this process starts with `subprocess`, unless their flags are not in `FLAGS`."""
        undo = fork_programs(self.server)
        try:
            yield
        finally:
            undo()

    def start(
        self, target: str, *arguments: Any, log: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> Child:
        """Start a child that calls `module:function` with arguments that JSON can hold; it ends with this process."""
        self._count += 1
        log = log or self.folder / f"{self._count}.log"
        code = "import sys; from bench.faults.fork_server import call; call(*sys.argv[1:])"
        words = ["-c", code, target, json.dumps(arguments)]
        own = {**self.environment, **(environment or {})}
        with log.open("ab") as output:
            process = self.popen(words, env=own, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        return Child(process, log)


def fork_programs(server: ForkServer, modules: Collection[str] | None = None) -> Callable[[], None]:
    """Let `subprocess` fork Python programs in this process, instead of executing them; return what undoes it.

    Args:
        server: this process's own.
        modules: names of modules: only these are forked. None: all Python programs, unless their flags are not in `FLAGS`.
    """
    execute: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute_child(process: "subprocess.Popen[Any]", *given: Any) -> None:
        environment = os.environ if given[6] is None else given[6]
        known = all(environment.get(name) == os.environ.get(name) for name in READ_AT_IMPORT)
        forked = known and os.getpid() == server.owner and _is_forked(given[0], modules)
        (server.execute_child if forked else execute)(process, *given)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    return partial(setattr, subprocess.Popen, "_execute_child", execute)


def _is_forked(command: Any, modules: Collection[str] | None) -> bool:
    words = [] if isinstance(command, (str, bytes, os.PathLike)) else [str(word) for word in command]
    program = [word for word in words[1:] if word not in FLAGS]
    if words[:1] != [sys.executable] or not program:
        return False
    if modules is not None:
        return program[0] == "-m" and program[1] in modules
    return program[0] in ("-c", "-m") or not program[0].startswith("-")


@contextmanager
def nursery(folder: Path) -> Iterator[Nursery]:
    """Start a fork server, which ends with the block. A process that was forked itself has one already, and uses that."""
    environment = {**os.environ, **ALONE, **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}}
    if _own_server is not None and _own_server.owner == os.getpid():
        yield Nursery(_own_server, folder, environment)
        return
    ours, theirs = socket.socketpair()
    code = f"from bench.faults.fork_server import main; main({theirs.fileno()})"
    command = [sys.executable, "-c", code]
    with ours, subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]):
        theirs.close()
        yield Nursery(ForkServer(ours, os.getpid(), threading.Lock()), folder, environment)
        ours.close()


def call(target: str, arguments: str) -> None:
    """Call `module:function` with arguments in JSON, in a process that ends with its parent."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(*json.loads(arguments))


def serve(roles: list[str]) -> None:
    """Run a worker."""
    from agentrl.workers.stack.worker import run

    run(roles)


def main(descriptor: int) -> None:
    """Import what workers and commands need, and fork what is asked for at the other end of a socket."""
    _site_path.extend(folder for folder in sys.path[1:] if folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep))
    for module in loop._PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # else each child would look through all of it, again and again
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a thread does not survive a fork"
    assert not settings.cache_info().currsize, "an imported module has read the settings, which are of each child's environment"
    _answer_requests(socket.socket(fileno=descriptor))


def _answer_requests(requests: socket.socket) -> None:
    """Fork a child for each request, until the other end is closed. Return in the children alone, as what they became."""
    while True:
        length, descriptors, _, _ = socket.recv_fds(requests, 8, MAX_DESCRIPTORS)
        if not length:
            os._exit(0)
        request = json.loads(_receive(requests, int.from_bytes(length, "big")))
        between = os.fork()
        if between == 0:
            _fork_orphan(requests, request, descriptors)
        os.waitpid(between, 0)
        requests.sendall(b"\n")
        for each in descriptors:
            os.close(each)


def _fork_orphan(requests: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    between = os.getpid()
    pid = os.fork()
    if pid:
        requests.sendall(pid.to_bytes(8, "big"))
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.001)
    requests.close()
    _become(request, descriptors)


def _receive(source: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = source.recv(size - len(received))
        assert part, "the fork server has ended"
        received += part
    return received


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Take over the streams, the environment and the folder of the request, run its Python program, and exit."""
    if request["new_session"]:
        os.setsid()
    free = [fcntl.fcntl(each, fcntl.F_DUPFD, FREE_DESCRIPTOR) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(free, request["descriptors"], strict=True):
        os.dup2(each, number)
        os.close(each)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    words = list(request["words"])
    if WITHOUT_SERVER not in words:
        start_server(request["forked_modules"])
    _open_streams("-u" in words[:2] or bool(os.environ.get("PYTHONUNBUFFERED")))
    _exit(_run(words))


def start_server(forked_modules: Collection[str] = FORKED) -> None:
    """Give this process, in which no thread has begun yet, a fork server of its own, and let it fork these modules."""
    global _own_server
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _answer_requests(theirs)
    theirs.close()
    _own_server = ForkServer(ours, os.getpid(), threading.Lock())
    fork_programs(_own_server, forked_modules)


def _open_streams(unbuffered: bool) -> None:
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the process's own
    lines = unbuffered or os.isatty(1)
    sys.stdout = open(1, "w", buffering=1 if lines else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _run(words: list[str]) -> int:
    """Run what `python` with these words would; return the exit code, minus the signal that interrupted it."""
    safe = "-P" in words[: len(FLAGS)]
    while words[0] in FLAGS:
        words.pop(0)
    kind = words.pop(0) if words[0] in ("-c", "-m") else ""
    sys.argv = ["-c" if kind == "-c" else words[0], *words[1:]]
    first = str(Path(words[0]).resolve().parent) if not kind else "" if kind == "-c" else os.getcwd()
    own = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [*([] if safe else [first]), *own, *_site_path]
    try:
        if kind == "-m":
            run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            _run_main(words[0], is_code=kind == "-c")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _run_main(program: str, is_code: bool) -> None:
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if not is_code:
        main.__file__ = program
    source = program if is_code else Path(program).read_text()
    exec(compile(source, "<string>" if is_code else program, "exec", dont_inherit=True), main.__dict__)


def _exit(code: int) -> None:
    """End this process as the interpreter ends one, but for its modules, which are not taken apart."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)
