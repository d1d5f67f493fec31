"""The endpoint's connections to the rollout workers that sample. They use HTTP/1.1 by h11, and each serves many requests."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress

import h11

Headers = list[tuple[bytes, bytes]]
Sent = Iterable[tuple[bytes, bytes]]

CONNECT_SECONDS = 5.0
WRITE_SECONDS = 30.0
"""The time limit for sending a request to a worker, in seconds. A worker that does not read it in this time is regarded as
lost.
"""
IDLE_SECONDS = 30.0
"""The time in seconds after which an idle connection is not reused, because the worker may be closing it."""
MAX_IDLE = 64
"""The most idle connections per address."""
PIECE = 16 * 1024
"""The most bytes that are read at once. Up to twice as many bytes wait for a slow client."""


class Broken(Exception):
    """The error that the connection to the worker failed. The request may be forwarded again."""


class WorkerConnection:
    """One connection to a worker. It serves one request after another."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address, self._reader, self._writer = address, reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self.rested_at = 0.0
        self.used = False

    async def send(self, method: str, path: str, headers: Sent, body: bytes) -> None:
        """Send a request.

        Raises:
            Broken: the connection failed, or the worker stopped reading.
        """
        fields = [(b"host", self.address.encode()), (b"content-length", str(len(body)).encode()), *headers]
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                head = self._http.send(h11.Request(method=method, target=path, headers=fields))
                self._writer.write(head + body[:PIECE])
                for start in range(PIECE, len(body), 4 * PIECE):
                    await self._writer.drain()
                    self._writer.write(body[start : start + 4 * PIECE])
                await self._writer.drain()
            if body:
                self._http.send_with_data_passthrough(h11.Data(data=body))  # which has been written
            self._http.send(h11.EndOfMessage())
        except (OSError, TimeoutError, h11.LocalProtocolError) as error:
            raise Broken(type(error).__name__) from None

    async def head(self) -> tuple[int, Headers]:
        """Return the status and the headers of the response. If a call of this method was cancelled, the method may be called
        again.

        Raises:
            Broken: the connection failed.
        """
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                return event.status_code, [(bytes(name), bytes(value)) for name, value in event.headers]
            if not isinstance(event, h11.InformationalResponse):
                raise Broken(type(event).__name__)

    async def piece(self) -> bytes | None:
        """Return the next bytes of the response's body; None at its end. If a call of this method was cancelled, the method may
        be called again.

        Raises:
            Broken: the connection failed.
        """
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Data):
                return bytes(event.data)
            if isinstance(event, h11.EndOfMessage):
                return None
            raise Broken(type(event).__name__)

    async def _next_event(self) -> object:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(PIECE))
        except (OSError, h11.RemoteProtocolError) as error:
            raise Broken(type(error).__name__) from None
        return event

    def is_reusable(self) -> bool:
        """Return whether the connection can send another request. The worker may have closed it without this process knowing
        yet.
        """
        open_here = not (self._writer.is_closing() or self._reader.at_eof())
        return open_here and self._http.our_state is h11.IDLE and time.monotonic() - self.rested_at < IDLE_SECONDS

    def rest(self) -> bool:
        """Prepare the connection for its next request. Return False if it must be closed instead."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        self.rested_at, self.used = time.monotonic(), True
        return self.is_reusable()

    def cut(self) -> None:
        """Close the connection at once."""
        with suppress(OSError, RuntimeError):
            self._writer.transport.abort()


class Upstreams:
    """The connections of one endpoint to workers, grouped by the worker's address."""

    def __init__(self) -> None:
        self._idle: dict[str, list[WorkerConnection]] = defaultdict(list)

    async def take(self, address: str) -> WorkerConnection:
        """Return an idle connection to the address, or open a new one.

        Raises:
            Broken: the connection cannot be opened.
        """
        while self._idle.get(address):
            connection = self._idle[address].pop()
            if connection.is_reusable():
                return connection
            connection.cut()
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=PIECE)
        except (OSError, TimeoutError, ValueError) as error:
            raise Broken(type(error).__name__) from None
        writer.transport.max_size = PIECE  # type: ignore[attr-defined]  # asyncio reads 256 KiB at once where one lets it
        return WorkerConnection(address, reader, writer)

    def give_back(self, connection: WorkerConnection) -> None:
        """Keep the connection for later requests. Close it if it cannot be reused or too many are idle."""
        for address in [address for address, idle in self._idle.items() if not self._still_kept(idle)]:
            del self._idle[address]
        idle = self._idle[connection.address]
        if len(idle) < MAX_IDLE and connection.rest():
            idle.append(connection)
        else:
            connection.cut()

    @staticmethod
    def _still_kept(connections: list[WorkerConnection]) -> bool:
        """Close the connections that can no longer be reused, beginning with the oldest. Return whether any is left."""
        while connections and not connections[0].is_reusable():
            connections.pop(0).cut()
        return bool(connections)

    def close(self) -> None:
        """Close all idle connections."""
        for connections in self._idle.values():
            for connection in connections:
                connection.cut()
        self._idle.clear()
