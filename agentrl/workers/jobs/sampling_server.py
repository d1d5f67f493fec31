"""The HTTP server of a rollout process. Through the endpoint, it receives the requests of agents whose episodes this process
drives.

One thread serves all groups of the process. It reads requests, with limits on size and time, and writes responses. The rollout
that holds the episode samples the turns. A request for an episode that this process does not hold gets status 421; the endpoint
then looks up the holder again.
"""

import asyncio
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from logging import getLogger
from secrets import token_hex
from typing import Any, Protocol

import uvicorn

from agentrl.workers.jobs.agent_calls import Accepted, AgentCall, Answered, AttemptGone, Drawn, Refused, RolloutMessage
from agentrl.workers.stack.process import database
from agentrl.workflow.agents.keys import key_hash, sampling_key
from agentrl.workflow.annotations import MAX_AT_ONCE, Annotation, read_annotations
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.dialects import Ask, RecordedResponse, ReplyHead, RequestError, chat_completions
from agentrl.workflow.dialects.paths import COUNTERS, DIALECTS, Dialect, Events, dialect_of
from agentrl.workflow.dialects.request_parts import MAX_CHOICES
from agentrl.workflow.errors import ConflictError, ServiceError, StateError, locate_error
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.settings import settings
from agentrl.workflow.store import agent_holds
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.episode_annotations import add_annotations

log = getLogger("agentrl.sampling_server")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY = 8 * 1024 * 1024
BODY_SECONDS = 60.0
"""The time limit for receiving a request's body, in seconds."""
WRITE_SECONDS = 60.0
"""The time limit for one write to a client, in seconds. A client that does not read the data in this time is treated as
disconnected.
"""
KEPT_KEYS = 10_000
MAX_ANNOTATIONS = 1024 * 1024
"""The largest body of a request with annotations, in bytes."""
SMALL_BODY = 32 * 1024
"""The largest body that is parsed in the server's own thread, in bytes. Larger bodies are parsed in another thread."""
_RESPONSE = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)([0-9a-f]{32})")
"""The ids of responses, one form for each dialect, with the request id."""
_REQUEST_ID = re.compile(r"[0-9a-f]{32}")
_DIGITS = re.compile(r"[0-9]{1,15}")
_UNPRINTABLE = re.compile(rb"[^ -~]")
MAX_HEADER_BYTES = 1000
"""The most bytes of the header that names the fields without effect."""


class EpisodeServer(Protocol):
    """A rollout that answers the requests of its episodes' agents."""

    chat: Chat
    model: str
    fingerprint: str
    policy_version: int

    def take(self, call: AgentCall) -> None:
        """Queue the request. The rollout answers it later through `call.tell`."""

    def left(self, call: AgentCall) -> None:
        """Cancel the request because its client disconnected."""

    def recorded(self, episode: int, request_id: str) -> RecordedResponse | None:
        """Return the response to an earlier request of the episode's current attempt; None if there is no such response."""

    def step_of(self, episode: int, request_id: str, choice: int) -> int | None:
        """Return the index of the step that is a choice of an earlier response; None if there is no such step."""


