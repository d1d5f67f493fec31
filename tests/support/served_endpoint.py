"""An endpoint in a thread of the test, over real rows, and attempts whose keys open it."""

import asyncio
import hashlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import text

from agentrl.workers.serving.attempt_keys import AttemptKeys
from agentrl.workers.serving.endpoint import make_server, serve
from agentrl.workers.serving.endpoint_app import Endpoint, EndpointLimits
from agentrl.workers.serving.external_tasks import ExternalTasks
from agentrl.workers.serving.forwarding import Samplers
from agentrl.workers.stack.listening import LOOPBACK, bind, url_of
from agentrl.workflow.store import endpoint_reads
from agentrl.workflow.store.connect import Database
from tests.support.played_runs import claim, start, submission


@dataclass(frozen=True)
class Served:
    """An endpoint, its address, and the server's own state."""

    app: Endpoint
    url: str
    address: tuple[str, int]
    connections: set[Any]


SHORT = EndpointLimits(wait_seconds=5.0, quiet_seconds=0.3)


@contextmanager
def endpoint_over(
    database: Database,
    limits: EndpointLimits = SHORT,
    samplers: Samplers | None = None,
    tasks: "Callable[[str], ExternalTasks] | None" = None,
) -> Iterator[Served]:
    """`tasks` makes the handler of the routes for external agents, for the endpoint's URL."""
    listening = bind(LOOPBACK, 0)
    external = None if tasks is None else tasks(url_of(listening))
    keys = AttemptKeys(partial(endpoint_reads.find_places, database))
    app = Endpoint(keys, limits, samplers=samplers, tasks=external)
    server = make_server(app)
    thread = threading.Thread(target=lambda: asyncio.run(serve(app, listening, server)))
    thread.start()
    try:
        yield Served(app, url_of(listening), listening.getsockname(), server.server_state.connections)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@dataclass(frozen=True)
class Attempt:
    """An attempt that an agent may call for."""

    database: Database
    key: str
    group: int
    episode: int

    @property
    def bearer(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def set(self, table: str, row: int, **values: Any) -> None:
        names = ", ".join(f"{name} = :{name}" for name in values)
        self.database.write(lambda tx: tx.execute(text(f"UPDATE {table} SET {names} WHERE id = {row}"), values))

    def held_by(self, address: str | None) -> None:
        self.set("groups", self.group, address=address or "")


def attempt(database: Database, key: str = "secret", address: str | None = None, lease: float = 60.0) -> Attempt:
    """A claimed group whose first episode has a running agent with that key."""
    group = start(database, submission(name=f"run-{key}"[:60], tasks=1))[0]
    work = claim(database, group, lease=lease)
    episode = work.episodes[0].id
    assert episode is not None
    made = Attempt(database, key, group, episode)
    made.set("episodes", episode, status="running")
    add_attempt(made, key, _attempt_of(database, episode))
    made.held_by(address)
    return made


def _attempt_of(database: Database, episode: int) -> int:
    asked = text("SELECT attempt FROM episodes WHERE id = :episode")
    return int(database.ask(lambda tx: tx.execute(asked, {"episode": episode}).scalar_one()))


def add_attempt(made: Attempt, key: str, number: int, status: str = "running") -> None:
    row: Mapping[str, Any] = {
        "episode": made.episode,
        "attempt": number,
        "status": status,
        "key_hash": hashlib.sha256(key.encode()).hexdigest(),
    }
    asked = text(
        "INSERT INTO agent_attempts (episode_id, attempt, status, key_hash, run, created_at) "
        "VALUES (:episode, :attempt, :status, :key_hash, 'run', CURRENT_TIMESTAMP)"
    )
    made.database.write(lambda tx: tx.execute(asked, row))


def raw(address: tuple[str, int], sent: bytes, timeout: float = 20.0) -> bytes:
    """What the endpoint says to these bytes before it closes the connection."""
    with socket.create_connection(address, timeout) as link:
        link.sendall(sent)
        found = b""
        while piece := link.recv(65536):
            found += piece
        return found
