"""One HTTP request and its response over ASGI: a bounded body, and a response that the client can read."""

import asyncio
from collections.abc import Awaitable, Callable
from secrets import token_hex
from typing import Any

from agentrl.workers.serving import api_errors
from agentrl.workers.serving.api_errors import ApiError
from agentrl.workers.serving.upstream import Headers
from agentrl.workflow.spans import otlp

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

DRAIN_BYTES, DRAIN_SECONDS = 32 * 2**20, 10.0
"""What of a refused body is read and dropped, so that the client gets to read the refusal."""
_JSON = (b"content-type", b"application/json")


class ClientGone(Exception):
    """The client disconnected."""


class AsgiExchange:
    """One request and its response over ASGI. Every response gets `headers`, among them `x-request-id`."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.request_id = token_hex(16)
        self.headers: Headers = [(b"x-request-id", f"req_{self.request_id}".encode())]
        self._begun = False
        self._unread = True

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the status and the headers."""
        self._begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})

    async def write(self, piece: bytes, more: bool) -> None:
        """Send bytes, after the client has read most of the earlier ones."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})

    async def answer(self, status: int, body: bytes, headers: Headers | None = None, kind: str = "") -> None:
        """Read the rest of the request, then send a complete response, as JSON or of another content type `kind`."""
        await self._drain()
        content_type = (b"content-type", otlp.PROTOBUF.encode()) if kind.startswith(otlp.PROTOBUF) else _JSON
        await self.begin(status, [content_type, (b"content-length", str(len(body)).encode()), *(headers or [])])
        await self.write(body, False)

    async def answer_empty(self, headers: Headers) -> None:
        """Read the rest of the request, then send a response without a body."""
        await self._drain()
        await self.begin(204, headers)
        await self.write(b"", False)

    async def refuse(self, error: ApiError) -> None:
        """Respond with the error. If another response has begun, uvicorn closes the connection."""
        if not self._begun:
            await self.answer(error.status, error.body, error.headers)

    async def body(self, length: bytes, max_bytes: int, seconds: float, take: Callable[[int], None]) -> bytes:
        """Read the body of at most `max_bytes` bytes within `seconds`; call `take` with the size of each piece before it is
        kept.

        Raises:
            ApiError: it is too large, or did not arrive in time.
            ClientGone: the client disconnected.
        """
        if length.isdigit() and int(length[:20]) > max_bytes:
            raise api_errors.too_large(max_bytes)
        content = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while self._unread:
                    piece = await self._piece()
                    if len(content) + len(piece) > max_bytes:
                        raise api_errors.too_large(max_bytes)
                    take(len(piece))
                    content += piece
        except TimeoutError:
            raise api_errors.too_slow(seconds) from None
        return bytes(content)

    async def unless_gone(self, work: Awaitable[None]) -> None:
        """Wait for the work, and cancel it when the client disconnects."""
        doing = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._receive())  # says nothing before the client is gone: the body has been read
        try:
            await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
        finally:
            for task in (doing, watching):
                task.cancel()
            await asyncio.gather(doing, watching, return_exceptions=True)

    async def _piece(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._unread = message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece

    async def _drain(self) -> None:
        dropped = 0
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._unread and dropped < DRAIN_BYTES:
                    dropped += len(await self._piece())
        except (TimeoutError, ClientGone):
            self._unread = False
