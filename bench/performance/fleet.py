"""What a run needs to be measured: a Redis as the embedded stack has it, a database, worker processes."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import text

from agentrl.workers.agents.guardian import descendants
from agentrl.workers.stack import broker
from agentrl.workflow.sandbox.proc import processor_seconds
from agentrl.workflow.settings import Settings
from tests.support.real_stack import Stack

PATIENCE_SECONDS = 3600.0
"""A test gives up long before; what is measured here takes its time."""


class Fleet(Stack):
    """Worker processes around a broker; closed, all of it is gone."""

    def wait(self, met: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Waits until the condition is met, or fails with the logs."""
        super().wait(met, what, seconds)

    def start(self, *command: str, **environment: str) -> "subprocess.Popen[bytes]":
        """A process `python -m COMMAND`."""
        with (self.home / f"{len(self._workers)}.log").open("wb") as log:
            line = [sys.executable, "-m", *command]
            process = subprocess.Popen(line, env=self.environment | environment, stdout=log, stderr=log)
        self._workers.append(process)
        return process

    def clocked(self, roles: str) -> Path:
        """Starts a worker with a clock; the file that it writes at its end."""
        file = self.home / f"clock.{len(self._workers)}.json"
        self.start("bench.performance.clock", roles, str(file))
        return file

    def submit(self, name: str, options: Mapping[str, Any]) -> None:
        """Sends a run of these options, `section.key: value`."""
        chosen = [word for key, value in options.items() for word in ("-s", f"{key}={json.dumps(value)}")]
        self.agentrl("submit", "--detach", "--name", name, *chosen)

    def rows(self, query: str) -> list[Any]:
        """All rows of a query."""
        with self.database.read() as tx:
            return list(tx.execute(text(query)).all())

    def processor_seconds(self) -> float:
        """The processor time of the workers, and of all processes that they have started."""
        workers = {process.pid for process in self._workers}
        return sum(map(processor_seconds, workers.union(*map(descendants, workers))))

    def end(self) -> None:
        """Ends the workers in good order."""
        for process in self._workers:
            process.terminate()
        for process in self._workers:
            process.wait(60)


def seconds(moment: Any) -> float:
    """A moment of the rows, which SQLite gives as text, in seconds since the epoch."""
    return (datetime.fromisoformat(f"{moment}+00:00") if isinstance(moment, str) else moment).timestamp()


@contextmanager
def fleet(**environment: str) -> Iterator[Fleet]:
    """A fleet in an empty folder; the leases and ticks are those that users have."""
    home = Path(tempfile.mkdtemp(prefix="arl-bench-", dir="/tmp"))  # short: a socket's name may have 104 bytes
    where = Settings(home=home)
    redis = broker.start_server(where)
    url = f"{broker.SOCKET_SCHEME}{broker.socket_path(where)}?virtual_host=0"
    usual = {"AGENTRL_LEASE_SECONDS": "30", "AGENTRL_TICK_SECONDS": "2", "AGENTRL_THREADS": "0"}
    made = Fleet(home, **{"AGENTRL_BROKER_URL": url, **usual, **environment})
    try:
        yield made
    finally:
        made.close()
        redis.terminate()
        redis.wait(10)
        shutil.rmtree(home)
