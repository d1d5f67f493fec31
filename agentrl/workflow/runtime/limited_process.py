"""A process that answers requests within limits of time and memory, for work on untrusted input.

This module has the code of both processes: `LimitedProcess` sends requests, and `serve` answers them. The process answers one
request after another. A request that exceeds a limit of time kills the process: some work, such as a single instruction of
SQLite, cannot be interrupted in another way. Beyond the limit of memory, allocations fail.
"""

import json
import math
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from agentrl.workflow.errors import ServiceError


class LimitError(Exception):
    """A request used more processor time or wall time than it may, and its process was killed."""


class ProcessKilled(LimitError):
    """A signal ended the process: the request crashed it or used too much memory, or somebody else sent the signal."""


class LimitedProcess:
    """A child process that answers requests.

    Args:
        module: the name of the module that the process runs as a program. The program calls `serve`.
        task: what the process does, for a message about its failure, such as `reads the database`.
    """

    def __init__(self, module: str, task: str) -> None:
        self._task = task
        command = [sys.executable, "-P", "-m", module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(
        self, request: Mapping[str, Any], seconds: float, decode: Callable[[dict[str, Any]], Any] | None = None
    ) -> dict[str, Any]:
        """Send a request to the process, and return the answer. Both are JSON objects; `decode` is called with each object in
        the answer. After `seconds` the process is killed. Raise LimitError if the request took too long, ProcessKilled if
        another signal ended the process, and ServiceError if the process ended in another way.
        """
        is_late = threading.Event()
        timer = threading.Timer(seconds, self._end_late, [is_late])
        timer.start()
        try:
            line = self._answer(json.dumps(request).encode() + b"\n", is_late)
        except BaseException:  # a late answer would be read as the answer to the next request
            self._process.kill()
            raise
        finally:
            timer.cancel()
        answer: dict[str, Any] = json.loads(line, object_hook=decode)
        return answer

    def _end_late(self, is_late: threading.Event) -> None:
        is_late.set()
        self._process.kill()

    def _answer(self, request: bytes, is_late: threading.Event) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(request)
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if line.endswith(b"\n"):
            return line
        status = self._process.wait()
        if status < 0:
            raise LimitError if is_late.is_set() or status == -signal.SIGXCPU else ProcessKilled
        raise ServiceError(
            f"The process that {self._task} ended with exit code {status}.", "Its output is in the worker's log."
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(BrokenPipeError), process:
        process.kill()


# the code of the child process


def serve(answer: Callable[[dict[str, Any]], str], memory_bytes: int) -> None:
    """Read requests from stdin, and write the answers to stdout. `answer` returns JSON in one line."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(answer(json.loads(line)).encode() + b"\n")
        sys.stdout.buffer.flush()


def limit_processor_time(seconds: int | None) -> None:
    """Limit the processor time that this process may still use, in seconds; None removes the limit."""
    hard_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = hard_limit if seconds is None else math.ceil(time.process_time()) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard_limit))
