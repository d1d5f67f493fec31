"""The HTTP server of a rollout process. Through the endpoint, it receives the requests of agents whose episodes this process
drives.

One thread serves all groups of the process. It reads requests, with limits on size and time, and writes responses. The rollout
that holds the episode samples the turns. A request for an episode that this process does not hold gets status 421; the endpoint
then looks up the holder again.
"""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from logging import getLogger
from secrets import token_hex
from typing import Any, Protocol

from agentrl.workers.http.calls import MAX_HEAD_BYTES, ApiRoute, Application, Call
from agentrl.workers.http.http_server import make_server, serve
from agentrl.workers.jobs.agent_calls import (
    ANNOTATIONS,
    TRAIN,
    Accepted,
    AgentCall,
    Answered,
    AttemptGone,
    Begin,
    Drawn,
    ForwardedRequest,
    Refused,
    RolloutMessage,
    Write,
)
from agentrl.workers.stack.process import database
from agentrl.workflow.agents.keys import key_hash, sampling_key
from agentrl.workflow.annotations import MAX_AT_ONCE, Annotation, read_annotations
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.dialects import Ask, RecordedResponse, ReplyHead, RequestError
from agentrl.workflow.dialects.paths import COUNTERS, DIALECTS, Events, dialect_of
from agentrl.workflow.dialects.request_parts import MAX_CHOICES
from agentrl.workflow.errors import ConflictError, ServiceError, StateError
from agentrl.workflow.runtime.once_per_process import Once
from agentrl.workflow.settings import settings
from agentrl.workflow.store import agent_holds
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.episode_annotations import add_annotations

log = getLogger("agentrl.sampling_server")
MAX_BODY = 8 * 1024 * 1024
BODY_SECONDS = 60.0
"""The time limit for receiving a request's body, in seconds."""
KEPT_KEYS = 10_000
MAX_ANNOTATIONS = 1024 * 1024
"""The largest body of a request with annotations, in bytes."""
SMALL_BODY = 32 * 1024
"""The largest body that is parsed in the server's own thread, in bytes. Larger bodies are parsed in another thread."""
_RESPONSE = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)([0-9a-f]{32})")
"""The form of response ids, one for each dialect. Each response id contains the request id."""
_UNPRINTABLE = re.compile(rb"[^ -~]")
MAX_HEADER_BYTES = 1000
"""The most bytes of the header that lists the request's fields without effect."""


class EpisodeServer(Protocol):
    """A rollout that answers the requests of its episodes' agents."""

    chat: Chat
    model: str
    fingerprint: str
    policy_version: int
    max_context: int
    allows_side_calls: bool
    records_text: bool

    def take(self, call: AgentCall) -> None:
        """Queue the request. The rollout answers it later through `call.tell`."""

    def left(self, call: AgentCall) -> None:
        """Cancel the request because its client disconnected."""

    def constrain(self, ask: Ask) -> Ask:
        """Return the request with the constraint that will be enforced, or that the model is asked to keep. Raise
        RequestError if the request is refused.
        """

    def recorded(self, episode: int, request_id: str) -> RecordedResponse | None:
        """Return the response to an earlier request of the episode's current attempt; None if there is no such response."""

    def step_of(self, episode: int, request_id: str, choice: int) -> int | None:
        """Return the index of the step that was this choice in the response to that request; None if there is none."""


@dataclass(eq=False)
class SamplingServer:
    """The server that answers the requests for the episodes of this worker: over HTTP by `application`, in this process by
    `answer`.

    Attributes:
        address: the `host:port` at which the server listens; in a process that only calls `answer`, any text.
        rows: the function that returns the database with the API keys.
    """

    address: str = ""
    rows: Callable[[], Database] = database
    _held: dict[int, tuple[int, EpisodeServer]] = field(default_factory=dict)
    _keys: dict[str, tuple[int, int]] = field(default_factory=dict)

    def hold(self, episode: int, attempt: int, holder: EpisodeServer) -> None:
        """From now on, pass the requests for this attempt at the episode to `holder`."""
        self._held[episode] = (attempt, holder)

    def drop(self, episode: int, holder: EpisodeServer) -> None:
        """Stop passing the episode's requests to `holder`."""
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

    def application(self) -> Application:
        """Return the ASGI application that answers the requests which an endpoint in another process forwards."""
        routes = [ApiRoute("POST", path, self._answer_call) for path in (*DIALECTS, ANNOTATIONS)]
        return Application(routes, "sampler", log)

    async def _answer_call(self, call: Call) -> None:
        key = call.bearer()
        if not key:
            raise RequestError(401, "The API key is missing.", code="invalid_api_key")
        await self.find(key if call.route != ANNOTATIONS else sampling_key(key))
        body = await call.read(MAX_BODY, BODY_SECONDS)
        request = ForwardedRequest.received(call.route, key, call.headers, body)
        await call.unless_gone(self.answer(request, call.begin, call.write))

    async def answer(self, request: ForwardedRequest, begin: Begin, write: Write) -> None:
        """Answer a request. If this coroutine is cancelled because the client disconnected, the request's turn is not sampled
        further.

        Args:
            request: the request.
            begin: sends the status and the headers of the response.
            write: sends bytes of the response.

        Raises:
            RequestError: the request is refused; with status 421, this process does not hold the episode. If the response has
                begun, the caller ends it with the error, or sends the request again (status 421).
            ServiceError: the database does not answer.
        """
        if request.path == ANNOTATIONS:
            await self._annotate(request, begin, write)
        else:
            await self._sample(request, begin, write)

    async def _sample(self, request: ForwardedRequest, begin: Begin, write: Write) -> None:
        """Let the holder sample a turn for the request, or count its tokens, and write the response."""
        episode, attempt, holder = await self.find(request.key)
        read = partial(dialect_of(request.path).read, request.body, partial(holder.recorded, episode), holder.max_context)
        ask = read() if len(request.body) <= SMALL_BODY else await asyncio.to_thread(read)
        counts = request.path in COUNTERS
        ask = replace(ask, model=ask.model or holder.model, counts_only=counts, stream=ask.stream and not counts)
        if request.side_call:
            ask = (
                replace(ask, side_call=True)
                if holder.allows_side_calls
                else replace(ask, not_applied=(*ask.not_applied, TRAIN))
            )
        ask = await asyncio.to_thread(holder.constrain, ask) if ask.constraint else holder.constrain(ask)
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

        call = AgentCall(episode, attempt, request.request_id, request.created, request.retry, ask.identity, ask, tell)
        holder.take(call)
        replied = False
        try:
            await _reply(request.path, begin, write, holder, ask, queue)
            replied = True
        finally:
            if not replied:
                holder.left(call)

    async def _annotate(self, request: ForwardedRequest, begin: Begin, write: Write) -> None:
        """Store annotations that an agent sent about its episode."""
        episode, attempt, holder = await self.find(sampling_key(request.key))
        step_of = partial(holder.step_of, episode)
        annotations = await asyncio.to_thread(_read_annotations, request.body, step_of)
        try:
            await asyncio.to_thread(add_annotations, self.rows(), episode, attempt, annotations)
        except StateError as error:
            raise RequestError(409, error.message, code="episode_over") from None
        except ConflictError as error:
            raise RequestError(400, error.message, code="invalid_annotation") from None
        await _write_json(begin, write, {"annotations": len(annotations)})


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
        raise RequestError(400, f"Invalid annotations: {str(error)[:500]}.", code="invalid_annotation") from None


