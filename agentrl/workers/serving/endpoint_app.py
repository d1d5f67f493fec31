"""The application of the endpoint: its routes, the authentication and the limits. It forwards authenticated requests to a
worker.

`POST` to the path of a dialect (`dialects.paths`), `GET /v1/models` and `GET /v1/models/ID` need the attempt's key. The key is
sent as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or in the path: `/attempt/KEY/v1/...`. `POST /v1/annotations` and
`POST /v1/traces` (for OpenTelemetry exporters) need the attempt's second key, the one for annotations. `GET /health` needs no
key. A client's base URL may end with `/v1` or not, because some clients add `/v1` themselves.
"""

import asyncio
import hashlib
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Set
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from logging import getLogger
from secrets import token_hex
from typing import Any, Protocol
from weakref import WeakValueDictionary

from agentrl.workers.serving import api_errors, cors, external_tasks
from agentrl.workers.serving.api_errors import ApiError
from agentrl.workers.serving.exchange import AsgiExchange, ClientGone, Receive, Send
from agentrl.workers.serving.external_tasks import TASKS, ExternalTasks
from agentrl.workers.serving.forwarding import ForwardedCall, Forwarding, require_open
from agentrl.workers.serving.places import Places
from agentrl.workers.serving.upstream import Headers, Upstreams
from agentrl.workflow.agents.keys import key_hash, sampling_key
from agentrl.workflow.dialects.paths import DIALECTS
from agentrl.workflow.errors import ServiceError, locate_error
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.spans import otlp, span_annotations
from agentrl.workflow.store.endpoint_reads import AttemptLocation

log = getLogger("agentrl.endpoint")

Read = Callable[[int], Awaitable[bytes]]

MAX_BODY_BYTES = 8 * 2**20
MAX_HEAD_BYTES = 32 * 2**10
MAX_HELD_BYTES = 256 * 2**20
"""The most bytes that the bodies of all open requests may have together. Each body is kept until its request is answered,
because the request may have to be forwarded again.
"""
BODY_SECONDS = 60.0
OPEN_PER_ATTEMPT = 64
MAX_KEY_CHARS = 256
QUIET_SECONDS = 10.0
MODELS, HEALTH = "/v1/models", "/health"
ANNOTATIONS, TRACES = "/v1/annotations", "/v1/traces"
ROUTES = {**dict.fromkeys((*DIALECTS, ANNOTATIONS, TRACES), "POST"), MODELS: "GET", HEALTH: "GET"}
BASES = ("/", "/v1", "/v1/")
"""The paths of base URLs. Claude Code sends a HEAD request to its base URL before its first request."""
_IN_PATH = re.compile(r"/attempt/([^/]+)(/.*)?")


@dataclass(frozen=True, slots=True)
class EndpointLimits:
    """The limits of one endpoint: numbers of open requests, seconds and bytes."""

    open_calls: int = 1024
    open_per_attempt: int = OPEN_PER_ATTEMPT
    wait_seconds: float = 300.0
    quiet_seconds: float = QUIET_SECONDS
    body_bytes: int = MAX_BODY_BYTES
    body_seconds: float = BODY_SECONDS
    held_bytes: int = MAX_HELD_BYTES


class Authenticator(Protocol):
    """The interface that authenticates a request and finds its attempt. `api_key` is the request's key; it is empty if the
    request has none.
    """

    @property
    def routes(self) -> Mapping[str, str]:
        """Return the paths that this authenticator adds to the endpoint, each with its method."""

    @property
    def origins(self) -> Set[str]:
        """Return the origins of web pages that may read the responses."""

    async def accepts(self, api_key: str) -> bool:
        """Return True if the key opens an attempt, or if no key is needed.

        Raises:
            ApiError: the database does not answer.
        """

    async def find_run(self, api_key: str, headers: Mapping[bytes, bytes]) -> str:
        """Return the name of the run to which a request with this key belongs.

        Raises:
            ApiError: the key is not accepted.
        """

    def enter(self, api_key: str, headers: Mapping[bytes, bytes], path: str) -> AbstractAsyncContextManager[str]:
        """Yield the key with which the request is forwarded. It is the attempt's key for annotations if the path needs that, or
        else the attempt's key for sampling. The request is open during the `with` block.

        Raises:
            ApiError: the key is not accepted.
        """

    async def answer(self, path: str, api_key: str, headers: Mapping[bytes, bytes], read: Read) -> Any:
        """Return the JSON response to a request for one of the paths in `routes`. `read(max_bytes)` reads the request's body.

        Raises:
            ApiError: the request is refused.
        """


