"""The process of a session, which runs inside the sandbox. The cells of the session share one namespace of Python names. Each
cell runs in a forked process, which becomes the session's next state if it survives.

The session's parent process starts the first *state* process and then sleeps; the sandbox lives as long as the parent. For each
request the state forks a *child*, which runs the cell, and waits for it. After the cell, even after an exception, the child
becomes the next state. A fork does not copy other threads. So a child that has other threads forks a new process, which becomes
the next state instead. The host then kills all processes except the next state.

If the cell died, the host keeps the old state, which is unchanged and reports how its child died. If the cell has used up the
allowed number of processes, the child reports that. It then waits until the host has killed the cell's processes. A process
that the cell forked exits when it reaches the end of the cell, so it does not become a second session.

On the socket the child sends `{"started": true}`, waits for a byte, and runs the cell. The next state sends `{"done": ...}`. A
child that cannot fork sends `{"full": true}`, and a state whose child died sends `{"died": code}`. A cell can forge these
messages, but it gains nothing: it can only claim that it ended, or return other data.

If the session's parent is the first process of a namespace, it also carries out orders to stop all other processes in one step,
and to continue them.

This file runs inside and imports only the standard library, `runner` and `exact_json`.
"""

import ast
import ctypes
import gc
import json
import linecache  # noqa: F401 - imported now: a cell may leave no descriptor for it when an error is shown
import os
import random
import signal
import sys
import traceback  # noqa: F401
import types
from _thread import _count as running
from contextlib import suppress
from os import fork, getpid  # a cell may change the modules
from signal import ITIMER_PROF, ITIMER_REAL, ITIMER_VIRTUAL, pause, setitimer
from time import process_time
from typing import Any, NoReturn

from agentrl.workflow.sandbox import exact_json, runner

NOBODY = -1
OLD_STREAMS: list[object] = []
TIMERS = (ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF)
SET_DUMPABLE = 4
ORDERS = {b"s": signal.SIGSTOP, b"g": signal.SIGCONT}


def main(control: int, cpu_seconds: int, address_bytes: int, processes: int, orders: int = NOBODY) -> None:
    """Serve requests until the socket is closed. Each request is a line of JSON.

    Args:
        control: the descriptor of the socket.
        cpu_seconds: the maximum processor time of a request, in seconds.
        address_bytes, processes: see `runner.limit`.
        orders: the descriptor of the socket that receives orders to stop and continue all other processes, if this process is
            the first process of a namespace; else NOBODY.
    """
    runner.configure_streams()
    runner.limit(address_bytes, processes)
    os.set_inheritable(control, False)
    _show_memory(False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans become children of this process, which never waits for them
    if fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _show_memory(True)
        if orders != NOBODY:
            os.close(orders)
        _serve(control, cpu_seconds)
    os.close(control)
    while orders == NOBODY:
        pause()
    _keep_order(orders)


def _show_memory(traceable: bool) -> None:
    """Allow or forbid processes of the same user to trace this one. If that fails, tracing is forbidden anyway."""
    ctypes.CDLL(None).prctl(SET_DUMPABLE, int(traceable), 0, 0, 0)


def _keep_order(orders: int) -> NoReturn:
    """Carry out orders to stop and continue all other processes.

    This process is the first of its namespace. So its signal reaches all other processes in one step, which a fork cannot
    escape.
    """
    os.set_inheritable(orders, False)
    while order := os.read(orders, 1):
        with suppress(ProcessLookupError):  # no other process is left
            os.kill(-1, ORDERS[order])
        if ORDERS[order] == signal.SIGSTOP:
            os.write(orders, order)
    os._exit(0)


def _serve(control: int, max_seconds: int) -> None:
    random.seed(0)  # cells that are run again draw the same numbers
    cells = types.ModuleType("__main__")
    sys.modules["__main__"] = cells
    gc.freeze()
    _send(control, {"started": True})
    number = 0
    while True:
        request = _receive(control)
        number += 1
        if child := _fork():
            _send(control, {"died": _wait_for(child)})
            continue
        runner.budget(request["cpu"], max_seconds)
        _send(control, {"started": True})
        _wait_for_go(control)
        process = getpid()
        done = _serve_request(cells, request, f"{runner.CELL}{number}>")
        if getpid() != process:
            os._exit(done["code"])
        _hand_on(control, max_seconds / 2)
        runner.budget(max_seconds, max_seconds)
        _send(control, {"done": done})


def _fork() -> int:
    """Fork this process. The state of `random` is the same in the child; without this, Python would seed it again."""
    drawn = random.getstate()
    child = fork()
    if child == 0:
        random.setstate(drawn)
    return child


def _wait_for(child: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:  # a cell set SIGCHLD to be ignored
        return -signal.SIGKILL


def _hand_on(control: int, seconds: float) -> None:
    """Return only in the process that becomes the next state. That process has no other threads and has used less than
    `seconds` of processor time.

    If the current process does not meet this, it forks a process that does, and waits to be killed.
    """
    if running() == 0 and process_time() < seconds:
        for timer in TIMERS:
            setitimer(timer, 0)
        return
    while True:
        try:
            if _fork() == 0:
                _renew_streams()
                return
        except OSError:
            _send(control, {"full": True})
            _wait_for_go(control)
            continue
        while True:
            pause()


def _renew_streams() -> None:
    """Replace the standard streams, whose locks a lost thread may hold. The old ones stay: closing would block."""
    for name, file in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, f"__{name}__")
        OLD_STREAMS.append(old)
        new = open(file, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - it stays open
        if getattr(sys, name) is old:
            setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _serve_request(cells: types.ModuleType, request: dict[str, Any], file: str) -> dict[str, Any]:
    """Run a cell or a call; return the exit code and, for a call, the value."""
    value = ""
    try:
        if "call" in request:
            value = _call_function(cells, request["call"], request["args"])
        else:
            _run_cell(cells, request["code"], file)
        code = 0
    except SystemExit as stop:
        code = 1 if "call" in request else runner.exit_code(stop.code)
    except BaseException as error:  # noqa: BLE001 - it is shown to the cell's author
        runner.show(error, request.get("code", ""), file)
        code = 1
    return {"code": runner.flush_streams(code), "value": value}


def _run_cell(cells: types.ModuleType, source: str, file: str) -> None:
    """Run a cell. If its last statement is an expression, print the value."""
    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), cells.__dict__)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), file, "eval"), cells.__dict__)  # noqa: S307 - this is the sandbox
        if value is not None:
            print(repr(value))


def _call_function(cells: types.ModuleType, function: str, args: str) -> str:
    if function not in cells.__dict__:
        raise NameError(f"name {function!r} is not defined")
    value = exact_json.encode(cells.__dict__[function](*exact_json.decode(args)))
    if len(value) > exact_json.MAX_CHARACTERS:
        raise ValueError(f"the value has {len(value)} characters; at most {exact_json.MAX_CHARACTERS} are handed out")
    return value


def _wait_for_go(control: int) -> None:
    """Wait for one byte from the host. Only one byte is read, because the next request follows it."""
    if not os.read(control, 1):
        os._exit(0)


def _receive(control: int) -> dict[str, Any]:
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = os.read(control, 1 << 16)
        if not part:
            os._exit(0)
        parts.append(part)
    request: dict[str, Any] = json.loads(b"".join(parts))
    return request


def _send(control: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(control, data) :]