@dataclass(eq=False)
class SamplingServer:
    """The HTTP server for the episodes of this worker.

    Attributes:
        address: the `host:port` at which the server listens.
        rows: the function that returns the database with the API keys.
    """

    address: str = ""
    rows: Callable[[], Database] = database
    _held: dict[int, tuple[int, EpisodeServer]] = field(default_factory=dict)
    _keys: dict[str, tuple[int, int]] = field(default_factory=dict)

    def hold(self, episode: int, attempt: int, holder: EpisodeServer) -> None:
        """Send requests for this attempt at the episode to the holder."""
        self._held[episode] = (attempt, holder)

    def drop(self, episode: int, holder: EpisodeServer) -> None:
        """Stop sending the episode's requests to the holder."""
        if self._held.get(episode, (0, None))[1] is holder:
            del self._held[episode]

    async def find(self, key: str) -> tuple[int, int, EpisodeServer]:
        """Return the episode and the attempt to which the key belongs, and the rollout that holds the episode.

        Raises:
            RequestError: with status 421, this process does not hold the episode; with status 409, the attempt is over.
        """
        hashed = key_hash(key)
        if hashed not in self._keys:
            location = await asyncio.to_thread(agent_holds.find_key, self.rows(), hashed)
            if location is None:
                raise _not_here()
            if len(self._keys) >= KEPT_KEYS:
                self._keys.clear()
            self._keys[hashed] = location
        episode, attempt = self._keys[hashed]
        held = self._held.get(episode)
        if held is None:
            raise _not_here()
        if held[0] != attempt:
            raise RequestError(409, "This episode has a newer attempt.", code="episode_over")
        return episode, attempt, held[1]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. This is the ASGI application."""
        if scope["type"] != "http":
            return
        exchange = HttpExchange(scope, receive, send)
        try:
            await self._serve(exchange)
        except RequestError as error:
            await exchange.refuse(error)
        except ServiceError as error:  # the database is away: the endpoint asks again
            log.warning("%s", error)
            await exchange.refuse(RequestError(503, "The sampler cannot answer now.", code="unavailable"))
        except Exception as error:  # noqa: BLE001 - no traceback: its values might show a key
            log.error("a request failed: %s in %s", type(error).__name__, locate_error(error))
            await exchange.refuse(RequestError(500, "The sampler failed; the reason is in its log.", code="internal_error"))

    async def _serve(self, exchange: "HttpExchange") -> None:
        match exchange.scope["method"], exchange.scope["path"]:
            case "POST", path if path in DIALECTS:
                await self._sample(exchange)
            case "POST", "/v1/annotations":
                await self._note(exchange)
            case "GET", "/v1/models":
                _, _, holder = await self.find(exchange.key())
                await exchange.answer(200, chat_completions.models(holder.model))
            case _:
                raise RequestError(404, "Unknown route.", code="not_found")

    async def _sample(self, exchange: "HttpExchange") -> None:
        """Let the holder sample a turn for the request, or count its tokens, and write the response."""
        episode, attempt, holder = await self.find(exchange.key())
        body = await exchange.body()
        read = partial(exchange.dialect.read, body, partial(holder.recorded, episode))
        ask = read() if len(body) <= SMALL_BODY else await asyncio.to_thread(read)
        counts = exchange.path in COUNTERS
        ask = replace(ask, model=ask.model or holder.model, counts_only=counts, stream=ask.stream and not counts)
        queue: asyncio.Queue[RolloutMessage] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        held: list[RolloutMessage] = []

        def tell(message: RolloutMessage) -> None:
            held.append(message)
            if isinstance(message, Accepted) and not ask.stream:
                return  # nothing is written yet: it wakes nobody
            batch, held[:] = tuple(held), []
            with suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(_put_all, queue, batch)

        call = AgentCall(episode, attempt, *exchange.identity(ask.identity), ask.identity, ask, tell)
        holder.take(call)
        reply = asyncio.ensure_future(_reply(exchange, holder, ask, queue))
        gone = asyncio.ensure_future(exchange.wait_gone())
        try:
            await asyncio.wait((reply, gone), return_when=asyncio.FIRST_COMPLETED)
            if reply.done():
                await reply
        except TimeoutError:
            log.info("a client of episode %d has stopped reading", episode)
        except _BrokenOff as error:
            log.info("a response of episode %d is cut off: %s", episode, error)
        finally:
            if not (reply.done() and not reply.cancelled() and reply.exception() is None):
                holder.left(call)
            for task in (reply, gone):
                task.cancel()
            await asyncio.gather(reply, gone, return_exceptions=True)

    async def _note(self, exchange: "HttpExchange") -> None:
        """Store annotations that an agent sent about its episode."""
        episode, attempt, holder = await self.find(sampling_key(exchange.key()))
        step_of = partial(holder.step_of, episode)
        annotations = await asyncio.to_thread(_read_annotations, await exchange.body(), step_of)
        try:
            await asyncio.to_thread(add_annotations, self.rows(), episode, attempt, annotations)
        except StateError as error:
            raise RequestError(409, error.message, code="episode_over") from None
        except ConflictError as error:
            raise RequestError(400, error.message, code="invalid_annotation") from None
        await exchange.answer(200, {"annotations": len(annotations)})


def _read_annotations(body: bytes, step_of: Callable[[str, int], int | None]) -> Sequence[Annotation]:
    """Return the annotations in a body: those under `annotations`, or one for each reward of an earlier response under
    `rewards`. `step_of` finds the step of a request id and a choice.
    """
    try:
        tree = json.loads(body) if len(body) <= MAX_ANNOTATIONS else None
        if not isinstance(tree, dict) or tree.keys() not in ({"annotations"}, {"rewards"}):
            problem = "the body must be an object with only `annotations`, or only `rewards`"
            raise ValueError(f"{problem}, of at most {MAX_ANNOTATIONS} bytes")
        if "annotations" in tree:
            return read_annotations(tree["annotations"])
        if not isinstance(tree["rewards"], list):
            raise ValueError("rewards must be a list")
        return read_annotations([_reward_annotation(reward, step_of) for reward in tree["rewards"][: MAX_AT_ONCE + 1]])
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"No annotations: {str(error)[:500]}.", code="invalid_annotation") from None


def _reward_annotation(reward: Any, step_of: Callable[[str, int], int | None]) -> dict[str, Any]:
    """Return the annotation of a reward of an earlier response, as decoded JSON."""
    if not isinstance(reward, dict) or not {"response", "value"} <= reward.keys() <= {"response", "value", "name", "choice"}:
        raise ValueError("a reward is an object with response, value, and optionally name and choice")
    match = _RESPONSE.fullmatch(reward["response"]) if isinstance(reward["response"], str) else None
    choice = reward.get("choice", 0)
    step = step_of(match[1], choice) if match and type(choice) is int and 0 <= choice < MAX_CHOICES else None
    if step is None:
        raise ValueError(f"this episode has no response {str(reward['response'])[:80]!r} with that choice")
    data = {"value": reward["value"], "step": step}
    return {"id": token_hex(16), "kind": "reward", "name": reward.get("name", "reward"), "data": data, "step": step}


def _put_all(queue: "asyncio.Queue[RolloutMessage]", messages: Iterable[RolloutMessage]) -> None:
    for message in messages:
        queue.put_nowait(message)


class _BrokenOff(Exception):
    """The error for a stream that has begun and that this process cannot complete."""


async def _reply(exchange: "HttpExchange", holder: EpisodeServer, ask: Ask, queue: "asyncio.Queue[RolloutMessage]") -> None:
    """Write the response while the rollout's messages arrive in the queue."""
    accepted = await queue.get()
    if isinstance(accepted, Refused):
        raise accepted.error
    if not isinstance(accepted, Accepted):
        raise _not_here()
    exchange.headers.append((b"x-agentrl-policy-version", str(holder.policy_version).encode()))
    if ask.counts_only:
        await exchange.answer(200, COUNTERS[exchange.path].count(len(accepted.prompt_ids)))
        return
    if ask.not_applied:
        names = ", ".join(ask.not_applied).encode("ascii", "replace")
        exchange.headers.append((b"x-agentrl-not-applied", _UNPRINTABLE.sub(b"?", names)[:MAX_HEADER_BYTES]))
    head = ReplyHead(accepted.prompt_ids, accepted.request_id, accepted.created, holder.fingerprint, accepted.cached_tokens)
    if ask.stream:
        await _stream(exchange, exchange.dialect.stream(ask, head, holder.chat), queue)
        return
    while not isinstance(message := await queue.get(), Answered):
        if isinstance(message, Refused):
            raise message.error
        if isinstance(message, AttemptGone):
            raise _not_here()
    await exchange.answer(200, exchange.dialect.whole(ask, message.turns, head, holder.chat))