@dataclass(frozen=True, slots=True)
class AttemptDoor:
    """The authenticator for the keys that agents receive for their attempts."""

    places: Places

    @property
    def routes(self) -> Mapping[str, str]:
        """See `Authenticator`. This authenticator adds no paths."""
        return {}

    @property
    def origins(self) -> Set[str]:
        """See `Authenticator`. No web page may read responses to an attempt's key."""
        return frozenset()

    async def accepts(self, api_key: str) -> bool:
        """See `Authenticator`."""
        return 0 < len(api_key) <= MAX_KEY_CHARS and await find_place(self.places, api_key) is not None

    async def find_run(self, api_key: str, headers: Mapping[bytes, bytes]) -> str:
        """See `Authenticator`."""
        return require_open(await find_place(self.places, _checked(api_key))).run

    @asynccontextmanager
    async def enter(self, api_key: str, headers: Mapping[bytes, bytes], path: str) -> AsyncIterator[str]:
        """See `Authenticator`."""
        yield _checked(api_key)

    async def answer(self, path: str, api_key: str, headers: Mapping[bytes, bytes], read: Read) -> Any:
        """See `Authenticator`. It is never called, because `routes` is empty."""


def _checked(api_key: str) -> str:
    if not 0 < len(api_key) <= MAX_KEY_CHARS:
        raise api_errors.unknown_key()
    return api_key


async def find_place(places: Places, key: str) -> AttemptLocation | None:
    """Return the attempt to which the key belongs, with the worker that serves it; None for an unknown key.

    Raises:
        ApiError: the database does not answer.
    """
    try:
        return await places.find(key_hash(key))
    except ServiceError as error:
        log.warning("%s", error)
        raise api_errors.broken(30) from None


