"""What open calls take in the endpoint: an endpoint process of its own, and clients whose answers do not come."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

from agentrl.workers.stack.listening import LISTENER, LOOPBACK, bind
from agentrl.workflow.store.migrate import open_database
from tests.support.scripted_worker import scripted_worker, silence
from tests.support.served_endpoint import attempt

SESSIONS = 500
ATTEMPTS = 10
BODY = b'{"stream": true, "messages": [{"role": "user", "content": "' + b"x" * 4000 + b'"}]}'
PATIENCE_SECONDS = 120.0


def kib_per_session() -> float:
    """Resident memory that the endpoint takes more for each of `SESSIONS` open calls with a body of 4 KB, in KiB."""
    with TemporaryDirectory() as folder, _endpoint(Path(folder)) as (process, address, url), ExitStack() as held:
        database = held.enter_context(closing(open_database(url)))
        worker = held.enter_context(scripted_worker(silence(Event())))
        for number in range(ATTEMPTS):
            attempt(database, f"key{number}").held_by(worker.address)
        held.enter_context(_call(address, 0))  # what is made once
        _until(lambda: len(worker.requests) == 1)
        before = _resident(process)
        for number in range(SESSIONS):
            held.enter_context(_call(address, number % ATTEMPTS))
        _until(lambda: len(worker.requests) == SESSIONS + 1)
        return (_resident(process) - before) / SESSIONS


@contextmanager
def _endpoint(folder: Path) -> "Iterator[tuple[subprocess.Popen[bytes], tuple[str, int], str]]":
    """The endpoint as a process, its address, and its database's URL."""
    url = f"sqlite:///{folder}/agentrl.db"
    open_database(url).close()
    with bind(LOOPBACK, 0) as listening:
        environment = {**os.environ, "AGENTRL_HOME": str(folder), "AGENTRL_DATABASE_URL": url}
        environment[LISTENER] = str(listening.fileno())
        command = [sys.executable, "-m", "agentrl.workers.stack.worker", "endpoint"]
        with (folder / "endpoint.log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, pass_fds=[listening.fileno()], stderr=log)
        try:
            yield process, listening.getsockname(), url
        finally:
            process.kill()
            process.wait()


def _call(address: tuple[str, int], number: int) -> socket.socket:
    made = socket.create_connection(address)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\nauthorization: Bearer key{number}\r\n"
    made.sendall(f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY)
    return made


def _resident(process: "subprocess.Popen[bytes]") -> int:
    """KiB of the process."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def _until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not met():
        assert time.monotonic() < deadline, "the calls did not arrive"
        time.sleep(0.05)
