"""Inside: a session. Cells share one namespace; each runs in a fork, which becomes the session if it lives.

A keeper starts the first *state* and sleeps: the sandbox lives as long as it does. For each request the state forks a *child*
and waits. The child runs the cell. When the cell has ended, also by an exception, and whoever asked wants to keep what it did,
the state ends and the child is the next state. When the child died, the state is still as it was before the cell, and says how
the child died. A process that the cell forked and let run on to the cell's end is a program that has ended, not a second
session.

On the socket the child says `{"started": true}`, waits for a byte, runs the cell, says `{"done": ...}` and waits for a byte; a
state whose child died says `{"died": code}`. Whatever a cell forges there, it can only say that it ended, or hand out data.

This file runs inside and imports the standard library, the runner and plain data.
"""

import ast
import gc
import json
import os
import random
import resource
import select
import signal
import sys
import types
from os import getpid  # a cell may change the module
from typing import Any

from workflow.sandbox import plain, runner


def main(control: int, address_bytes: int, processes: int) -> None:
    """Serves requests, a line of JSON each, until the socket is closed."""
    runner.settle()
    runner.limit(address_bytes, processes)
    os.set_inheritable(control, False)
    state = os.fork()
    if state == 0:
        _serve(control)
    os.close(control)
    os.waitpid(state, 0)
    while True:
        signal.pause()


def _serve(control: int) -> None:
    random.seed(0)  # when cells are run again they draw the same
    cells = types.ModuleType("__main__")
    sys.modules["__main__"] = cells
    gc.freeze()
    _say(control, {"started": True})
    number = 0
    while True:
        asked = _heard(control)
        number += 1
        heir = _become_child(control)
        if heir is None:
            continue
        runner.budget(asked["cpu"], final=False)
        _say(control, {"started": True})
        _go(control)
        child = getpid()
        done = _done(cells, asked, f"{runner.CELL}{number}>")
        if getpid() != child:
            os._exit(done["code"])
        runner.budget(resource.RLIM_INFINITY, final=False)
        _say(control, {"done": done})
        _go(control)
        os.write(heir, b"1")
        os.close(heir)


def _become_child(control: int) -> int | None:
    """In the child: the pipe on which it says that it lives. In the state whose child died: None, once it was told."""
    heard, told = os.pipe()
    drawn = random.getstate()
    child = os.fork()
    if child == 0:
        random.setstate(drawn)  # the module seeds itself anew in every child
        os.close(heard)
        return told
    os.close(told)
    watched = select.poll()
    pidfd = os.pidfd_open(child)
    watched.register(heard, select.POLLIN)
    watched.register(pidfd, select.POLLIN)
    watched.poll()
    if select.select([heard], [], [], 0)[0] and os.read(heard, 1):
        os._exit(0)
    died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(heard)
    os.close(pidfd)
    _say(control, {"died": died})
    return None


def _done(cells: types.ModuleType, asked: dict[str, Any], file: str) -> dict[str, Any]:
    """What a cell or call came to: its exit code, and a call's value."""
    value = ""
    try:
        if "call" in asked:
            value = _called(cells, asked["call"], asked["args"])
        else:
            _run(cells, asked["code"], file)
        code = 0
    except SystemExit as stop:
        code = 1 if "call" in asked else runner.exit_code(stop.code)
    except BaseException as error:  # noqa: BLE001 - it is shown to who wrote the cell
        runner.show(error, asked.get("code", ""), file)
        code = 1
    return {"code": runner.flushed(code), "value": value}


def _run(cells: types.ModuleType, source: str, file: str) -> None:
    """Runs a cell and prints the value of its last line, if that is an expression."""
    tree = ast.parse(source, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), cells.__dict__)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), file, "eval"), cells.__dict__)  # noqa: S307 - this is the sandbox
        if value is not None:
            print(repr(value))


def _called(cells: types.ModuleType, function: str, args: str) -> str:
    if function not in cells.__dict__:
        raise NameError(f"name {function!r} is not defined")
    value = plain.encode(cells.__dict__[function](*plain.decode(args)))
    if len(value) > plain.MAX_CHARACTERS:
        raise ValueError(f"the value has {len(value)} characters; at most {plain.MAX_CHARACTERS} are handed out")
    return value


def _go(control: int) -> None:
    """Waits for one byte; what comes after it is the next request."""
    if not os.read(control, 1):
        os._exit(0)


def _heard(control: int) -> dict[str, Any]:
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = os.read(control, 1 << 16)
        if not part:
            os._exit(0)
        parts.append(part)
    asked: dict[str, Any] = json.loads(b"".join(parts))
    return asked


def _say(control: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(control, data) :]
