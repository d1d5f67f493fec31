"""The endpoint process, to which agents send their requests. It starts in under a second, needs no model, and stores nothing
outside the database.

In the embedded stack, the supervisor owns the listening socket and passes it to the endpoint. So a restarted endpoint has the
same port, and its clients wait in the backlog meanwhile. The row of the endpoint in `service_leases` contains its URL, for the
workers that start agents.
"""

import asyncio
import os
import resource
import signal
import socket
import sys
from contextlib import closing, suppress
from functools import partial
from logging import getLogger
from types import FrameType

import uvicorn

from agentrl.workers.http import http_server
from agentrl.workers.http.calls import MAX_HEAD_BYTES
from agentrl.workers.serving.attempt_keys import AttemptKeys
from agentrl.workers.serving.endpoint_app import Endpoint, EndpointLimits
from agentrl.workers.serving.external_tasks import serve_tasks
from agentrl.workers.stack.listening import LISTENER, LOOPBACK, bind, is_loopback, url_of
from agentrl.workers.stack.readiness import readiness
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.settings import settings
from agentrl.workflow.store import endpoint_reads, leases
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import open_database

log = getLogger("agentrl.endpoint")

GOODBYE_SECONDS = 2
"""The time, in seconds, that open requests have to end after SIGTERM. After that, they are cut off, and their clients retry."""


def run(host: str = LOOPBACK, port: int | None = None) -> None:
    """Serve until SIGTERM. If the supervisor passed a listening socket, use this socket instead of the address.

    Raises:
        ServiceError: the database does not answer, or the address is in use.
    """
    where = settings()
    with closing(open_database(where.database)) as database, _listener(host, port) as listening:
        url = where.endpoint_url or url_of(listening)
        log.info("the endpoint listens at %s", url)
        if not is_loopback(listening):
            log.warning("other machines can reach the endpoint over plain HTTP: keys and messages are sent unencrypted")
        raise_file_limit()
        signal.signal(signal.SIGTERM, _end)
        asyncio.run(_run(database, listening, url))


def _listener(host: str, port: int | None) -> socket.socket:
    handed = os.environ.get(LISTENER)
    if handed:
        return socket.socket(fileno=int(handed))
    return bind(host, settings().endpoint_port if port is None else port)


def make_server(app: Endpoint) -> uvicorn.Server:
    """Return the HTTP server of the endpoint or of a served policy."""
    return http_server.make_server(app, MAX_HEAD_BYTES, GOODBYE_SECONDS)


async def serve(app: Endpoint, listening: socket.socket, server: uvicorn.Server) -> None:
    """Serve on the socket until the server is told to exit. Then close the application's connections to workers and its lookup
    of keys.
    """
    try:
        await http_server.serve(server, listening)
    finally:
        await app.close()


async def _run(database: Database, listening: socket.socket, url: str) -> None:
    where = settings()
    limits = EndpointLimits(open_calls=where.endpoint_calls, wait_seconds=where.endpoint_wait_seconds)
    keys = AttemptKeys(partial(endpoint_reads.find_places, database))
    app = Endpoint(keys, limits, tasks=serve_tasks(database, url))
    publishing = asyncio.create_task(publish(database, url, where.lease_seconds))
    try:
        await serve(app, listening, make_server(app))
    finally:
        publishing.cancel()


async def publish(database: Database, url: str, lease: float) -> None:
    """Store the endpoint's URL in the database, and renew the lease of this row until the asyncio task is cancelled."""
    while True:
        try:
            await asyncio.to_thread(leases.publish_service, database, endpoint_reads.ENDPOINT, url, lease)
            readiness().confirm()
        except ServiceError as error:
            readiness().lose(error.message)
        await asyncio.sleep(lease / 3)


def _end(number: int, frame: FrameType | None) -> None:
    """Exit with code 0 on SIGTERM before and after serving. While the endpoint serves, uvicorn handles the signal."""
    sys.exit(0)


def raise_file_limit() -> None:
    """Raise this process's limit on open files to the maximum, because each open request needs two connections."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
