"""The supervisor of agents, which run one after the other. It starts an agent, enforces the agent's limits, ends the agent with
all of its child processes, and reports the result.

The guardian is a separate process, forked by the agent server. It supervises one episode at a time. By default, each episode
has a new process; with `agent.reuse`, the process of an episode that ended without an error also runs the next one. If the
guardian is killed, the `Warden` ends the remaining processes. The guardian is a subreaper: a process that the agent leaves
behind becomes the guardian's child, so no such process outlives the guardian. If the worker's end of the guardian's socket is
closed, the guardian ends the agent and itself at once.
"""

import asyncio
import ctypes
import inspect
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from agentrl.workers.agents import confinement, domain
from agentrl.workers.agents.kept_output import KeptOutput, add_last_lines
from agentrl.workflow.agents import LLM, AgentTask, freeze_clock, read_result
from agentrl.workflow.runtime.socket_pair import socket_pair

LENGTH = struct.Struct("<Q")
KILLED = "killed"
"""The error class of an agent that another process or the kernel killed. The agent then counts as lost, not as failed."""
MAX_RESULT = 1 << 20
"""The largest result of an agent, in bytes."""
TOO_LARGE = f"it has more than {MAX_RESULT} bytes"
MAX_FILES_BYTES = 1 << 30
"""The most bytes that a program may write to its folder. A single file may have at most half of that."""
MAX_FOLDERS = 10_000
LOOK_SECONDS = 0.2
"""The time between two checks of the agent's limits, in seconds."""
END_SECONDS = 10.0
WORDS = 2000
"""The most characters of an agent's error message. A single exception has at most half of them."""
MAX_CAUSES = 5
"""The most exceptions of a chain whose messages are stored."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Order:
    """The order to run an agent, which is sent as JSON.

    Args:
        command: the program and its arguments; empty for the server's function.
        environment: the complete environment of the agent.
        folder: the working directory.
        answer_file: the file in which a program can write its answer; empty for a function.
        files: the folder to which a program can write; empty for a function, whose writes are not limited.
        task, llm: the arguments of a function.
        timeout_seconds: the time limit, in seconds.
        memory_mb: the most memory of all processes of the agent, in MB.
        processes: the most processes of the agent.
        output_bytes: the most bytes that the agent may print.
        reuse: whether the function's process may run the next episode too.
        keys: the secrets that are removed from all output.
        stdin: the file that a program reads as its standard input; empty for an empty input.
        confinement: what a program may reach if Landlock confines it; None if Landlock does not confine it.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    answer_file: str
    files: str
    task: dict[str, Any]
    llm: dict[str, str]
    timeout_seconds: float
    memory_mb: int
    processes: int
    output_bytes: int
    reuse: bool = False
    keys: list[str] = field(default_factory=list)
    stdin: str = ""
    confinement: dict[str, Any] | None = None

    @property
    def is_boxed(self) -> bool:
        """True if bubblewrap confines the agent. No Landlock domain is added then, because the set-uid form of bubblewrap would
        not work in a domain.
        """
        return "bwrap" in self.command


@dataclass
class AgentReport:
    """The result of an agent, which is sent as JSON. `error_class` is empty if the agent returned."""

    exit_code: int | None = None
    error_class: str = ""
    error: str = ""
    answer: str | None = None
    rewards: dict[str, float] | None = None
    output: str = ""


def send(connection: socket.socket, value: object) -> None:
    """Send a value as JSON, preceded by its length in bytes."""
    data = json.dumps(value).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Receive the next value; return None if the other end is closed."""
    head = _exactly(connection, LENGTH.size)
    data = head and _exactly(connection, LENGTH.unpack(head)[0])
    return json.loads(data) if data else None


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        some = connection.recv(min(size - len(data), 1 << 20))
        if not some:
            return b""
        data += some
    return bytes(data)


def adopt_orphans() -> None:
    """Make this process a subreaper: processes that its descendants leave behind become its children."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def guard(connection: socket.socket, function: Callable[..., Any] | None) -> None:
    """Receive orders over the connection. For each order, run the agent and send a pair: the report, and whether this guardian
    takes another order. Return when the connection is closed, or when this guardian takes no further order.
    """
    os.setsid()
    adopt_orphans()
    agent: _Agent | None = None
    is_confined = takes_more = False
    while (fields := receive(connection)) is not None:
        order = Order(**fields)
        if not (order.is_boxed or is_confined):
            is_confined = True
            domain.enter()  # the guardian too: the agent's own lies in it, so that it cannot end its guardian
        if agent is not None and not (order.reuse and agent.is_ready):
            end_descendants()
            agent.close()
            agent = None
        if agent is None:
            agent = _start(order, function, connection)
        else:
            with suppress(OSError):  # it has ended just now: its watch sees that
                send(agent.channel, fields)
        report = _AgentWatch(order, connection, agent).run()
        if report.error_class or not order.reuse:
            agent = None
        takes_more = function is not None and (agent is not None or not descendants(os.getpid()))
        try:
            send(connection, [vars(report), takes_more])
        except OSError:  # nobody waits any more
            return
        if not takes_more:
            return


