"""A person's shell in a folder that looks like a checkout after `make env`: bash, with the commands of its `.venv/bin`.

`agentrl` and `python` there are small programs. They ask this process to start the real one, which `forked_programs` forks
in a third of a second, and hand it their streams, folder and environment.
"""

import json
import os
import pty
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 600.0
"""The longest time that a command may take: on a machine that is busy with other tests, `make quickstart` takes minutes."""
PROGRAMS = {"agentrl": ["-P", "-m", "agentrl.cli"], "python": []}
"""Command -> the words between the interpreter and the command's own."""
CTRL_D = "\x04"
_MARKS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_CLIENT = """#!{interpreter} -IS
import json, os, socket, sys
request = {{"words": {words} + sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
message = json.dumps(request).encode()
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
server.sendall(message)
sys.exit(int.from_bytes(server.recv(1), "big"))
"""


@dataclass(frozen=True)
class Finished:
    """A command's exit code, None while it runs, and what it printed, stdout and stderr together."""

    code: int | None
    output: str


@dataclass
class UserShell:
    """Runs commands in `folder`; variables that one exports are there for the next."""

    folder: Path
    environment: dict[str, str]
    programs: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    _open: "list[tuple[subprocess.Popen[bytes], Path]]" = field(default_factory=list)

    def run(self, text: str) -> Finished:
        """Run a command to its end."""
        log = self.folder.parent / "output"
        with killed_on_error(self._start(text, log)) as process:
            code = process.wait(SECONDS)
        return Finished(code, log.read_text(errors="replace"))

    def start(self, text: str, ready: str) -> Finished:
        """Start a command that stays up; return what it has printed as soon as that matches `ready`, or it has ended."""
        log = self.folder.parent / f"output-{len(self._open)}"
        process = self._start(text, log)
        self._open.append((process, log))
        deadline = time.monotonic() + SECONDS
        while not re.search(ready, output := log.read_text(errors="replace")):
            assert time.monotonic() < deadline, f"{text} does not print {ready!r}\n{output}"
            if process.poll() is not None:
                self._open.pop()
                break
            time.sleep(0.05)
        return Finished(process.poll(), output)

    def interrupt(self) -> list[Finished]:
        """Press Ctrl-C for each command that stays up; return how they ended."""
        for program in [each for each in self.programs if each.poll() is None]:
            program.send_signal(signal.SIGINT)
        with ExitStack() as stack:
            for process, _ in self._open:
                stack.enter_context(killed_on_error(process))
            ended = [Finished(process.wait(SECONDS), log.read_text(errors="replace")) for process, log in self._open]
        self._open.clear()
        return ended

    def talk(self, text: str, lines: Sequence[str], prompt: str) -> Finished:
        """Run a command at a terminal: type each line when it prompts, then Ctrl-D."""
        outer, inner = pty.openpty()
        with killed_on_error(self._popen(text, inner)) as process:
            os.close(inner)
            keys = [*(f"{line}\r" for line in lines), CTRL_D]
            output = ""
            while piece := _read_terminal(outer):
                output = _MARKS.sub("", output + piece)
                if keys and len(re.findall(rf"^{prompt}", output, re.MULTILINE)) > len(lines) + 1 - len(keys):
                    os.write(outer, keys.pop(0).encode())
            os.close(outer)
            code = process.wait(SECONDS)
        return Finished(code, output.replace("\r\n", "\n"))

    def _start(self, text: str, log: Path) -> "subprocess.Popen[bytes]":
        with log.open("wb") as output:
            return self._popen(text, output)

    def _popen(self, text: str, output: Any) -> "subprocess.Popen[bytes]":
        state = shlex.quote(str(self.folder.parent / "exported"))
        script = f"set -e\ntouch {state}\n. {state}\n{text}\nexport -p >{state}\n"
        given = output if isinstance(output, int) else subprocess.DEVNULL
        options: dict[str, Any] = {"stdin": given, "stdout": output, "stderr": output, "process_group": 0}
        return subprocess.Popen(["bash", "-c", script], cwd=self.folder, env=self.environment, **options)


@contextmanager
def killed_on_error(process: "subprocess.Popen[bytes]") -> "Iterator[subprocess.Popen[bytes]]":
    """Kill the process group that the process leads, and wait for the process, if the context raises an exception.

    Else the process would run on, and Python would warn of it when the exception is collected: in a later test.
    """
    try:
        yield process
    except BaseException:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def _read_terminal(terminal: int) -> str:
    """Return what a terminal shows next; empty if the command has closed it."""
    assert select.select([terminal], [], [], SECONDS)[0], "the command prints nothing and does not end"
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:
        return ""


@contextmanager
def user_shell(folder: Path, environment: Mapping[str, str]) -> Iterator[UserShell]:
    """Yield the shell of a person in `folder`/checkout. For a test with `forked_programs`."""
    place = folder / "checkout"
    commands = place / ".venv" / "bin"
    commands.mkdir(parents=True)
    address = str(folder / "programs")
    for name, words in PROGRAMS.items():
        (commands / name).write_text(_CLIENT.format(interpreter=sys.executable, words=words, address=address))
        (commands / name).chmod(0o755)
    path = f"{commands}:{os.environ['PATH']}"
    shell = UserShell(place, {**environment, "PATH": path, "PYTHONUNBUFFERED": "1"})
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        threading.Thread(target=_accept, args=(server, shell), daemon=True).start()
        try:
            yield shell
        finally:
            shell.interrupt()
            server.shutdown(socket.SHUT_RDWR)


def _accept(server: socket.socket, shell: UserShell) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:  # the shell is closed
            return
        threading.Thread(target=_serve, args=(client, shell), daemon=True).start()


def _serve(client: socket.socket, shell: UserShell) -> None:
    """Start the program that a client asks for, and send it the exit code."""
    with client:
        length, streams, _, _ = socket.recv_fds(client, 8, 3)
        with client.makefile("rb") as source:
            request = json.loads(source.read(int.from_bytes(length, "big")))
        command = [sys.executable, *request["words"]]
        stdin, stdout, stderr = streams
        process = subprocess.Popen(command, cwd=request["cwd"], env=request["env"], stdin=stdin, stdout=stdout, stderr=stderr)
        for stream in streams:
            os.close(stream)
        shell.programs.append(process)
        code = process.wait()
        client.sendall(bytes([code if code >= 0 else 128 - code]))