def _reward_annotation(reward: Any, step_of: Callable[[str, int], int | None]) -> dict[str, Any]:
    """Return the annotation of a reward of an earlier response, as decoded JSON."""
    if not isinstance(reward, dict) or not {"response", "value"} <= reward.keys() <= {"response", "value", "name", "choice"}:
        raise ValueError("a reward must be an object with response and value, and optionally name and choice")
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


async def _reply(
    path: str, begin: Begin, write: Write, holder: EpisodeServer, ask: Ask, queue: "asyncio.Queue[RolloutMessage]"
) -> None:
    """Write the response while the rollout's messages arrive in the queue."""
    accepted = await queue.get()
    if isinstance(accepted, Refused):
        raise accepted.error
    if not isinstance(accepted, Accepted):
        raise _not_here()
    headers = [(b"x-agentrl-policy-version", str(holder.policy_version).encode())]
    if holder.records_text:
        headers.append((b"x-agentrl-recorded", b"text"))
    if ask.counts_only:
        await _write_json(begin, write, COUNTERS[path].count(len(accepted.prompt_ids)), headers)
        return
    if ask.not_applied:
        names = ", ".join(ask.not_applied).encode("ascii", "replace")
        headers.append((b"x-agentrl-not-applied", _UNPRINTABLE.sub(b"?", names)[:MAX_HEADER_BYTES]))
    head = ReplyHead(accepted.prompt_ids, accepted.request_id, accepted.created, holder.fingerprint, accepted.cached_tokens)
    dialect = dialect_of(path)
    if ask.stream:
        lines = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await begin(200, [*lines, (b"x-accel-buffering", b"no"), *headers])
        await _stream(write, dialect.stream(ask, head, holder.chat), queue)
        return
    while not isinstance(message := await queue.get(), Answered):
        _check_sampled(message)
    await _write_json(begin, write, dialect.whole(ask, message.turns, head, holder.chat), headers)


async def _stream(write: Write, events: Events, queue: "asyncio.Queue[RolloutMessage]") -> None:
    """Write the server-sent events, one choice after the other. So the bytes do not depend on the time at which the tokens
    arrive.
    """
    await write(events.begin(), True)
    drawn: dict[int, list[int]] = {}
    while not isinstance(message := await queue.get(), Answered):
        _check_sampled(message)
        if isinstance(message, Drawn):
            drawn.setdefault(message.choice, []).append(message.token)
            if message.choice == 0 and (piece := events.token(0, message.token)):
                await write(piece, True)
    rest = []
    for choice, turn in enumerate(message.turns):
        written = len(drawn.get(0, ())) if choice == 0 else 0
        rest += [events.token(choice, token) for token in turn.completion.token_ids[written:]]
        rest.append(events.end(choice, turn))
    await write(b"".join((*rest, events.close(message.turns))), True)
    await write(b"", False)


def _check_sampled(message: RolloutMessage) -> None:
    """Raise the error of a request that is refused after it was accepted, or that this process cannot answer any more."""
    if isinstance(message, Refused):
        raise message.error
    if isinstance(message, AttemptGone):
        raise _not_here()


async def _write_json(begin: Begin, write: Write, document: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    body = json.dumps(document, ensure_ascii=False, separators=(",", ":"), default=dict).encode("utf-8", "replace")
    await begin(200, [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers])
    await write(body, False)


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
    sampler, listener = SamplingServer(rows=rows), _listen(host or settings().sampler_host)
    host, port = listener.getsockname()[:2]
    sampler.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    server = make_server(sampler.application(), MAX_HEAD_BYTES, 0)
    work = serve(server, listener)
    threading.Thread(target=lambda: asyncio.run(work), name="sampling server", daemon=True).start()
    return sampler


@Once
def sampling_server() -> SamplingServer:
    """Return the server of this process. The first call starts the server, so processes without external agents have none."""
    return start()
