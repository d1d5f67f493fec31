"""One HTTP request and its response over ASGI. The size of the body is limited, and the client can always read the response."""

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
"""The most bytes of a refused body that are read and discarded, and the time limit for it in seconds. A client that is still
sending its body can read the error only after that.
"""
_JSON = (b"content-type", b"application/json")


class ClientGone(Exception):
    """The exception that is raised when the client has disconnected."""


class AsgiExchange:
    """One request and its response over ASGI.

    Every response has the headers in `headers`. They have the request's id under the names that the SDKs of OpenAI and
    Anthropic read.

    Attributes:
        path: the path of the request without a key, which determines the format of errors.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.request_id = token_hex(16)
        name = f"req_{self.request_id}".encode()
        self.headers: Headers = [(b"x-request-id", name), (b"request-id", name)]
        self.path = ""
        self._begun = False
        self._unread = True

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the status and the headers."""
        self._begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})

    async def write(self, piece: bytes, more: bool) -> None:
        """Wait until the client has read most of the earlier bytes, then send these. `more` says whether bytes follow."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})

    async def answer(self, status: int, body: bytes, headers: Headers | None = None, kind: str = "") -> None:
        """Read the rest of the request, then send a complete response. It is JSON, or protobuf if `kind` says so."""
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
        """Respond with the error. If a response has already begun, send nothing; uvicorn then closes the connection."""
        if not self._begun:
            await self.answer(error.status, api_errors.error_json(error, self.path), error.headers)

    async def body(self, length: bytes, max_bytes: int, seconds: float, take: Callable[[int], None]) -> bytes:
        """Read the request's body.

        Args:
            length: the value of the header `content-length`; empty if it is missing.
            max_bytes: the most bytes of the body.
            seconds: the time limit, in seconds.
            take: the function that is called with the size of each piece, in bytes, before the piece is stored.

        Raises:
            ApiError: the body is too large, or did not arrive in time.
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
        """Wait until `work` is done. If the client disconnects before that, cancel the work."""
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