@dataclass
class Endpoint:
    """The ASGI application of the endpoint. It holds only the open requests; all lasting data are in the database."""

    places: Places
    limits: EndpointLimits = EndpointLimits()
    door: Authenticator | None = None
    """The authenticator; None for an `AttemptDoor`."""
    tasks: ExternalTasks | None = None
    """The handler of the routes for external agents; None to serve no such routes."""
    upstreams: Upstreams = field(default_factory=Upstreams)
    _open: "Counter[str]" = field(default_factory=Counter)
    _held_bytes: int = 0
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _turns: "WeakValueDictionary[str, asyncio.Lock]" = field(default_factory=WeakValueDictionary)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Respond to one request."""
        if scope["type"] != "http":
            return
        exchange = AsgiExchange(receive, send)
        try:
            await self._answer(scope, exchange)
        except ApiError as error:
            await exchange.refuse(error)
        except ClientGone:
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is: no traceback, which might show a key
            log.error("call req_%s failed: %s in %s", exchange.request_id, type(error).__name__, locate_error(error))
            await exchange.refuse(api_errors.internal())

    async def _answer(self, scope: dict[str, Any], exchange: AsgiExchange) -> None:
        door = self._door
        routes = {**ROUTES, **door.routes}
        path, key = _split_path(scope["path"])
        path, model = _split_model(path)
        path = exchange.path = _with_version(path, routes)
        if len(scope["raw_path"]) + sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
            raise api_errors.long_head(MAX_HEAD_BYTES)
        headers = _first_of_each(scope["headers"])
        if not key:
            exchange.headers += cors.answer_headers(headers, door.origins)
        if self.tasks is not None and not key and TASKS.fullmatch(path):
            await self._answer_task(self.tasks, path, scope["method"], headers, exchange)
            return
        if scope["method"] == "HEAD" and path in BASES:
            await exchange.answer_empty([])
            return
        method = routes.get(path)
        if method is None:
            raise api_errors.no_route(", ".join(f"{method} {path}" for path, method in routes.items()))
        if scope["method"] == "OPTIONS" and not key and headers.get(b"origin", b"").decode("latin-1") in door.origins:
            await exchange.answer_empty(cors.preflight_headers(headers, method))
            return
        if scope["method"] != method:
            raise api_errors.wrong_method(method)
        if path == HEALTH:
            await exchange.answer(200, api_errors.as_json({"status": "ok"}))
            return
        await self._serve(path, model, key or await self._key_in_headers(headers), headers, exchange)

    async def _answer_task(
        self, tasks: ExternalTasks, path: str, method: str, headers: dict[bytes, bytes], exchange: AsgiExchange
    ) -> None:
        if method != "POST":
            raise api_errors.wrong_method("POST")
        api_key = await self._key_in_headers(headers)
        tasks.check_key(api_key)
        body = await self._read_own(headers, exchange, external_tasks.MAX_BODY_BYTES)

        async def answer() -> None:
            document = await tasks.answer(path, api_key, headers, body)
            if document is None:
                await exchange.answer_empty([])
            else:
                await exchange.answer(200, api_errors.as_json(document))

        await exchange.unless_gone(answer())

    async def _serve(self, path: str, model: str, api_key: str, headers: dict[bytes, bytes], exchange: AsgiExchange) -> None:
        """Respond to a request that needs a key."""
        if path == TRACES:
            await self._trace(api_key, headers, exchange)
            return
        if path == ANNOTATIONS or path in DIALECTS:
            async with self._door.enter(api_key, headers, path) as key:
                await self._call(path, key, headers, exchange)
            return
        with self._slot(key_hash(api_key)):
            if path == MODELS:
                answer = await self._model(model, api_key, headers)
            else:
                answer = await self._door.answer(path, api_key, headers, partial(self._read_own, headers, exchange))
        await exchange.answer(200, api_errors.as_json(answer))

    async def _key_in_headers(self, headers: dict[bytes, bytes]) -> str:
        """Return the key in the headers; empty if there is none. Of two different keys, return the accepted one.

        Claude Code sends two if both of its environment variables for keys are set.
        """
        scheme, _, bearer = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        bearer = bearer.strip() if scheme.lower() == "bearer" else ""
        api_key = headers.get(b"x-api-key", b"").decode("latin-1").strip()
        if bearer and api_key and bearer != api_key and await self._door.accepts(api_key):
            return bearer if await self._door.accepts(bearer) else api_key
        return bearer or api_key

    async def _model(self, name: str, api_key: str, headers: dict[bytes, bytes]) -> Any:
        """Return the model of that name. For an empty name, return the list of models, which has one entry."""
        run = await self._door.find_run(api_key, headers)
        if name not in ("", run):
            raise api_errors.no_model(name, run)
        model = {"id": run, "object": "model", "created": 0, "owned_by": "agentrl"}
        return model if name else {"object": "list", "data": [model]}

    async def _trace(self, api_key: str, headers: dict[bytes, bytes], exchange: AsgiExchange) -> None:
        """Store an OpenTelemetry export: its spans become annotations of the episode to which the key belongs."""
        kind = headers.get(b"content-type", b"").decode("latin-1")[:100].lower()
        try:
            async with self._door.enter(api_key, headers, ANNOTATIONS) as key:
                rejected, why = await self._take_spans(key, kind, headers, exchange)
        except ApiError as error:
            await exchange.answer(
                error.status, span_annotations.refusal(kind, error.status, error.message), error.headers, kind
            )
            return
        await exchange.answer(200, span_annotations.answer(kind, rejected, why), kind=kind)

    async def _take_spans(self, key: str, kind: str, headers: dict[bytes, bytes], exchange: AsgiExchange) -> tuple[int, str]:
        """Store the spans. Return the number of rejected spans, and the reason why the first one was rejected."""
        if kind.partition(";")[0].strip() not in (otlp.JSON, otlp.PROTOBUF):
            raise api_errors.wrong_type(f"{otlp.PROTOBUF} or {otlp.JSON}")
        samples = sampling_key(key)
        with self._slot(key_hash(samples)):
            async with self._turns.setdefault(key_hash(samples), asyncio.Lock()):  # an attempt with many waits for itself alone
                return await self._take_in_turn(key, kind, headers, exchange)

    async def _take_in_turn(self, key: str, kind: str, headers: dict[bytes, bytes], exchange: AsgiExchange) -> tuple[int, str]:
        place = require_open(await find_place(self.places, sampling_key(key)))
        encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        async with self._body(headers, exchange) as body, self._reading:  # one at a time: a small body may become much
            read = partial(span_annotations.read_export, body, kind, encoding, str(place.episode))
            try:
                export = await asyncio.to_thread(read)
            except otlp.OtlpError as error:
                raise ApiError(400, f"Cannot read the traces: {error}.", "invalid_traces") from None
        with self._held() as take:
            take(sum(map(len, export.parts)))
            for part in export.parts:
                status, response = await self._annotate(key, part, headers)
                if status != 200:
                    why = response[:300].decode("utf-8", "replace")
                    raise ApiError(status, f"The spans were not stored: {why}", "not_kept")
        return export.rejected, export.why

    async def _annotate(self, key: str, part: bytes, headers: dict[bytes, bytes]) -> tuple[int, bytes]:
        """Forward annotations to the worker, and return the status and the body of its response."""
        response, answered = bytearray(), [500]

        async def begin(status: int, headers: Headers) -> None:
            answered[0] = status

        async def write(piece: bytes, more: bool) -> None:
            response.extend(piece)

        limits = self.limits
        call = ForwardedCall(key_hash(sampling_key(key)), ANNOTATIONS, _headers_for_worker(key, headers, token_hex(16)), part)
        await Forwarding(call, self.places, self.upstreams, begin, write, limits.wait_seconds, limits.quiet_seconds).run()
        return answered[0], bytes(response)

    @cached_property
    def _door(self) -> Authenticator:
        return self.door or AttemptDoor(self.places)

    async def _call(self, path: str, key: str, headers: dict[bytes, bytes], exchange: AsgiExchange) -> None:
        samples = sampling_key(key) if path == ANNOTATIONS else key
        with self._slot(key_hash(samples)):
            require_open(await find_place(self.places, samples))
            forwarded = _headers_for_worker(key, headers, exchange.request_id)
            await self._forward(path, key_hash(samples), forwarded, headers, exchange)

    async def _read_own(self, headers: Mapping[bytes, bytes], exchange: AsgiExchange, max_bytes: int) -> bytes:
        max_bytes, length = min(max_bytes, self.limits.body_bytes), headers.get(b"content-length", b"")
        return await exchange.body(length, max_bytes, self.limits.body_seconds, lambda size: None)

    async def _forward(
        self, path: str, attempt: str, forwarded: Headers, headers: dict[bytes, bytes], exchange: AsgiExchange
    ) -> None:
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise api_errors.encoded_body()
        async with self._body(headers, exchange) as body:
            faultpoint("endpoint.in")
            call = ForwardedCall(attempt, path, forwarded, body)
            limits = self.limits
            forward = Forwarding(
                call, self.places, self.upstreams, exchange.begin, exchange.write, limits.wait_seconds, limits.quiet_seconds
            )
            await exchange.unless_gone(forward.run())

    @asynccontextmanager
    async def _body(self, headers: Mapping[bytes, bytes], exchange: AsgiExchange) -> AsyncIterator[bytes]:
        """Read the request's body and yield it. Until the end of the `with` block, its bytes count towards the limit on all
        bodies together.

        Raises:
            ApiError: the body, or the sum of all bodies, is too large.
        """
        with self._held() as take:
            length = headers.get(b"content-length", b"")
            yield await exchange.body(length, self.limits.body_bytes, self.limits.body_seconds, take)

    @contextmanager
    def _held(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves a number of bytes until the end of the `with` block. The function raises the error.

        Raises:
            ApiError: all reserved bytes together exceed the limit.
        """
        held_bytes = 0

        def take(size: int) -> None:
            nonlocal held_bytes
            if self._held_bytes + size > self.limits.held_bytes:
                raise api_errors.too_many(
                    f"With this request, the bodies of all open calls would exceed {self.limits.held_bytes} bytes"
                )
            self._held_bytes += size
            held_bytes += size

        try:
            yield take
        finally:
            self._held_bytes -= held_bytes

    @contextmanager
    def _slot(self, attempt: str) -> Iterator[None]:
        """Count the request as open during the `with` block.

        Raises:
            ApiError: too many requests are open, in total or for this attempt.
        """
        if self._open.total() >= self.limits.open_calls:
            raise api_errors.too_many(f"{self.limits.open_calls} calls are open")
        if self._open[attempt] >= self.limits.open_per_attempt:
            raise api_errors.too_many(f"{self.limits.open_per_attempt} calls of this attempt are open")
        self._open[attempt] += 1
        try:
            yield
        finally:
            self._open[attempt] -= 1
            if not self._open[attempt]:
                del self._open[attempt]


