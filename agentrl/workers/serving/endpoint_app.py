"""The application of the endpoint: its routes, the authentication and the limits. It forwards authenticated requests to a
worker.

`POST` to the path of a dialect (`dialects.paths`), `GET /v1/models` and `GET /v1/models/ID` need the attempt's key. The key is
sent as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or in the path: `/attempt/KEY/v1/...`. `POST /v1/annotations` and
`POST /v1/traces` (for OpenTelemetry exporters) need the attempt's second key, the one for annotations. `GET /health` needs no
key. A client's base URL may end with `/v1` or not, because some clients add `/v1` themselves.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from secrets import token_hex
from weakref import WeakValueDictionary

from starlette.types import Receive, Scope, Send

from agentrl.workers.http import api_errors
from agentrl.workers.http.api_errors import ApiError, Headers
from agentrl.workers.http.calls import ApiRoute, Application, Call
from agentrl.workers.jobs.agent_calls import ANNOTATIONS, Begin, ForwardedRequest, Write, is_side_call
from agentrl.workers.serving import external_tasks
from agentrl.workers.serving.attempt_keys import AttemptKeys
from agentrl.workers.serving.external_tasks import ExternalTasks
from agentrl.workers.serving.forwarding import Forwarding, Samplers
from agentrl.workers.serving.served_clients import END, ServedClients
from agentrl.workflow.agents.keys import key_hash, sampling_key
from agentrl.workflow.dialects import chat_completions
from agentrl.workflow.dialects.paths import DIALECTS
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.spans import otlp, span_annotations

log = getLogger("agentrl.endpoint")

MAX_BODY_BYTES = 8 * 2**20
MAX_HELD_BYTES = 256 * 2**20
"""The most bytes that the bodies of all open requests may have together. Each body is kept until its request is answered,
because the request may have to be forwarded again.
"""
BODY_SECONDS = 60.0
OPEN_PER_ATTEMPT = 64
QUIET_SECONDS = 10.0
MODELS, HEALTH = "/v1/models", "/health"
TRACES = "/v1/traces"


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


class Endpoint:
    """The ASGI application of the endpoint. It holds only the open requests; all lasting data are in the database."""

    def __init__(
        self,
        keys: AttemptKeys,
        limits: EndpointLimits = EndpointLimits(),
        clients: ServedClients | None = None,
        samplers: Samplers | None = None,
        tasks: ExternalTasks | None = None,
    ) -> None:
        """Prepare the routes.

        Args:
            keys: the lookup of the attempts' keys.
            limits: the limits on open requests.
            clients: the authentication of `agentrl serve`; None: requests have an attempt's key.
            samplers: the way to the workers that sample; None: over HTTP.
            tasks: the handler of the routes for external agents; None to serve no such routes.
        """
        self.keys, self.limits, self.clients, self.samplers = keys, limits, clients, samplers or Samplers()
        self.tasks = tasks
        self._open: Counter[str] = Counter()
        self._held_bytes = 0
        self._reading = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        routes = [ApiRoute("POST", path, self._forward_call) for path in (*DIALECTS, ANNOTATIONS)]
        routes += [ApiRoute("POST", TRACES, self._trace), ApiRoute("GET", MODELS, self._models)]
        routes += [ApiRoute("GET", MODELS + "/{name:path}", self._models), ApiRoute("GET", HEALTH, _health)]
        if clients is not None:
            routes.append(ApiRoute("POST", END, partial(self._end_episode, clients)))
        if tasks is not None:
            routes += [ApiRoute("POST", path, partial(self._task, tasks)) for path in external_tasks.PATHS]
        self._application = Application(routes, "endpoint", log, clients.origins if clients else frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request."""
        await self._application(scope, receive, send)

    async def close(self) -> None:
        """Close the connections to workers and the lookup of keys."""
        await self.samplers.close()
        self.keys.close()
        if self.tasks is not None:
            self.tasks.close()

    async def _task(self, tasks: ExternalTasks, call: Call) -> None:
        """Respond to a request of an external agent's client. Its key is never in the path."""
        api_key = call.bearer() or call.headers.get("x-api-key", "").strip()
        tasks.check_key("" if call.path_key else api_key)
        body = await call.read(external_tasks.MAX_BODY_BYTES, self.limits.body_seconds)

        async def answer() -> None:
            task, action = call.path_params.get("id", ""), call.path_params.get("action", "next")
            rewards_key = call.headers.get(external_tasks.REWARDS_KEY, "")
            try:
                document = await tasks.answer(task, action, rewards_key, body)
            finally:  # the attempt may have ended, also by its time limit
                if (agent := external_tasks.agent_of(task)) is not None:
                    self.keys.forget(agent)
            if document is None:
                await call.answer_empty([])
            else:
                await call.answer(200, api_errors.as_json(document))

        await call.unless_gone(answer())

    @property
    def _authentication(self) -> AttemptKeys | ServedClients:
        return self.clients or self.keys

    async def _key(self, call: Call) -> str:
        """Return the key in the path or in the headers; empty if there is none. Of two different keys, return the accepted one.

        Claude Code sends two if both of its environment variables for keys are set.
        """
        if call.path_key:
            return call.path_key
        bearer, api_key = call.bearer(), call.headers.get("x-api-key", "").strip()
        if bearer and api_key and bearer != api_key and await self._authentication.accepts(api_key):
            return bearer if await self._authentication.accepts(bearer) else api_key
        return bearer or api_key

    async def _forward_call(self, call: Call) -> None:
        """Respond to a request for a turn, or to one with annotations."""
        async with self._authentication.enter(await self._key(call), call.headers, call.route) as key:
            samples = sampling_key(key) if call.route == ANNOTATIONS else key
            with self._slot(key_hash(samples)):
                await self.keys.find_open(samples)
                if call.headers.get("content-encoding", "identity").lower() != "identity":
                    raise api_errors.encoded_body()
                with self._held() as take:
                    body = await call.read(self.limits.body_bytes, self.limits.body_seconds, take)
                    faultpoint("endpoint.in")
                    forwarding = self._forwarding(call, key, samples, body, call.begin, call.write)
                    await call.unless_gone(forwarding.run())

    def _forwarding(
        self, call: Call, key: str, samples: str, body: bytes, begin: Begin, write: Write, request_id: str = ""
    ) -> Forwarding:
        client_key, retry = call.headers.get("idempotency-key", ""), call.headers.get("x-stainless-retry-count", "")
        derived = hashlib.sha256(b"key:" + client_key.encode("latin-1")).hexdigest()[:32] if client_key else ""
        request = ForwardedRequest(
            ANNOTATIONS if call.route == TRACES else call.route,
            key,
            request_id or derived or call.request_id,
            int(time.time()),
            int(retry) if retry.isascii() and retry.isdigit() and len(retry) <= 3 else 0,
            body,
            is_side_call(call.headers),
        )
        limits = self.limits
        how = (self.keys, self.samplers, begin, write, limits.wait_seconds, limits.quiet_seconds)
        return Forwarding(request, key_hash(samples), *how)

    async def _models(self, call: Call) -> None:
        """Respond with the model of the name in the path; without a name, with the list of models, which has one entry."""
        api_key, name = await self._key(call), str(call.path_params.get("name", ""))
        with self._slot(key_hash(api_key)):
            run, created = await self._authentication.find_model(api_key, call.headers)
        if name not in ("", run):
            raise api_errors.no_model(name, run)
        listed = chat_completions.models(run, created)
        await call.answer(200, api_errors.as_json(listed["data"][0] if name else listed))

    async def _end_episode(self, clients: ServedClients, call: Call) -> None:
        api_key = await self._key(call)

        async def read(max_bytes: int) -> bytes:
            return await call.read(min(max_bytes, self.limits.body_bytes), self.limits.body_seconds)

        with self._slot(key_hash(api_key)):
            ended = await clients.end_episode(api_key, call.headers, read)
        await call.answer(200, api_errors.as_json(ended))

    async def _trace(self, call: Call) -> None:
        """Store an OpenTelemetry export: its spans become annotations of the episode to which the key belongs."""
        kind = call.headers.get("content-type", "")[:100].lower()
        content_type = otlp.PROTOBUF if kind.startswith(otlp.PROTOBUF) else otlp.JSON
        try:
            async with self._authentication.enter(await self._key(call), call.headers, ANNOTATIONS) as key:
                rejected, why = await self._take_spans(key, kind, call)
        except ApiError as error:
            refusal = span_annotations.refusal(kind, error.status, error.message)
            await call.answer(error.status, refusal, api_errors.headers_of(error), content_type)
            return
        await call.answer(200, span_annotations.answer(kind, rejected, why), content_type=content_type)

    async def _take_spans(self, key: str, kind: str, call: Call) -> tuple[int, str]:
        """Store the spans. Return the number of rejected spans, and the reason why the first one was rejected."""
        if kind.partition(";")[0].strip() not in (otlp.JSON, otlp.PROTOBUF):
            raise api_errors.wrong_type(f"{otlp.PROTOBUF} or {otlp.JSON}")
        samples = sampling_key(key)
        with self._slot(key_hash(samples)):
            async with self._turns.setdefault(key_hash(samples), asyncio.Lock()):  # an attempt with many waits for itself alone
                return await self._take_in_turn(key, kind, call)

    async def _take_in_turn(self, key: str, kind: str, call: Call) -> tuple[int, str]:
        place = await self.keys.find_open(sampling_key(key))
        encoding = call.headers.get("content-encoding", "").strip().lower()
        with self._held() as take:
            body = await call.read(self.limits.body_bytes, self.limits.body_seconds, take)
            async with self._reading:  # one at a time: a small body may become much
                read = partial(span_annotations.read_export, body, kind, encoding, str(place.episode))
                try:
                    export = await asyncio.to_thread(read)
                except otlp.OtlpError as error:
                    raise ApiError(400, f"Cannot read the traces: {error}.", "invalid_traces") from None
        with self._held() as take:
            take(sum(map(len, export.parts)))
            for part in export.parts:
                status, response = await self._annotate(key, part, call)
                if status != 200:
                    why = response[:300].decode("utf-8", "replace")
                    raise ApiError(status, f"The spans were not stored: {why}", "not_kept")
        return export.rejected, export.why

    async def _annotate(self, key: str, part: bytes, call: Call) -> tuple[int, bytes]:
        """Forward annotations to the worker, and return the status and the body of its response."""
        response, answered = bytearray(), [500]

        async def begin(status: int, headers: Headers) -> None:
            answered[0] = status

        async def write(piece: bytes, more: bool) -> None:
            response.extend(piece)

        await self._forwarding(call, key, sampling_key(key), part, begin, write, token_hex(16)).run()
        return answered[0], bytes(response)

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
            raise api_errors.too_many(f"The endpoint has {self.limits.open_calls} open calls, which is its limit")
        if self._open[attempt] >= self.limits.open_per_attempt:
            raise api_errors.too_many(f"This attempt has {self.limits.open_per_attempt} open calls, which is the limit")
        self._open[attempt] += 1
        try:
            yield
        finally:
            self._open[attempt] -= 1
            if not self._open[attempt]:
                del self._open[attempt]


async def _health(call: Call) -> None:
    await call.answer(200, api_errors.as_json({"status": "ok"}))
