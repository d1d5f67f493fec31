"""Worker processes that start in a third of a second instead of five: forked from one that has everything imported.

`python -m bench.faults.fork_server` is that process: it begins no thread and opens nothing, forks a child for each line of
JSON that it reads, and writes down what each child exited with. It ends, with its children, when its input does.
"""

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.faults import loop
from bench.faults.experiment import forked

DEADLINE_SECONDS = 240.0
ALONE = {"AGENTRL_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Child:
    """A forked process: its pid, its log, and the file that says what it exited with."""

    pid: int
    log: Path
    exit_file: Path

    def exit_code(self) -> int | None:
        """What it exited with, minus the signal that killed it; None while it lives."""
        return int(self.exit_file.read_text()) if self.exit_file.exists() else None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)

    def end(self) -> int:
        """Waits for its end; returns what it exited with."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (code := self.exit_code()) is None:
            assert time.monotonic() < deadline, f"{self.pid} does not end\n{self.log.read_text()}"
            time.sleep(0.02)
        return code


@dataclass
class Nursery:
    """Forks children that run `module:function` with arguments that JSON can say."""

    process: "subprocess.Popen[str]"
    folder: Path
    _count: int = field(default=0)

    def start(
        self, target: str, *arguments: Any, log: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> Child:
        """A child that runs the target in that environment, beside the nursery's own."""
        self._count += 1
        exit_file = self.folder / f"{self._count}.exit"
        log = log or self.folder / f"{self._count}.log"
        asked = {"target": target, "arguments": arguments, "log": str(log), "exit": str(exit_file)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({**asked, "environment": dict(environment or {})}) + "\n")
        self.process.stdin.flush()
        return Child(int(self.process.stdout.readline()), log, exit_file)


@contextmanager
def nursery(folder: Path) -> Iterator[Nursery]:
    """The process that forks the others, on an empty folder of its own."""
    environment = {**os.environ, **ALONE, **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}}
    command = [sys.executable, "-m", "bench.faults.fork_server"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Nursery(process, folder)
        assert process.stdin
        process.stdin.close()


def serve(roles: list[str]) -> None:
    """A worker."""
    from agentrl.workers.stack.worker import run

    run(roles)


def command(words: list[str], out: str) -> None:
    """A command line, whose stdout is a file."""
    from agentrl.cli.main import main

    with Path(out).open("wb") as output:
        os.dup2(output.fileno(), 1)
    sys.argv = ["agentrl", *words]
    sys.exit(main())


def main() -> None:
    """Forks what it is asked for."""
    for module in loop._PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # else each child would look through all of it, again and again
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a thread does not survive a fork"
    alive: dict[int, Path] = {}
    while True:
        asked, _, _ = select.select([0], [], [], 0.02)
        if asked:
            line = _line()
            if not line:
                break
            wanted = json.loads(line)
            pid = forked(lambda wanted=wanted: _work(wanted), Path(wanted["log"]))  # type: ignore[misc]
            alive[pid] = Path(wanted["exit"])
            print(pid, flush=True)
        _bury(alive)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def _line() -> str:
    """One line of what is asked, read byte by byte: what a buffer holds, `select` does not see."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line.decode()


def _bury(alive: dict[int, Path]) -> None:
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        file = alive.pop(pid)
        beside = file.with_suffix(".new")
        beside.write_text(str(os.waitstatus_to_exitcode(status)))
        beside.rename(file)


def _work(wanted: Mapping[str, Any]) -> None:
    os.environ |= wanted["environment"]
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.path[1:1] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in ("", *sys.path)]
    module, _, name = wanted["target"].partition(":")
    getattr(importlib.import_module(module), name)(*wanted["arguments"])


if __name__ == "__main__":
    main()
