"""The application of an API: its routes, one request with its response, the limits on request and response, and which web pages
of other sites may read the responses in a browser (cross-origin requests).
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from logging import Logger
from secrets import token_hex

from starlette.requests import Request
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import Receive, Scope, Send

from agentrl.workers.http import api_errors
from agentrl.workers.http.api_errors import Headers
from agentrl.workflow.dialects import RequestError
from agentrl.workflow.errors import ServiceError, locate_error

MAX_HEAD_BYTES = 32 * 2**10
DRAIN_BYTES, DRAIN_SECONDS = 32 * 2**20, 10.0
"""The most bytes of a refused body that are read and discarded, and the time limit for this in seconds. A client that is still
sending its body can read the error only after its body was read.
"""
BASES = ("/v1", "", "/v1/v1")
"""The two beginnings of paths that mean the same. A client's base URL may end with `/v1` or not, because some clients add `/v1`
themselves.
"""
PAGE_HEADERS = (
    b"authorization, content-type, idempotency-key, x-api-key, x-agentrl-episode, "
    b"anthropic-version, anthropic-beta, anthropic-dangerous-direct-browser-access"
)
"""The headers that a page may send. In addition, a page may send the headers of the SDKs (`x-stainless-...`)."""
EXPOSED_HEADERS = b"x-request-id, request-id, retry-after, x-agentrl-not-applied, x-agentrl-policy-version"
"""The headers of a response that a page may read."""
PREFLIGHT_SECONDS = b"600"
_ORIGIN = re.compile(r"https?://[a-z0-9.\-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](:[0-9]{1,5})?")
_OF_SDK = re.compile(rb"x-stainless-[a-z\-]{1,40}")
_JSON = "application/json"
_CALL = "agentrl.call"


class ClientGone(Exception):
    """The exception that is raised when the client has disconnected."""


class Call(Request):
    """One request and its response.

    Every response has the headers in `added_headers`. These headers have the request's id under the names that the SDKs of
    OpenAI and Anthropic read.

    Attributes:
        request_id: 32 hexadecimal digits.
        route: the path of the route, which determines the format of errors.
        path_key: the key in the path: `/attempt/KEY/v1/...`; empty if there is none.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self.request_id = token_hex(16)
        name = f"req_{self.request_id}".encode()
        self.added_headers: Headers = [(b"x-request-id", name), (b"request-id", name)]
        self.route = ""
        self._begun = False
        self._unread = True

    @property
    def path_key(self) -> str:
        """See the class."""
        return str(self.scope.get("path_params", {}).get("key", ""))

    def bearer(self) -> str:
        """Return the key in the header `authorization`; empty if there is none."""
        scheme, _, key = self.headers.get("authorization", "").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else ""

    async def read(self, max_bytes: int, seconds: float, take: Callable[[int], None] = lambda size: None) -> bytes:
        """Read the request's body.

        Args:
            max_bytes: the most bytes of the body.
            seconds: the time limit, in seconds.
            take: the function that is called with the size of each piece, in bytes, before the piece is stored.

        Raises:
            ApiError: the body is too large, or did not arrive in time.
            ClientGone: the client disconnected.
        """
        length = self.headers.get("content-length", "")
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

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the status and the headers."""
        self._begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.added_headers]})

    async def write(self, piece: bytes, more: bool) -> None:
        """Wait until the client has read most of the earlier bytes, then send `piece`. `more` says whether further bytes
        follow.
        """
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})

    async def answer(self, status: int, body: bytes, headers: Headers | None = None, content_type: str = _JSON) -> None:
        """Read the rest of the request, then send a complete response."""
        await self.drain()
        lines = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
        await self.begin(status, lines + (headers or []))
        await self.write(body, False)

    async def answer_empty(self, headers: Headers) -> None:
        """Read the rest of the request, then send a response without a body."""
        await self.drain()
        await self.begin(204, headers)
        await self.write(b"", False)

    async def refuse(self, error: RequestError) -> None:
        """Respond with the error. If a response has already begun, send nothing; uvicorn then closes the connection."""
        if not self._begun:
            await self.answer(error.status, api_errors.error_json(error, self.route), api_errors.headers_of(error))

    async def unless_gone(self, work: Awaitable[None]) -> None:
        """Wait until `work` is done. If the client disconnects before that, cancel `work`. The caller must have read the
        request's body.
        """
        doing = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self.receive())  # says nothing before the client is gone: the body has been read
        try:
            await asyncio.wait((doing, watching), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
        finally:
            for task in (doing, watching):
                task.cancel()
            await asyncio.gather(doing, watching, return_exceptions=True)

    async def drain(self) -> None:
        """Read and discard the rest of the body, at most DRAIN_BYTES in DRAIN_SECONDS."""
        dropped = 0
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._unread and dropped < DRAIN_BYTES:
                    dropped += len(await self._piece())
        except (TimeoutError, ClientGone):
            self._unread = False

    async def _piece(self) -> bytes:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._unread = message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece


Handle = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """A path with its method, and the function that responds to its requests. A route for GET also accepts HEAD, for which the
    server sends only the headers.

    `path` may have parameters (`/models/{name:path}`). A path below `/v1` is also served without `/v1`.
    """

    method: str
    path: str
    handle: Handle


class Application:
    """The ASGI application of an API.

    Args:
        routes: the routes. A request may have its key in the path, before the route: `/attempt/KEY/v1/...`.
        name: the name of the server, for the message of an error that a bug of the server causes.
        log: the logger to which the place of a bug is written. The traceback is not written, because it might show a key.
        origins: the origins of web pages that may read the responses.
    """

    def __init__(self, routes: Sequence[ApiRoute], name: str, log: Logger, origins: Set[str] = frozenset()) -> None:
        self._routes, self._name, self._log, self._origins = routes, name, log, origins
        other = _Responder(self._answer_other)
        served = [Route(path, _Responder(partial(self._answer_route, route))) for route in routes for path in _spellings(route)]
        keyed = [Mount("/attempt/{key}", _router(served, other)), Route("/attempt/{key}", other)]
        self._router = _router([*keyed, *served], other)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        if scope["type"] != "http":
            return
        call = scope[_CALL] = Call(scope, receive, send)
        try:
            await self._router(scope, receive, send)
        except RequestError as error:
            await call.refuse(error)
        except ClientGone:
            pass
        except ServiceError as error:
            self._log.warning("%s", error)
            await call.refuse(api_errors.broken(30))
        except Exception as error:  # noqa: BLE001 - whatever it is: no traceback, which might show a key
            self._log.error("call req_%s failed: %s in %s", call.request_id, type(error).__name__, locate_error(error))
            await call.refuse(api_errors.internal(self._name))

    async def _answer_route(self, route: ApiRoute, call: Call) -> None:
        self._check_head(call, route.path)
        if call.method == "OPTIONS" and not call.path_key and call.headers.get("origin", "") in self._origins:
            await call.answer_empty(_preflight_headers(call.headers, route.method))
            return
        if call.method != route.method and (call.method, route.method) != ("HEAD", "GET"):
            raise api_errors.wrong_method(route.method)
        await route.handle(call)

    async def _answer_other(self, call: Call) -> None:
        """Respond to a request for a path that is not served. Claude Code sends a HEAD request to its base URL before its first
        request.
        """
        path = call.scope["path"].removeprefix(call.scope.get("root_path", ""))
        if path == f"/attempt/{call.path_key}":
            path = "/"
        self._check_head(call, path)
        if call.method != "HEAD" or path.removeprefix("/v1") not in ("", "/"):
            raise api_errors.no_route(
                ", ".join(f"{route.method} {route.path}" for route in self._routes if "{" not in route.path)
            )
        await call.answer_empty([])

    def _check_head(self, call: Call, route: str) -> None:
        call.route = route
        if len(call.scope["raw_path"]) + sum(len(name) + len(value) for name, value in call.scope["headers"]) > MAX_HEAD_BYTES:
            raise api_errors.long_head(MAX_HEAD_BYTES)
        if self._origins and not call.path_key:
            call.added_headers += _origin_headers(call.headers, self._origins)


@dataclass(frozen=True, slots=True)
class _Responder:
    """The ASGI application of one route."""

    handle: Handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.handle(scope[_CALL])


def _router(routes: Sequence[BaseRoute], other: _Responder) -> Router:
    return Router(routes, redirect_slashes=False, default=other)


def _spellings(route: ApiRoute) -> list[str]:
    """Return the paths at which the route is served."""
    below = route.path.removeprefix("/v1")
    return [route.path] if below == route.path else [f"{base}{below}" for base in BASES]


def read_origins(text: str) -> frozenset[str]:
    """Return the origins in a comma-separated text. Origins are compared in the form that browsers send: scheme, host and port,
    without patterns.

    Raises:
        ValueError: a part of the text is not an origin in the form that browsers send.
    """
    origins = [origin.strip() for origin in text.split(",") if origin.strip()]
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is not an origin: write scheme://host or scheme://host:port in lower case")
    return frozenset(origins)


def _origin_headers(headers: Mapping[str, str], origins: Set[str]) -> Headers:
    """Return the headers that let a browser show a response to the page. If the page's origin is not allowed, return only
    `vary`.
    """
    vary: Headers = [(b"vary", b"Origin")]  # a cache must not give one origin what names another
    origin = headers.get("origin", "")
    if origin not in origins:
        return vary
    return [*vary, (b"access-control-allow-origin", origin.encode()), (b"access-control-expose-headers", EXPOSED_HEADERS)]


def _preflight_headers(headers: Mapping[str, str], method: str) -> Headers:
    """Return the additional headers of the response to a preflight: the OPTIONS request that a browser sends before a page's
    request. The response needs the headers of `_origin_headers` too.
    """
    names = headers.get("access-control-request-headers", "").lower().replace(" ", "").encode("latin-1").split(b",")
    of_sdk = [name for name in names[:50] if _OF_SDK.fullmatch(name)]
    return [
        (b"access-control-allow-methods", method.encode()),
        (b"access-control-allow-headers", b", ".join([PAGE_HEADERS, *of_sdk])),
        (b"access-control-max-age", PREFLIGHT_SECONDS),
    ]