@dataclass(frozen=True)
class _Agent:
    """The agent's process: its pid, a descriptor that is readable when it has ended, its output, and the socket over which a
    function gets its next orders and sends its results.
    """

    pid: int
    ended: int
    output: int
    channel: socket.socket

    @property
    def is_ready(self) -> bool:
        """True if the process can run another episode: it has not ended, and has sent nothing after its result."""
        descriptors: list[Any] = [self.ended, self.channel]
        return not select.select(descriptors, [], [], 0)[0]

    def close(self) -> int:
        """Wait for the end of the process, close the descriptors, and return the exit code."""
        status = _reap(self.pid)
        os.close(self.ended)
        os.close(self.output)
        self.channel.close()
        return status


def _start(order: Order, function: Callable[..., Any] | None, connection: socket.socket) -> _Agent:
    output, output_in = os.pipe()
    ours, theirs = socket_pair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_agent(order, function, output_in, theirs, (output, connection.fileno()))
    os.close(output_in)
    theirs.close()
    return _Agent(pid, os.pidfd_open(pid), output, ours)


@dataclass
class _AgentWatch:
    """The state of one episode of an agent while it is running."""

    order: Order
    connection: socket.socket
    agent: _Agent
    _output: KeptOutput = field(init=False)
    _result: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._output = KeptOutput(self.order.keys)

    def run(self) -> AgentReport:
        """Wait for the end of the episode. Then end the agent's process, unless that process may run another episode."""
        over = self._follow()
        if not any(over) and self.order.reuse and self._has_result:
            self._read_rest()
            report = self._report(over, 0)
            if report.error_class:
                report.exit_code = 1
                end_descendants()
                self.agent.close()
            return report
        end_descendants()
        self._read_rest()
        return self._report(over, self.agent.close())

    @property
    def _has_result(self) -> bool:
        """True if the function's result is complete, or larger than it may be."""
        if len(self._result) < LENGTH.size:
            return False
        return self._result_size > MAX_RESULT or len(self._result) >= self._result_size + LENGTH.size

    @property
    def _result_size(self) -> int:
        return int(LENGTH.unpack_from(self._result)[0])

    def _reply_bytes(self) -> bytes | None:
        """Return the function's result; None if it is not complete."""
        if not self._has_result:
            return None
        if self._result_size > MAX_RESULT:
            raise ValueError(TOO_LARGE)
        if len(self._result) > self._result_size + LENGTH.size:
            raise ValueError("it has two results")
        return bytes(self._result[LENGTH.size :])

    def _follow(self) -> tuple[str, str]:
        """Wait until the agent has ended, or has sent its result if its process is to be used again. Return the (error class,
        error) if a limit ended it; otherwise two empty texts.
        """
        looked = time.monotonic()
        deadline = looked + self.order.timeout_seconds
        agent = self.agent
        descriptors: list[Any] = [agent.ended, agent.output, agent.channel, self.connection]
        while True:
            ready = select.select(descriptors, [], [], LOOK_SECONDS)[0]
            descriptors = [one for one in descriptors if one not in ready or self._take(one)]
            if agent.ended in ready or (self.order.reuse and self._has_result):
                return "", ""
            if self._has_result and self._result_size > MAX_RESULT:
                return "answer", f"its answer cannot be read: {TOO_LARGE}"
            if self.connection in ready:
                return "stopped", "it was asked to stop"
            now = time.monotonic()
            if now > deadline:
                return "timeout", f"it ran for more than {self.order.timeout_seconds:g} s (agent.timeout_seconds)"
            if self._output.size > self.order.output_bytes:
                return "output", f"it printed more than {self.order.output_bytes} bytes (agent.output_bytes)"
            if now - looked > LOOK_SECONDS:
                looked = now
                if problem := self._is_too_much():
                    return problem

    def _is_too_much(self) -> tuple[str, str] | None:
        family = descendants(os.getpid())
        if len(family) > self.order.processes:
            return "processes", f"it had {len(family)} processes, but may have at most {self.order.processes} (agent.processes)"
        used = sum(map(_resident, family)) >> 20
        if used > self.order.memory_mb:  # what forks share was counted for each
            used = sum(map(_proportional, family)) >> 20
        if used > self.order.memory_mb:
            return "memory", f"it took {used} MB of memory, but may take at most {self.order.memory_mb} (agent.memory_mb)"
        if self.order.files and _written(self.order.files) > MAX_FILES_BYTES:
            return "files", f"it wrote more than {MAX_FILES_BYTES >> 20} MB into its folder"
        return None

    def _take(self, source: Any) -> bool:
        """Read a part of the output or of the result. Return False if the source has no more."""
        if source == self.agent.output:
            data = os.read(source, 1 << 16)
            self._output.add(data)
        elif source is self.agent.channel:
            data = self._receive()
            self._result += data
        else:
            return True
        return bool(data)

    def _receive(self) -> bytes:
        try:
            return self.agent.channel.recv(1 << 16)
        except ConnectionResetError:  # the agent ended before it had read an order
            return b""

    def _read_rest(self) -> None:
        """Read what is left of the output and of the result, for at most LOOK_SECONDS."""
        deadline = time.monotonic() + LOOK_SECONDS
        sources: list[Any] = [self.agent.output] if self._has_result else [self.agent.output, self.agent.channel]
        while time.monotonic() < deadline and (ready := select.select(sources, [], [], 0)[0]):
            sources = [one for one in sources if one not in ready or self._take(one)]

    def _report(self, over: tuple[str, str], status: int) -> AgentReport:
        report = AgentReport(status, *over, output=self._output.text())
        if status == -signal.SIGKILL and not report.error_class:
            report.error_class, report.error = KILLED, "it was killed, by a user or by the kernel (out of memory)"
        if report.error_class:
            report.error = add_last_lines(report.error, report.output, explains=False)
            return report
        try:
            fields = _read_reply(self.order, self._reply_bytes())
        except (OSError, ValueError, TypeError, RecursionError) as error:
            fields = {"error_class": "answer", "error": f"its answer cannot be read: {error}"[:WORDS]}
        if status and not fields.get("error_class"):
            how = f"exit code {status}" if status > 0 else f"signal {-status}"
            fields = {"error_class": "exit", "error": f"it ended with {how}"}
        if fields.get("error_class") == "exit":  # a function that raised has words of its own
            fields["error"] = add_last_lines(fields["error"], report.output)
        for name, value in fields.items():
            setattr(report, name, value)
        return report


