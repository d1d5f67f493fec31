"""uvicorn's HTTP protocol with two additions: timeouts for clients that send or read nothing, and errors in the format of the
OpenAI API.
"""

import asyncio
import logging
import socket
import time
from contextlib import suppress
from logging import getLogger
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentrl.workers.http.api_errors import ApiError, error_json

HEADER_SECONDS = 30.0
"""The longest wait for a complete request head, in seconds. The same limit applies to the pause between two requests of a
connection.
"""
STALL_SECONDS = 30.0
"""The longest time, in seconds, for which a client may read none of the bytes that wait to be sent to it."""
WAITING_BYTES = 16 * 1024
"""The number of unread bytes of a slow client above which writing pauses."""
MAX_CONNECTIONS = 4096
SWEEP_SECONDS = 1.0


class _GatheringTransport:
    """A transport that sends all bytes that are written in one turn of the event loop together, for example the head and the
    body of a response. Otherwise, each of them is a packet of its own that wakes its receiver.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send the bytes when the present turn of the event loop is over, or more than WAITING_BYTES are gathered. If the
        client is slow, its connection then pauses the writer, as it would if bytes were not gathered.
        """
        if not self._pieces:
            asyncio.get_running_loop().call_soon(self._send)
        self._pieces.append(data)
        if sum(map(len, self._pieces)) > WAITING_BYTES:
            self._send()

    def close(self) -> None:
        """Close the connection after all bytes were sent."""
        self._send()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._pieces.clear()
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that are not yet sent."""
        return self._transport.get_write_buffer_size() + sum(map(len, self._pieces))

    def _send(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self._transport.is_closing():
            self._transport.write(b"".join(pieces))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class GuardedProtocol(H11Protocol):
    """The connection of one client. `sweep` checks all connections, so a connection needs no timers of its own."""

    header_seconds = HEADER_SECONDS
    stall_seconds = STALL_SECONDS
    most_connections = MAX_CONNECTIONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False  # whatever handlers there are: paths hold keys
        self._silent_since: float | None = None
        self._unread: tuple[int, float] = (0, 0.0)  # bytes that wait for the client, and since when so many

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection. If there are too many connections, close it instead."""
        super().connection_made(_GatheringTransport(transport))  # type: ignore[arg-type]
        transport.set_write_buffer_limits(high=WAITING_BYTES)
        transport.max_size = 4 * WAITING_BYTES  # type: ignore[attr-defined]  # asyncio reads 256 KiB at once where one lets it
        if len(self.connections) > self.most_connections:
            transport.abort()

    def check(self, now: float) -> None:
        """Close the connection if the client has sent nothing, or read nothing, for too long. `now` is the monotonic time, in
        seconds.
        """
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
        """Start to measure the wait for the client's next request."""
        self._silent_since = None
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Send an error in the format of the OpenAI API for bytes that are not HTTP, and close the connection."""
        body = error_json(ApiError(400, msg, "invalid_http"))
        length = (b"content-length", str(len(body)).encode())
        head = h11.Response(
            status_code=400, headers=[(b"content-type", b"application/json"), length, (b"connection", b"close")]
        )
        with suppress(h11.LocalProtocolError):  # an answer was begun
            for part in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()


def make_server(app: Any, most_head_bytes: int, goodbye_seconds: int) -> uvicorn.Server:
    """Return the HTTP server for an application. It writes no access log, because paths can contain keys.

    Args:
        app: the ASGI application.
        most_head_bytes: the most bytes of a request's path and headers together.
        goodbye_seconds: the time, in seconds, that open requests have to end after the server is told to exit.
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


async def serve(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serve on the socket until the server is told to exit."""
    sweeping = asyncio.create_task(_sweep(server.server_state.connections))
    try:
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again that ended it
            await server.serve(sockets=[listening])
    finally:
        sweeping.cancel()


async def _sweep(connections: set[Any]) -> None:
    """Check all connections every SWEEP_SECONDS, until the task is cancelled."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        now = time.monotonic()
        for connection in list(connections):
            if connection.transport is not None:
                connection.check(now)
