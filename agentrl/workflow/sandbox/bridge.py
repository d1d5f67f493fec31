"""The first process of a container, which runs inside. It connects the pair of pipes from the host to the file descriptors that
a program expects.

The bridge first reads a line of JSON from stdin (`Header`). Then it reads the sources, the program and the program's stdin,
whose lengths are in the header. It starts the program in a child. After that it reads and writes frames: a kind, four bytes of
length, the data.

Frames to the host:

- R: the program begins.
- O: output of the program.
- C: a message of a session's process; the first 4 bytes are the process's id.
- E: the kernel's counts.
- K: the number of threads that were ended, and an error text, which is empty if there is no error.
- X: the child's exit code.

Frames from the host:

- C: a request to the session.
- E: send the counts.
- K: kill all processes except the listed ones (4 bytes each) and the session's parent process; leave the listed ones stopped
    (see `freeze`).
- G: continue the stopped processes.

Output is always sent before a message that came after it. If the host closes stdin (on purpose or because it died), the bridge
exits. The bridge is the first process of its namespace, so its exit ends all other processes.

The program runs as the same user. It can neither trace nor signal the bridge, because the bridge is the first process and not
dumpable. It can close or fill its own files, which harms only its own results.

This file runs inside and imports only the standard library, `proc` and `freeze`.
"""

import ctypes
import json
import os
import select
import signal
import socket
import struct
from contextlib import suppress
from typing import NoReturn, TypedDict

from agentrl.workflow.sandbox import freeze, proc

SOURCES, CODE, CONTROL, READY = 10, 11, 12, 13
"""The numbers of the file descriptors that the program gets. They are fixed because the host writes them into the program's
command line.
"""
FRAME = struct.Struct("<cI")
CREDENTIALS = struct.Struct("iII")  # process, user, group
PR_SET_DUMPABLE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 4, 22, 2
CHUNK = 1 << 16
KILL_SECONDS = 10.0
GROUPS = "/sys/fs/cgroup/"
COUNTS = {
    "oom": ("memory/memory.oom_control", "memory.events", "oom_kill"),
    "pids": ("pids/pids.events", "pids.events", "max"),
    "cpu_ns": ("cpuacct/cpuacct.usage", "", ""),
    "cpu_us": ("", "cpu.stat", "usage_usec"),
}
"""The files of the kernel's counters, by counter: the file of control groups version 1, the file of version 2, and the word
before the number in the file.
"""


class Header(TypedDict):
    """The first line from the host: the child's `argv`, the system call filter in hex, the lengths of the sources, the program
    and its stdin.
    """

    argv: list[str]
    filter: str
    sources: int
    code: int
    stdin: int


