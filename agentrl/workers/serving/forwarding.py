"""Forwards a client's request to the worker that holds its episode, with retries.

The worker may be lost before or during its response. The request is then forwarded again with the same request id. The worker
sends the recorded response, which has the same bytes. The part that the client already has is compared by its hash and skipped.
While no worker holds the episode, the client waits; a streaming client gets a comment from time to time.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from logging import getLogger
from typing import Any, TypeVar

from agentrl.workers.serving import api_errors
from agentrl.workers.serving.api_errors import ApiError
from agentrl.workers.serving.places import Places
from agentrl.workers.serving.upstream import Broken, Headers, Upstreams, WorkerConnection
from agentrl.workflow.dialects.paths import COUNTERS, dialect_of
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.store.endpoint_reads import AttemptLocation

T = TypeVar("T")
log = getLogger("agentrl.endpoint")

COMMENT = b": waiting\n"
"""The comment that is sent while the client waits. It has no blank line, which would end the client's current event."""
FIRST_PAUSE, MAX_PAUSE = 0.1, 1.0
STEADY_SECONDS = 1.0
"""The time in seconds that tells a worker at work from a dead one. If a worker is lost after more than this time, it had begun
the request. The wait for another worker is then measured from the loss.
"""
ERROR_BYTES = 64 * 1024
NOT_HELD = 421
_DROPPED = {b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server", b"proxy-connection", b"upgrade", b"trailer"}

Begin = Callable[[int, Headers], Awaitable[None]]
Write = Callable[[bytes, bool], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ForwardedCall:
    """The request in the form that is forwarded. It is the same at each try."""

    key_hash: str
    path: str
    headers: Headers
    body: bytes


class _NotHeld(Exception):
    """The exception for status 421: the worker does not hold the episode."""


class Forwarding:
    """The forwarding of one request, with retries. Call `run` once."""

    def __init__(
        self, call: ForwardedCall, places: Places, upstreams: Upstreams, begin: Begin, write: Write, wait: float, quiet: float
    ) -> None:
        """Prepare to forward a request.

        Args:
            call: the request.
            places: the lookup that finds the address of the worker that holds the episode.
            upstreams: the connections to workers.
            begin: sends the status and the headers to the client.
            write: sends bytes to the client; its second argument says whether more bytes follow.
            wait: the longest time without a holder, in seconds.
            quiet: the longest time without bytes for a streaming client, in seconds.
        """
        self.call, self._places, self._upstreams = call, places, upstreams
        self._begin_client, self._write_client = begin, write
        self._wait, self._quiet = wait, quiet
        self._status: int | None = None
        self._is_stream = False  # whether comments may be sent
        self._given = 0
        self._digest = hashlib.sha256()
        self._at_line_start = True
        self._heard_at = time.monotonic()

    async def run(self) -> None:
        """Forward the request, repeatedly if necessary, until the client has the complete response.

        Raises:
            ApiError: the request failed before anything was sent; the caller sends this error to the client.
        """
        try:
            await self._forward_until_done()
        except ApiError as error:
            if self._status is None:
                raise
            await self._break_off(error)

    async def _forward_until_done(self) -> None:
        waiting_since, pause = time.monotonic(), 0.0
        while True:
            address = await self._find_address(fresh=pause > 0)
            if address is not None:
                began = time.monotonic()
                try:
                    await self._exchange(address)
                    return
                except _NotHeld:
                    pass
                except Broken as error:
                    log.info("the connection to a worker broke: %s", error)
                    if time.monotonic() - began > STEADY_SECONDS:
                        waiting_since, pause = time.monotonic(), 0.0
            if time.monotonic() - waiting_since > self._wait:
                raise api_errors.no_holder(self._wait)
            pause = min(MAX_PAUSE, max(FIRST_PAUSE, 1.5 * pause))
            await asyncio.sleep(min(pause, self._wait))
            if time.monotonic() - self._heard_at > self._quiet:
                await self._comment()

    async def _find_address(self, fresh: bool) -> str | None:
        try:
            place = await self._places.find(self.call.key_hash, fresh)
        except ServiceError as error:
            log.warning("%s", error)
            return None
        return require_open(place).address

    async def _exchange(self, address: str) -> None:
        connection = await self._upstreams.take(address)
        try:
            await connection.send("POST", self.call.path, self.call.headers, self.call.body)
            faultpoint("endpoint.forwarded")
            status, headers = await self._listen(connection, connection.head)
            if status == NOT_HELD:
                await self._read_short(connection)
            else:
                await self._pass_on(connection, status, headers)
        except BaseException:
            connection.cut()  # also where the client is gone: the worker then stops sampling
            raise
        self._upstreams.give_back(connection)
        if status == NOT_HELD:
            raise _NotHeld

    async def _pass_on(self, connection: WorkerConnection, status: int, headers: Headers) -> None:
        """Send the client the part of the worker's response that the client does not have yet."""
        if self._status is None:
            await self._begin(status, headers)
        elif status != self._status:
            raise _WorkerError(await self._read_short(connection))
        skipping, seen = self._given, hashlib.sha256()
        while (piece := await self._listen(connection, connection.piece)) is not None:
            if skipping:
                part, piece = piece[:skipping], piece[skipping:]
                seen.update(part)
                skipping -= len(part)
                if not skipping and seen.digest() != self._digest.digest():
                    raise api_errors.differs()
            if piece:
                await self._give(piece)
        if skipping:
            raise api_errors.differs()
        await self._write_client(b"", False)
        faultpoint("endpoint.released")

    async def _begin(self, status: int, headers: Headers) -> None:
        forwarded = [(name, value) for name, value in headers if name.lower() not in _DROPPED]
        kind = next((value for name, value in forwarded if name.lower() == b"content-type"), b"")
        self._is_stream = kind.lower().startswith(b"text/event-stream")
        if self._is_stream:
            forwarded = [(name, value) for name, value in forwarded if name.lower() != b"x-accel-buffering"]
            forwarded.append((b"x-accel-buffering", b"no"))
        self._status, self._heard_at = status, time.monotonic()
        await self._begin_client(status, forwarded)

    async def _give(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._given += len(piece)
        self._at_line_start = piece.endswith(b"\n")
        await self._write_client(piece, True)
        self._heard_at = time.monotonic()

    async def _listen(self, connection: WorkerConnection, read: Callable[[], Awaitable[T]]) -> T:
        """Wait until `read` returns data of the worker. While the worker is silent, send comments to the client and look up
        whether the worker still holds the episode.

        Raises:
            Broken: another worker, or none, holds the episode now.
        """
        while True:
            try:
                async with asyncio.timeout(self._quiet):
                    return await read()
            except TimeoutError:
                await self._comment()
                if await self._find_address(fresh=True) != connection.address:
                    raise Broken("another worker serves the episode") from None

    async def _comment(self) -> None:
        self._heard_at = time.monotonic()
        if self._status is None and self.call.path not in COUNTERS and await _asks_for_stream(self.call.body):
            await self._begin(200, [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")])
        if self._is_stream and self._at_line_start:
            await self._write_client(COMMENT, True)

    async def _read_short(self, connection: WorkerConnection) -> bytes:
        """Return the rest of a response's body.

        Raises:
            Broken: the body has more than ERROR_BYTES bytes.
        """
        body = bytearray()
        while (piece := await self._listen(connection, connection.piece)) is not None:
            body += piece
            if len(body) > ERROR_BYTES:
                raise Broken("the body is too long")
        return bytes(body)

    async def _break_off(self, error: ApiError) -> None:
        """Send a streaming client the error that ends its response. The caller then closes the connection."""
        if self._is_stream:
            dialect = dialect_of(self.call.path)
            document = error.document if isinstance(error, _WorkerError) else None
            event = dialect.error_event(document or dialect.error_body(error))
            await self._write_client((b"" if self._at_line_start else b"\n\n") + event, True)


class _WorkerError(ApiError):
    """The error that a worker returned at a later try, after the response had begun with another status."""

    def __init__(self, response: bytes) -> None:
        differs = api_errors.differs()
        super().__init__(differs.status, differs.message, differs.code, differs.kind)
        self.response = response

    @property
    def document(self) -> dict[str, Any] | None:
        """The worker's error; None if it is not a valid error. The response then ends with this error itself."""
        try:
            document = json.loads(self.response)
        except (ValueError, RecursionError):
            return None
        return document if isinstance(document, dict) and "error" in document else None


def require_open(place: AttemptLocation | None) -> AttemptLocation:
    """Return the attempt's location if its episode accepts requests.

    Raises:
        ApiError: with status 401, the key is unknown; with status 409, the episode is over.
    """
    if place is None:
        raise api_errors.unknown_key()
    if place.over:
        raise api_errors.over(place.episode, place.over)
    return place


async def _asks_for_stream(body: bytes) -> bool:
    """Return whether the client requested a stream. The body is parsed in a thread, and only after a long wait."""
    if b'"stream"' not in body:
        return False
    return await asyncio.get_running_loop().run_in_executor(None, _reads_stream, body)


def _reads_stream(body: bytes) -> bool:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("stream") is True