def _read_reply(order: Order, result: bytes | None) -> dict[str, Any]:
    """Return the checked answer and rewards of the agent, or its error. A function sends them over the socket (`result`), a
    program writes them to its answer file.
    """
    if not order.answer_file:
        if result is None:
            return {"error_class": "exit", "error": "its process ended before it returned"}
        reply = json.loads(result)
        if reply.get("error_class"):
            return {name: str(reply[name])[:WORDS] for name in ("error_class", "error")}
        value = reply.get("value")
    else:
        value = _read_answer(Path(order.answer_file))
    read = read_result(value)
    return {"answer": read.answer, "rewards": None if read.rewards is None else dict(read.rewards)}


def _read_answer(path: Path) -> Any:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(MAX_RESULT + 1)
    if len(data) > MAX_RESULT:
        raise ValueError(TOO_LARGE)
    return json.loads(data) if data.strip() else None


# inside of the agent's process


def _become_agent(
    order: Order, function: Callable[..., Any] | None, output: int, channel: socket.socket, others: Sequence[int]
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:  # the agent is what the kernel ends first
            score.write("1000")
        stdin = os.open(order.stdin or os.devnull, os.O_RDONLY)
        for source, target in ((stdin, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        for descriptor in (*others, output, stdin):
            os.close(descriptor)
        if not order.is_boxed:
            domain.enter()
            domain.drop_capabilities()
        if function is None:
            _enter_place(order)
            channel.close()
            resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILES_BYTES // 2,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if order.confinement is not None:
                confinement.enter(order.confinement)
            os.execvpe(order.command[0], order.command, order.environment)
        code = _call(function, order, channel)
        while order.reuse and (fields := receive(channel)) is not None:
            order = Order(**fields)
            code = _call(function, order, channel)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        code = 127
    except BaseException:  # noqa: BLE001 - the guardian's stack lies below, and is not the agent's to unwind
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def error_text(error: BaseException) -> str:
    """Return the class and the message of an exception, and those of its causes: a client's `Connection error.` does not say
    what failed.
    """
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < MAX_CAUSES:
        texts.append(f"{type(cause).__name__}: {cause}"[: WORDS // 2])
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "; caused by ".join(dict.fromkeys(texts))[:WORDS]


def _call(function: Callable[..., Any], order: Order, channel: socket.socket) -> int:
    """Call a function agent, and send its result or its exception. Return the exit code."""
    _enter_place(order)
    try:
        freeze_clock()
        value = function(AgentTask(**order.task), LLM(**order.llm))
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        read = read_result(value)
        reply: Mapping[str, Any] = {"value": {"text": read.answer, "rewards": read.rewards}}
    except BaseException as error:  # noqa: BLE001 - anybody's code; its words go into the row
        traceback.print_exc()
        reply = {"error_class": type(error).__name__[:100], "error": error_text(error)}
    _flush()
    send(channel, reply)
    return 0 if "value" in reply else 1


def _enter_place(order: Order) -> None:
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)


def _flush() -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()


async def _awaited(value: Any) -> Any:
    return await value


# processes


def descendants(pid: int, spared: Collection[int] = ()) -> set[int]:
    """Return the pids of all descendants of the process, without those in `spared` and their descendants."""
    processes: set[int] = set()
    level = set(children(pid)) - set(spared)
    while level:
        processes |= level
        level = {child for parent in level for child in children(parent)} - processes
    return processes


def children(pid: int) -> list[int]:
    """Return the pids of the direct children of the process."""
    numbers: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
                numbers += map(int, file.read().split())
    return numbers


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    """Return the process's memory in bytes, where memory that several processes share is divided between them (PSS). If that
    cannot be read, return the complete resident memory (RSS).
    """
    try:
        fields = Path(f"/proc/{pid}/smaps_rollup").read_bytes().split()
        return int(fields[fields.index(b"Pss:") + 1]) << 10
    except (OSError, ValueError, IndexError):
        return _resident(pid)


def _written(folder: str) -> int:
    """Return the bytes on disk of all files in the folder and its subfolders. If there are too many subfolders to count, return
    more than MAX_FILES_BYTES.
    """
    total, level = 0, [folder]
    for _ in range(MAX_FOLDERS):
        if not level:
            break
        with suppress(OSError), os.scandir(level.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        level.append(entry.path)
    return total if not level else MAX_FILES_BYTES + 1


def end_descendants(spared: Collection[int] = ()) -> None:
    """Kill all descendants of this process, except the children in `spared` and their descendants.

    All descendants are stopped before the first is killed, so no process can fork meanwhile.
    """
    deadline = time.monotonic() + END_SECONDS
    while (family := descendants(os.getpid(), spared)) and time.monotonic() < deadline:
        family -= _reap_ended(family)
        for signal_number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in family:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal_number)
        if family:
            time.sleep(0.001)
            _reap_ended(family)


_ended: dict[int, int] = {}
"""The exit codes of the children that have been waited for since the last agent's end."""


def _reap_ended(family: Iterable[int]) -> set[int]:
    """Return those of the processes that have ended and were children of this process."""
    reaped = set()
    for pid in family:
        with suppress(ChildProcessError):  # still another's
            if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                reaped.add(pid)
                _ended[pid] = os.waitstatus_to_exitcode(ended[1])
    return reaped


def _reap(pid: int) -> int:
    """Wait for the agent's process, and return its exit code."""
    deadline = time.monotonic() + END_SECONDS
    while pid not in _ended and not _reap_ended([pid]) and time.monotonic() < deadline:
        time.sleep(0.001)
    code = _ended.get(pid, -int(signal.SIGKILL))
    _ended.clear()
    return code