def _split_path(path: str) -> tuple[str, str]:
    """Return two values: the path without a key, and the key that was in the path (empty if there was none)."""
    match = _IN_PATH.fullmatch(path)
    return (match[2] or "/", match[1]) if match else (path, "")


def _with_version(path: str, routes: Mapping[str, str]) -> str:
    """Return the path of the route, if `path` is one without `/v1` or with `/v1` twice."""
    route = f"/v1{path.removeprefix('/v1').removeprefix('/v1')}"
    return route if route in routes else path


def _split_model(path: str) -> tuple[str, str]:
    """Return two values: the path without a model's name, and the name that was in the path (empty if there was none)."""
    name = path.removeprefix(f"{MODELS}/")
    return (MODELS, name) if name and name != path else (path, "")


def _first_of_each(headers: Headers) -> dict[bytes, bytes]:
    first: dict[bytes, bytes] = {}
    for name, value in headers:
        first.setdefault(name.lower(), value)
    return first


def _headers_for_worker(key: str, headers: dict[bytes, bytes], request_id: str) -> Headers:
    client_key = headers.get(b"idempotency-key")
    request = hashlib.sha256(b"key:" + client_key).hexdigest()[:32] if client_key else request_id
    retry = headers.get(b"x-stainless-retry-count", b"0")
    return [
        (b"authorization", b"Bearer " + key.encode("latin-1", errors="replace")),
        (b"content-type", b"application/json"),
        (b"x-agentrl-request", request.encode()),
        (b"x-agentrl-created", str(int(time.time())).encode()),
        (b"x-agentrl-retry", retry if retry.isdigit() and len(retry) <= 3 else b"0"),
    ]
