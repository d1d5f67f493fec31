"""Inside: a session. Cells share one namespace; each runs in a fork, which hands on to the session's next state if it lives.

A keeper starts the first *state* and sleeps: the sandbox lives as long as it does. For each request the state forks a *child*
and waits. The child runs the cell. When the cell has ended, also by an exception, the child is the *heir*, the next state;
where it has other threads, which a fork does not take along, it forks one. Whoever asked ends all but the heir, with all that
the cell left running, or else all but the state, which is still as it was before the cell and says how its child died. Where
the cell left no room for one more process, the child says so and waits until what it started was ended. A process that the
cell forked and let run on to the cell's end is a program that has ended, not a second session.

On the socket the child says `{"started": true}`, waits for a byte and runs the cell; the heir says `{"done": ...}`, a child
without room for one `{"full": true}`, and a state whose child died `{"died": code}`. Whatever a cell forges there, it can only
say that it ended, or hand out data.

Where the keeper is the first process of a namespace, it also stops all others in one step, and lets them go on, as it is told.

This file runs inside and imports the standard library, the runner and plain data.
"""

import ast
import ctypes
import gc
import json
import linecache  # noqa: F401 - what shows an error needs no file then, of which a cell may have left none
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
    """Serves requests, a line of JSON each, until the socket is closed.

    Args:
        cpu_seconds: the most that a request's budget may be.
        orders: where this is the first process of a namespace: the socket that says when all others stop and go on.
    """
    runner.configure_streams()
    runner.limit(address_bytes, processes)
    os.set_inheritable(control, False)
    _show_memory(False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans come here, and nobody asks for them
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


def _show_memory(shown: bool) -> None:
    """Whether processes of the same user may reach into this one; where that cannot be said, the sandbox forbids it."""
    ctypes.CDLL(None).prctl(SET_DUMPABLE, int(shown), 0, 0, 0)


def _keep_order(orders: int) -> NoReturn:
    """The first process of a namespace: a signal that it sends to all reaches everybody else, and no fork outruns it."""
    os.set_inheritable(orders, False)
    while asked := os.read(orders, 1):
        with suppress(ProcessLookupError):  # nobody is left
            os.kill(-1, ORDERS[asked])
        if ORDERS[asked] == signal.SIGSTOP:
            os.write(orders, asked)
    os._exit(0)


def _serve(control: int, most_seconds: int) -> None:
    random.seed(0)  # when cells are run again they draw the same
    cells = types.ModuleType("__main__")
    sys.modules["__main__"] = cells
    gc.freeze()
    _send(control, {"started": True})
    number = 0
    while True:
        asked = _receive(control)
        number += 1
        if child := _fork():
            _send(control, {"died": _wait_for(child)})
            continue
        runner.budget(asked["cpu"], most_seconds)
        _send(control, {"started": True})
        _wait_for_go(control)
        process = getpid()
        done = _serve_request(cells, asked, f"{runner.CELL}{number}>")
        if getpid() != process:
            os._exit(done["code"])
        _hand_on(control, most_seconds / 2)
        runner.budget(most_seconds, most_seconds)
        _send(control, {"done": done})


def _fork() -> int:
    """`fork`, and the child draws on: the module seeds itself anew in every child."""
    drawn = random.getstate()
    child = fork()
    if child == 0:
        random.setstate(drawn)
    return child


def _wait_for(child: int) -> int:
    """How the child died."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:  # a cell said that nobody asks for children
        return -signal.SIGKILL


def _hand_on(control: int, seconds: float) -> None:
    """Returns in the heir, whose processor time is less than `seconds`; a child that is none waits to be ended."""
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
    """A thread that was not taken along may have held the lock of the old ones, which are kept: to close them waits for it."""
    for name, file in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, f"__{name}__")
        OLD_STREAMS.append(old)
        new = open(file, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - it stays open
        if getattr(sys, name) is old:
            setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _serve_request(cells: types.ModuleType, asked: dict[str, Any], file: str) -> dict[str, Any]:
    """Runs a cell or call; its exit code, and a call's value."""
    value = ""
    try:
        if "call" in asked:
            value = _call_function(cells, asked["call"], asked["args"])
        else:
            _run_cell(cells, asked["code"], file)
        code = 0
    except SystemExit as stop:
        code = 1 if "call" in asked else runner.exit_code(stop.code)
    except BaseException as error:  # noqa: BLE001 - it is shown to who wrote the cell
        runner.show(error, asked.get("code", ""), file)
        code = 1
    return {"code": runner.flush_streams(code), "value": value}


def _run_cell(cells: types.ModuleType, source: str, file: str) -> None:
    """Runs a cell and prints the value of its last line, if that is an expression."""
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
    """Waits for one byte; what comes after it is the next request."""
    if not os.read(control, 1):
        os._exit(0)


def _receive(control: int) -> dict[str, Any]:
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = os.read(control, 1 << 16)
        if not part:
            os._exit(0)
        parts.append(part)
    asked: dict[str, Any] = json.loads(b"".join(parts))
    return asked


def _send(control: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(control, data) :]