async def _stream(exchange: "HttpExchange", events: Events, queue: "asyncio.Queue[RolloutMessage]") -> None:
    """Write the server-sent events, one choice after the other. So the bytes do not depend on the time at which the tokens
    arrive.
    """
    await exchange.begin_stream()
    await exchange.write(events.begin())
    drawn: dict[int, list[int]] = {}
    while not isinstance(message := await queue.get(), Answered):
        if isinstance(message, Refused | AttemptGone):
            raise _BrokenOff(message)  # the connection ends without the last event, so the proxy sends the call again
        if isinstance(message, Drawn):
            drawn.setdefault(message.choice, []).append(message.token)
            if message.choice == 0:
                await exchange.write(events.token(0, message.token))
    for choice, turn in enumerate(message.turns):
        written = len(drawn.get(0, ())) if choice == 0 else 0
        for token in turn.completion.token_ids[written:]:
            await exchange.write(events.token(choice, token))
        await exchange.write(events.end(choice, turn))
    await exchange.write(events.close(message.turns))
    await exchange.end_stream()


@dataclass(eq=False)
class HttpExchange:
    """One request and its response. `headers` are those of the response, besides the usual ones."""

    scope: Scope
    receive: Receive
    send: Send
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    _begun: bool = False

    @property
    def path(self) -> str:
        """The path of the request."""
        return str(self.scope["path"])

    @property
    def dialect(self) -> Dialect:
        """The dialect of the request."""
        return dialect_of(self.path)

    def key(self) -> str:
        """Return the API key of the request.

        Raises:
            RequestError: the request has no key.
        """
        scheme, _, key = self.header("authorization").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise RequestError(401, "The API key is missing.", code="invalid_api_key")
        return key.strip()

    def identity(self, salt: str) -> tuple[str, int, int]:
        """Return three values from the headers that the endpoint sets: the request id, the time of arrival in seconds since
        1970, and the number of earlier tries.
        """
        name, created, retry = (self.header(f"x-agentrl-{what}") for what in ("request", "created", "retry"))
        return (
            name if _REQUEST_ID.fullmatch(name) else hashlib.sha256(f"{time.time_ns()}|{salt}".encode()).hexdigest()[:32],
            int(created) if _DIGITS.fullmatch(created) else int(time.time()),
            int(retry) if _DIGITS.fullmatch(retry) else 0,
        )

    def header(self, name: str) -> str:
        """Return the value of the header; empty if the header is missing."""
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name.encode()), "")

    async def body(self) -> bytes:
        """Return the complete body.

        Raises:
            RequestError: the body is too large, is cut off, or did not arrive within `BODY_SECONDS`.
        """
        content = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise RequestError(400, "The body ends too early.", code="invalid_request")
                    content += message.get("body", b"")
                    if len(content) > MAX_BODY:
                        raise RequestError(413, f"The body has more than {MAX_BODY} bytes.", code="request_too_large")
                    if not message.get("more_body"):
                        return bytes(content)
        except TimeoutError as error:
            raise RequestError(408, f"The body was not received within {BODY_SECONDS:.0f} s.", code="timeout") from error

    async def wait_gone(self) -> None:
        """Wait until the client disconnects."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def refuse(self, error: RequestError) -> None:
        """Respond with the error, unless a response has begun."""
        if not self._begun:
            self.headers = [(b"x-should-retry", b"false")] if error.code == "max_calls" else []
            await self.answer(error.status, self.dialect.error_body(error))

    async def answer(self, status: int, document: Any) -> None:
        """Respond with a JSON document."""
        body = json.dumps(document, ensure_ascii=False, separators=(",", ":"), default=dict).encode("utf-8", "replace")
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *self.headers]
        self._begun = True
        async with asyncio.timeout(WRITE_SECONDS):
            await self.send({"type": "http.response.start", "status": status, "headers": headers})
            await self.send({"type": "http.response.body", "body": body})

    async def begin_stream(self) -> None:
        """Begin a response of server-sent events."""
        self._begun = True
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers += [(b"x-accel-buffering", b"no"), *self.headers]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, events: bytes) -> None:
        """Write events, if there are any."""
        if events:
            async with asyncio.timeout(WRITE_SECONDS):
                await self.send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_stream(self) -> None:
        async with asyncio.timeout(WRITE_SECONDS):
            await self.send({"type": "http.response.body", "body": b""})


def _not_here() -> RequestError:
    return RequestError(421, "This worker does not serve that episode.", code="not_held")


def _listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port of the host."""
    if host == "auto":
        host = _own_address()
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        message = f"Cannot serve agents at {host!r}: {error.strerror or error}."
        raise ServiceError(message, "Set AGENTRL_SAMPLER_HOST to an address of this machine.") from error
    return listener


def _own_address() -> str:
    """Return the address of the network interface that leads to other machines. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a network for documentation
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def start(rows: Callable[[], Database] = database, host: str | None = None) -> SamplingServer:
    """Start the server in a thread that runs until the process ends.

    Args:
        rows: the function that returns the database with the API keys.
        host: the address to listen on; None for the setting AGENTRL_SAMPLER_HOST.

    Raises:
        ServiceError: the server cannot listen on the address.
    """
    app, listener = SamplingServer(rows=rows), _listen(host or settings().sampler_host)
    host, port = listener.getsockname()[:2]
    app.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    config = uvicorn.Config(
        app, loop="asyncio", http="h11", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        date_header=False, timeout_keep_alive=75,
    )  # fmt: skip
    server = uvicorn.Server(config)
    threading.Thread(target=lambda: server.run(sockets=[listener]), name="sampling server", daemon=True).start()
    return app


@Once
def sampling_server() -> SamplingServer:
    """Return the server of this process. The first call starts the server, so processes without external agents have none."""
    return start()
