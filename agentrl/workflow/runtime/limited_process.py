"""A process that answers requests within limits of time and memory, for work on untrusted input.

This module has the code of both processes: `LimitedProcess` sends requests, and `serve` answers them. The process answers one
request after another. A request that exceeds the limits ends the process, so some work needs no other protection: a single
instruction that cannot be interrupted, for example.
"""

import json
import math
import resource
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
    """A request used more processor time, time or memory than it may, and its process was killed."""


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
        the answer. After `seconds` the process is killed. Raise LimitError if the process was killed, and ServiceError if it
        ended in another way.
        """
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            line = self._answer(json.dumps(request).encode() + b"\n")
        except BaseException:  # its late answer would be taken for the next request's
            self._process.kill()
            raise
        finally:
            timer.cancel()
        answer: dict[str, Any] = json.loads(line, object_hook=decode)
        return answer

    def _answer(self, request: bytes) -> bytes:
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
            raise LimitError
        raise ServiceError(
            f"The process that {self._task} ended with exit code {status}.", "Its output is in the worker's log."
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(BrokenPipeError), process:
        process.kill()


# the other end


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
