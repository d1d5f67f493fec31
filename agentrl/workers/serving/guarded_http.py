"""uvicorn's protocol, with an eye on clients that say nothing or read nothing, and refusals in the shape of the API."""

import asyncio
import logging
import time
from contextlib import suppress
from logging import getLogger
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentrl.workers.serving.api_errors import ApiError

HEADER_SECONDS = 30.0
"""How long a connection may be open without a whole request head, also between two requests."""
STALL_SECONDS = 30.0
"""How long a client may read nothing of what waits for it."""
WAITING_BYTES = 16 * 1024
"""How much may wait for a client that reads slowly."""
MAX_CONNECTIONS = 4096
SWEEP_SECONDS = 1.0


class GuardedProtocol(H11Protocol):
    """One connection of a client. `sweep` looks at all, so that none needs timers of its own."""

    header_seconds = HEADER_SECONDS
    stall_seconds = STALL_SECONDS
    most_connections = MAX_CONNECTIONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False  # whatever handlers there are: paths hold keys
        self._silent_since: float | None = None
        self._unread: tuple[int, float] = (0, 0.0)  # bytes that wait for the client, and since when so many

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, unless there are too many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WAITING_BYTES)
        transport.max_size = 4 * WAITING_BYTES  # type: ignore[attr-defined]  # asyncio reads 256 KiB at once where one lets it
        if len(self.connections) > self.most_connections:
            transport.abort()

    def check(self, now: float) -> None:
        """Cut the connection if the client has been silent or has read nothing for too long."""
        waits = self.transport.get_write_buffer_size()
        if waits == 0 or waits < self._unread[0] or self._unread[0] == 0:
            self._unread = (waits, now)
        elif now - self._unread[1] > self.stall_seconds:
            self.transport.abort()
        if self.cycle is not None and not self.cycle.response_complete:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since > self.header_seconds:
            self.transport.abort() if waits else self.transport.close()

    def on_response_complete(self) -> None:
        """Begin the wait for the next request anew."""
        self._silent_since = None
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the shape of the API, and closes."""
        error = ApiError(400, msg, "invalid_http")
        length = (b"content-length", str(len(error.body)).encode())
        head = h11.Response(
            status_code=400, headers=[(b"content-type", b"application/json"), length, (b"connection", b"close")]
        )
        with suppress(h11.LocalProtocolError):  # an answer was begun
            for part in (head, h11.Data(data=error.body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()


def make_server(app: Any, most_head_bytes: int, goodbye_seconds: int) -> uvicorn.Server:
    """Return the HTTP server of an application, without logs: hang-ups and bad requests are everyday, and paths hold keys.

    Args:
        most_head_bytes: of a path with its headers.
        goodbye_seconds: how long open calls may go on after it was told to end.
    """
    getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    config = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=most_head_bytes,
        timeout_keep_alive=int(HEADER_SECONDS),
        timeout_graceful_shutdown=goodbye_seconds,
    )
    return uvicorn.Server(config)


async def sweep(connections: set[Any]) -> None:
    """Check all connections again and again."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        now = time.monotonic()
        for connection in list(connections):
            if connection.transport is not None:
                connection.check(now)