class Filter(ctypes.Structure):
    """The C structure `sock_fprog`: a seccomp filter."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def read_exactly(length: int) -> bytes:
    """Read the next `length` bytes of stdin. If the host has closed stdin, end the container."""
    parts: list[bytes] = []
    while length:
        part = os.read(0, min(length, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def read_line() -> bytes:
    """Read the next line of stdin, and nothing after it."""
    line = b""
    while not line.endswith(b"\n"):
        line += read_exactly(1)
    return line


def make_file(content: bytes) -> int:
    """Create an unnamed file with this content, positioned at its beginning; return its descriptor."""
    fd = os.memfd_create("given")
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def become(header: Header, files: dict[int, int]) -> NoReturn:
    """Become the program: copy its files to their descriptors, install the system call filter, and exec."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # a process that is not dumpable may not write the next file
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # short of memory, the kernel kills these before the bridge
    free = max(*files, *files.values()) + 1
    copies = {place: os.dup2(fd, free + number) for number, (place, fd) in enumerate(files.items())}
    for place, fd in copies.items():
        os.dup2(fd, place)
    os.closerange(free, free + len(copies))
    rules = bytes.fromhex(header["filter"])
    program = Filter(len(rules) // 8, rules)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        os._exit(125)
    os.execvp(header["argv"][0], header["argv"])


def send(kind: bytes, data: bytes) -> None:
    """Send a frame to the host."""
    frame = FRAME.pack(kind, len(data)) + data
    while frame:
        frame = frame[os.write(1, frame) :]


def counts(waited: float) -> bytes:
    """Return the kernel's counts for this container as JSON: processes killed for lack of memory, refused processes, and
    processor time. `waited` is the time that the container waited for a core, in seconds; it becomes part of the JSON.
    """
    values = {"waited": waited}
    for name, (first, second, word) in COUNTS.items():
        for path in (GROUPS + file for file in (first, second) if file and os.path.exists(GROUPS + file)):
            with open(path) as file:
                fields = file.read().split()
            values[name] = int(fields[fields.index(word) + 1 if word in fields else 0]) if not word or word in fields else 0
    return json.dumps(values).encode()


def drain(output: int) -> None:
    """Read the output that the program has written so far, and send it to the host."""
    while select.select([output], [], [], 0)[0] and (data := os.read(output, CHUNK)):
        send(b"O", data)


class FrameRelay:
    """A relay of frames between the host and the child."""

    def __init__(self, child: int, output: int, control: socket.socket, ready: int) -> None:
        self.child = child
        self.output = output
        self.control = control
        self.ready = ready
        self.waits = proc.Waits()
        self.status: int | None = None

    def run(self) -> int:
        """Relay frames until the child has ended; return its exit code, negative for a signal."""
        pidfd = os.pidfd_open(self.child)
        watched = {0, pidfd, self.output, self.control.fileno(), self.ready}
        while pidfd in watched:
            for fd in sorted(select.select(watched, [], [])[0], key=lambda fd: fd != self.ready):
                if fd == 0:
                    self.relay_from_host()
                elif fd == pidfd or not self.relay_from_child(fd):
                    watched.discard(fd)
            self.bury()
        while self.status is None:
            self.bury()
        drain(self.output)
        return os.waitstatus_to_exitcode(self.status)

    def relay_from_host(self) -> None:
        """Read one frame from the host, and carry out its request."""
        kind, length = FRAME.unpack(read_exactly(FRAME.size))
        data = read_exactly(length)
        if kind == b"E":
            send(b"E", counts(self.waits.look({*self.others(), self.child})))
        elif kind == b"K":
            send(b"K", self.settle_others({process for (process,) in struct.iter_unpack("<I", data)}))
        elif kind == b"G":
            signal_all(signal.SIGCONT)
        else:
            self.control.sendall(data)

    def relay_from_child(self, fd: int) -> bool:
        """Send the data that can be read from `fd` to the host, if there is any. Return False at the end of the file."""
        if not select.select([fd], [], [], 0)[0]:
            return True
        if fd == self.control.fileno():
            return self.relay_message()
        data = os.read(fd, CHUNK)
        if data:
            send(b"O" if fd == self.output else b"R", data)
        return bool(data)

    def relay_message(self) -> bool:
        """Relay a message of the session's processes after all earlier output. Return False if the socket is closed."""
        data, ancillary, _, _ = self.control.recvmsg(CHUNK, socket.CMSG_SPACE(CREDENTIALS.size))
        drain(self.output)
        process = CREDENTIALS.unpack(ancillary[0][2])[0] if ancillary else 0
        send(b"C", process.to_bytes(4, "little") + data)  # without data: it is closed
        return bool(data)

    def settle_others(self, lasting: set[int]) -> bytes:
        """Kill all processes except `lasting` and the session's parent process, and send the messages and output that they
        left.

        Return JSON with the number of ended threads and an error text, which is empty if there is no error.
        """
        try:
            ended, wrong = freeze.settle(lambda: signal_all(signal.SIGSTOP), self.others, lasting, KILL_SECONDS), ""
        except freeze.SettleError as error:
            ended, wrong = 0, str(error)
        while select.select([self.control], [], [], 0)[0] and self.relay_message():
            pass
        drain(self.output)
        return json.dumps([ended, wrong]).encode()

    def others(self) -> set[int]:
        """Return the ids of all processes except the bridge and its child, which is the session's parent process."""
        self.bury()
        return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid(), self.child}

    def bury(self) -> None:
        """Reap processes that have ended. This process also reaps orphans, because it is the first process of its namespace."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == self.child:
                self.status = status
            if process == 0:
                return


def signal_all(number: int) -> None:
    """Signal all processes of the container except this one, in one step that a fork cannot escape."""
    with suppress(ProcessLookupError):
        os.kill(-1, number)


def main() -> None:
    """Start the program and relay frames until it ends. The container ends with this process."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    header: Header = json.loads(read_line())
    sources, code, stdin = (make_file(read_exactly(length)) for length in (header["sources"], header["code"], header["stdin"]))
    (output_reader, output), (ready, made_ready) = os.pipe(), os.pipe()
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    places = {0: stdin, 1: output, 2: output, SOURCES: sources, CODE: code, CONTROL: theirs.fileno(), READY: made_ready}
    child = os.fork()
    if child == 0:
        become(header, places)
    theirs.close()
    for fd in (sources, code, stdin, output, made_ready):
        os.close(fd)
    relay = FrameRelay(child, output_reader, ours, ready)
    ended = relay.run()
    send(b"E", counts(relay.waits.seconds))
    send(b"X", str(ended).encode())
