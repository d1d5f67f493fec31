"""A warm interpreter that runs inside the sandbox. It forks a child with separate namespaces for each program.

A cold sandbox costs three times as much as its interpreter alone. So the zygote is started once. Each program then runs in a
forked process with new user, process, mount and IPC namespaces, a new /tmp and /dev/shm, no capabilities, and the system call
filter. The zygote itself runs no program. So its reports over the socket (the child's end and its processor time) can be
trusted. To kill a program, the host kills the whole sandbox.

This file runs inside and imports only the standard library and `runner`.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import sys
from importlib import import_module

from agentrl.workflow.sandbox import runner

NEWNS, NEWIPC, NEWUSER, NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000
NOSUID, NODEV, NOEXEC = 2, 4, 8
SET_DUMPABLE, SET_SECCOMP, FILTER_MODE = 4, 22, 2
CAPABILITIES_VERSION_3 = 0x20080522
FILES_PER_REQUEST = 3
PRELOADED_MODULES = (
    *("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
    *("linecache", "math", "random", "re", "statistics", "string", "traceback", "typing"),
)
"""The modules that programs or tracebacks often import. The zygote imports them once."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def main(control: int, bpf: int) -> None:
    """Serve requests (a line of JSON, with the descriptors of code, stdin and output) until the socket is closed."""
    with open(bpf, "rb") as file:
        rules = file.read()
    runner.configure_streams()
    line = socket.socket(fileno=control)
    for name in PRELOADED_MODULES:
        import_module(name)
    gc.collect()
    gc.freeze()
    line.send(b"{}\n")
    while True:
        message, files, _, _ = socket.recv_fds(line, 4096, FILES_PER_REQUEST)
        if not message:
            os._exit(0)
        code, cpu = _run(json.loads(message), files, rules)
        line.send(json.dumps({"code": code, "cpu": cpu}).encode() + b"\n")


def _run(limits: dict[str, int], files: list[int], rules: bytes) -> tuple[int | None, float]:
    """Run a program; return its exit code (negative: signal; None: no namespaces) and processor time in seconds."""
    report_reader, report_fd = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(report_reader)
        _outermost(limits, files, rules, report_fd)
    os.close(report_fd)
    for file in files:
        os.close(file)
    with open(report_reader, "rb") as answer:
        report = answer.read(64).split()
    _, _, used = os.wait4(child, 0)
    return _code(report), used.ru_utime + used.ru_stime


def _code(report: list[bytes]) -> int | None:
    """Return the exit code of a program from the report of its namespace's first process; None if the report is empty.

    The report has one word for the program's start and one for its exit code. If the second word is missing, the program was
    killed by SIGKILL.
    """
    if not report:
        return None
    return int(report[1]) if len(report) == 2 and report[1].removeprefix(b"-").isdigit() else -signal.SIGKILL


def _outermost(limits: dict[str, int], files: list[int], rules: bytes, report_fd: int) -> None:
    """Create the program's namespaces in the child, and fork: a process namespace applies only to children."""
    user, group = os.getuid(), os.getgid()
    _check_call(_libc.unshare(NEWUSER | NEWNS | NEWPID | NEWIPC))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    init = os.fork()
    if init == 0:
        _init(limits, files, rules, report_fd)
    os.close(report_fd)
    os.waitpid(init, 0)
    os._exit(0)


def _init(limits: dict[str, int], files: list[int], rules: bytes, report_fd: int) -> None:
    """Be the first process of the namespace: mount, start the program, reap orphans. All end when it ends."""
    size = str(limits["tmp"])
    _check_call(_libc.mount(b"tmpfs", b"/tmp", b"tmpfs", NOSUID | NODEV, f"size={size},mode=1777".encode()))
    _check_call(_libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", NOSUID | NODEV, b"size=1m,mode=1777"))
    _check_call(_libc.mount(b"proc", b"/proc", b"proc", NOSUID | NODEV | NOEXEC, None))
    os.chdir("/tmp")
    _drop_capabilities()
    os.write(report_fd, b"1 ")
    _libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)  # the program is the same user, and must not reach into this process
    program = os.fork()
    if program == 0:
        _program(limits, files, rules)
    os.closerange(3, report_fd)
    os.closerange(report_fd + 1, 1 << 16)
    while (ended := os.wait())[0] != program:
        pass
    os.write(report_fd, str(os.waitstatus_to_exitcode(ended[1])).encode())
    os._exit(0)


def _program(limits: dict[str, int], files: list[int], rules: bytes) -> None:
    with open(files[0], encoding="utf-8", errors="surrogateescape", closefd=False) as file:
        source = file.read()
    runner.connect(files[1], files[2])
    runner.limit(limits["address"], limits["processes"])
    runner.budget(limits["cpu"], limits["cpu"])
    _libc.prctl(SET_DUMPABLE, 1, 0, 0, 0)
    _filter(rules)
    for name in [name for name in sys.modules if name.startswith("agentrl")]:
        del sys.modules[name]
    os._exit(runner.execute(source))


def _drop_capabilities() -> None:
    """Drop all capabilities, because the first process of a new user namespace has all of them."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION_3, 0)
    _check_call(_libc.capset(header, (ctypes.c_uint32 * 6)()))


def _filter(rules: bytes) -> None:
    """Install the system call filter. bwrap cannot install it, because the zygote itself needs calls that the filter denies."""
    program = _Filter(len(rules) // 8, rules)
    _check_call(_libc.prctl(SET_SECCOMP, FILTER_MODE, ctypes.byref(program), 0, 0))


def _check_call(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        sys.stderr.write(f"zygote: {os.strerror(number)}\n")
        os.kill(os.getpid(), signal.SIGKILL) if os.getpid() != 1 else os._exit(1)
