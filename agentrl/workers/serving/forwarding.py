"""Forwards a client's request to the worker that holds its episode, with retries.

The worker may be lost before or during its response. The request is then forwarded again with the same request id. The worker
sends the recorded response, which has the same bytes. The part that the client already has is compared by its hash and skipped.
While no worker holds the episode, the client waits; a streaming client gets a comment from time to time.
"""

import asyncio
import hashlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from logging import getLogger
from typing import Any

import httpx2

from agentrl.workers.http import api_errors
from agentrl.workers.http.api_errors import ApiError, Headers
from agentrl.workers.jobs.agent_calls import Begin, ForwardedRequest, Write
from agentrl.workers.serving.attempt_keys import AttemptKeys, require_open
from agentrl.workflow.dialects import RequestError
from agentrl.workflow.dialects.paths import COUNTERS, dialect_of
from agentrl.workflow.errors import ServiceError
from agentrl.workflow.runtime.faults import faultpoint

log = getLogger("agentrl.endpoint")

COMMENT = b": waiting\n"
"""The comment that is sent while the client waits. It has no blank line, which would end the client's current event."""
FIRST_PAUSE, MAX_PAUSE = 0.1, 1.0
STEADY_SECONDS = 1.0
"""A time in seconds. If a worker is lost later than this after a request was forwarded to it, the worker counts as having begun
the request. The wait for another worker is then measured from the loss.
"""
ERROR_BYTES = 64 * 1024
NOT_HELD = 421
TIMEOUT = {"connect": 5.0, "write": 30.0}
"""The time limits for connecting to a worker, and for sending it bytes of a request, in seconds. A worker that does not read
these bytes within the limit is regarded as lost.
"""
IDLE_SECONDS = 20.0
"""The time in seconds after which an idle connection is not reused, because the worker may be closing it."""
MAX_IDLE = 256
"""The most idle connections."""
_DROPPED = {b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server", b"proxy-connection", b"upgrade", b"trailer"}
_DROPPED |= {b"x-request-id", b"request-id"}

Sample = Callable[[ForwardedRequest, Begin, Write], Awaitable[None]]


class Broken(Exception):
    """The error for a failed connection to the worker. The request may be forwarded again."""


class _NotHeld(Exception):
    """The exception for status 421: the worker does not hold the episode."""


class _CannotContinue(Exception):
    """The exception for a response that cannot continue the one that the client has in part."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class Samplers:
    """The connections to the workers that sample: over HTTP, or by a function if the sampler is in this process."""

    def __init__(self, local: Sample | None = None) -> None:
        """Prepare the connections.

        Args:
            local: the function that samples in this process for all requests; it raises RequestError before it responds. None:
                requests are sent over HTTP to the worker's address.
        """
        self.local = local
        self._transport: httpx2.AsyncHTTPTransport | None = None

    @asynccontextmanager
    async def send(self, address: str, request: ForwardedRequest) -> AsyncIterator[httpx2.Response]:
        """Send the request to the worker, and yield the response, whose body is still to be read.

        The transport is used without a client of `httpx2`: there are no redirects, proxies or cookies here.

        Raises:
            httpx2.TransportError: the connection failed. httpx2.InvalidURL: the address is not valid.
        """
        if self._transport is None:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=MAX_IDLE, keepalive_expiry=IDLE_SECONDS)
            no_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without certificates: workers are reached over plain HTTP
            self._transport = httpx2.AsyncHTTPTransport(verify=no_tls, trust_env=False, limits=limits)
        url = f"http://{address}{request.path}"
        sent = httpx2.Request("POST", url, headers=request.headers, content=request.body, extensions={"timeout": TIMEOUT})
        response = await self._transport.handle_async_request(sent)
        try:
            yield response
        finally:
            await response.aclose()

    async def close(self) -> None:
        """Close all connections."""
        if self._transport is not None:
            await self._transport.aclose()


class Forwarding:
    """The forwarding of one request, with retries. Call `run` once."""

    def __init__(
        self,
        request: ForwardedRequest,
        attempt: str,
        keys: AttemptKeys,
        samplers: Samplers,
        begin: Begin,
        write: Write,
        wait: float,
        quiet: float,
    ) -> None:
        """Prepare to forward a request.

        Args:
            request: the request.
            attempt: the hash of the attempt's key for sampling.
            keys: the lookup that finds the address of the worker that holds the episode.
            samplers: the way to the workers.
            begin: sends the status and the headers to the client.
            write: sends bytes to the client; its second argument says whether more bytes follow.
            wait: the longest time without a holder, in seconds.
            quiet: the longest time without bytes for a streaming client, in seconds.
        """
        self._request, self._attempt, self._keys, self._samplers = request, attempt, keys, samplers
        self._begin_client, self._write_client = begin, write
        self._wait, self._quiet = wait, quiet
        self._status: int | None = None
        self._is_stream = False  # whether comments may be sent
        self._given = 0
        self._digest = hashlib.sha256()
        self._at_line_start = True
        self._heard_at = time.monotonic()
        # of the current try: whether its response has begun, the bytes that the client has and the hash of those seen again,
        # and the body of a response whose status is another than the client's
        self._begun, self._skipping, self._seen = False, 0, hashlib.sha256()
        self._other: bytearray | None = None

    async def run(self) -> None:
        """Forward the request, repeatedly if necessary, until the client has the complete response.

        Raises:
            RequestError: the request failed before anything was sent; the caller sends this error to the client.
        """
        try:
            await self._forward_until_done()
        except _CannotContinue as end:
            await self._break_off(end.error)
        except RequestError as error:
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
                    await self._try(address)
                    return
                except _NotHeld:
                    pass
                except Broken as error:
                    log.info("the connection to a worker broke: %s", error)
                    if time.monotonic() - began > STEADY_SECONDS:
                        waiting_since, pause = time.monotonic(), 0.0
            if time.monotonic() - waiting_since > self._wait:
                raise api_errors.no_holder(self._wait, self._samplers.local is not None)
            pause = min(MAX_PAUSE, max(FIRST_PAUSE, 1.5 * pause))
            await asyncio.sleep(min(pause, self._wait))
            if time.monotonic() - self._heard_at > self._quiet:
                await self._comment()

    async def _find_address(self, fresh: bool) -> str | None:
        try:
            place = await self._keys.find(self._attempt, fresh)
        except ServiceError as error:
            log.warning("%s", error)
            return None
        return require_open(place).address

    async def _try(self, address: str) -> None:
        """Forward the request once. While the client gets no bytes, send it comments and check that the worker still holds the
        episode.

        Raises:
            Broken: the worker was lost, or another worker, or none, holds the episode now.
            _NotHeld: the worker does not hold the episode.
        """
        self._begun, self._skipping, self._seen, self._other = False, self._given, hashlib.sha256(), None
        work = asyncio.ensure_future(self._sample() if self._samplers.local else self._send(address))
        try:
            while not (await asyncio.wait((work,), timeout=self._quiet))[0]:
                if time.monotonic() - self._heard_at < self._quiet:
                    continue
                await self._comment()
                if await self._find_address(fresh=True) != address:
                    raise Broken("another worker serves the episode")
            work.result()
        finally:
            work.cancel()  # also where the client is gone: the worker then stops sampling
            await asyncio.gather(work, return_exceptions=True)
        await self._write_client(b"", False)
        faultpoint("endpoint.released")

    async def _sample(self) -> None:
        assert self._samplers.local is not None
        try:
            await self._samplers.local(self._request, self._take_head, self._take_piece)
        except RequestError as error:
            if error.status == NOT_HELD:
                raise _NotHeld from None
            if self._begun:
                raise
            await self._take_head(error.status, [(b"content-type", b"application/json"), *api_errors.headers_of(error)])
            await self._take_piece(api_errors.error_json(error, self._request.path), False)

    async def _send(self, address: str) -> None:
        try:
            async with self._samplers.send(address, self._request) as response:
                faultpoint("endpoint.forwarded")
                if response.status_code != NOT_HELD:
                    await self._take_head(response.status_code, response.headers.raw)
                    async for piece in response.aiter_raw():
                        await self._take_piece(piece, True)
                    await self._take_piece(b"", False)
                    return
                await _read_short(response)
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            raise Broken(type(error).__name__) from None
        raise _NotHeld

    async def _take_head(self, status: int, headers: Headers) -> None:
        self._begun = True
        if self._status is None:
            await self._begin(status, headers)
        elif status != self._status:
            self._other = bytearray()

    async def _take_piece(self, piece: bytes, more: bool) -> None:
        """Send the client the part of the response that the client does not have yet."""
        if self._other is not None:
            self._other += piece
            if len(self._other) > ERROR_BYTES:
                raise Broken("the body is too long")
            if not more:
                raise _CannotContinue(_WorkerError(bytes(self._other)))
            return
        if self._skipping:
            part, piece = piece[: self._skipping], piece[self._skipping :]
            self._seen.update(part)
            self._skipping -= len(part)
            if not self._skipping and self._seen.digest() != self._digest.digest():
                raise _CannotContinue(api_errors.differs())
        if piece:
            await self._give(piece)
        if self._skipping and not more:
            raise _CannotContinue(api_errors.differs())

    async def _give(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._given += len(piece)
        self._at_line_start = piece.endswith(b"\n")
        await self._write_client(piece, True)
        self._heard_at = time.monotonic()

    async def _begin(self, status: int, headers: Headers) -> None:
        forwarded = [(name, value) for name, value in headers if name.lower() not in _DROPPED]
        kind = next((value for name, value in forwarded if name.lower() == b"content-type"), b"")
        self._is_stream = kind.lower().startswith(b"text/event-stream")
        if self._is_stream:
            forwarded = [(name, value) for name, value in forwarded if name.lower() != b"x-accel-buffering"]
            forwarded.append((b"x-accel-buffering", b"no"))
        self._status, self._heard_at = status, time.monotonic()
        await self._begin_client(status, forwarded)

    async def _comment(self) -> None:
        self._heard_at = time.monotonic()
        may_begin = self._status is None and self._request.path not in COUNTERS
        if may_begin and await _asks_for_stream(self._request.body) and self._status is None:  # still, after the wait
            await self._begin(200, [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")])
        if self._is_stream and self._at_line_start:
            await self._write_client(COMMENT, True)

    async def _break_off(self, error: RequestError) -> None:
        """Send a streaming client the error, and end its response. The caller closes the connection of another client."""
        if self._is_stream:
            dialect = dialect_of(self._request.path)
            document = error.document if isinstance(error, _WorkerError) else None
            event = dialect.error_event(document or dialect.error_body(error))
            await self._write_client((b"" if self._at_line_start else b"\n\n") + event, False)


async def _read_short(response: httpx2.Response) -> None:
    """Read the rest of a response, so that its connection can be used again.

    Raises:
        Broken: the body has more than ERROR_BYTES bytes.
    """
    size = 0
    async for piece in response.aiter_raw():
        size += len(piece)
        if size > ERROR_BYTES:
            raise Broken("the body is too long")


class _WorkerError(ApiError):
    """The error that a worker returned at a later try, after the response had begun with another status."""

    def __init__(self, response: bytes) -> None:
        differs = api_errors.differs()
        super().__init__(differs.status, differs.message, differs.code, differs.kind)
        self.response = response

    @property
    def document(self) -> dict[str, Any] | None:
        """The JSON object of the worker's error; None if the worker sent no valid error."""
        try:
            document = json.loads(self.response)
        except (ValueError, RecursionError):
            return None
        return document if isinstance(document, dict) and "error" in document else None


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
