"""The authentication of `agentrl serve`. Each client has one open episode, which its first request opens and to which its
further requests belong.

A client is identified by the header X-Agentrl-Episode. If the server needs no key, the API key that a client sends also
identifies the client. Clients that send neither the header nor a key share one episode. An episode ends by `POST
/v1/episode/end`, when it is idle for long, after a maximum number of requests, or with the process. After an episode has ended
or failed, the client's next request opens another episode.
"""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, Any

from agentrl.workers.http.api_errors import ApiError
from agentrl.workers.jobs.agent_calls import ANNOTATIONS
from agentrl.workflow.agents import AgentResult, read_result
from agentrl.workflow.call_json import parse_digits
from agentrl.workflow.errors import AgentRLError
from agentrl.workflow.inference.http import names_loopback
from agentrl.workflow.rewards import MAX_REWARD

if TYPE_CHECKING:
    from agentrl.workers.jobs.served_episodes import OpenEpisode, ServedEpisodes

log = getLogger("agentrl.serve")
END = "/v1/episode/end"
Read = Callable[[int], Awaitable[bytes]]
HEADER = "x-agentrl-episode"
MAX_NAME = 128
MAX_CLIENTS = 4096
"""The most clients with an open episode."""
MAX_END_BYTES = 64 * 1024
OPEN_SECONDS = 60.0
"""The longest wait until an episode is opened or ended, in seconds."""
ONE_FOR_ALL = "client"
"""The client name that is used for all requests without the header X-Agentrl-Episode."""


@dataclass(eq=False)
class _Client:
    """A client whose episode is open or is being opened."""

    name: str
    opened: "asyncio.Task[OpenEpisode]"
    calls: int = 0
    open_calls: int = 0
    rest: asyncio.TimerHandle | None = None


@dataclass
class ServedClients:
    """The authenticator of `agentrl serve`. Use it only in the server's event loop.

    Args:
        episodes: opens and ends episodes.
        run: the run's name.
        created: when the run was created, in Unix seconds.
        key: the API key that every request must contain; if it is empty, requests from this machine need no key.
        idle_seconds: the time without a request, in seconds, after which an episode ends.
        most_calls: the most requests of one episode.
    """

    episodes: "ServedEpisodes"
    run: str
    created: int
    key: str = ""
    idle_seconds: float = 600.0
    most_calls: int = 1000
    allowed_origins: Set[str] = frozenset()
    """The origins of web pages that may read the responses, if the server has a key."""
    calls: int = 0
    """The number of accepted requests."""
    _clients: dict[tuple[str, str], _Client] = field(default_factory=dict)

    @property
    def origins(self) -> Set[str]:
        """Return the origins of web pages that may read the responses; empty if the server has no key."""
        return self.allowed_origins if self.key else frozenset()

    async def accepts(self, api_key: str) -> bool:
        """Return whether the key is right. If the server has no key, every key is right."""
        return not self.key or self._is_own(api_key)

    async def find_model(self, api_key: str, headers: Mapping[str, str]) -> tuple[str, int]:
        """Return the name of the run, which is the same for all clients, and when it was created, in Unix seconds.

        Raises:
            ApiError: the key is wrong, the client's name is invalid, or the request comes from a web page of another site.
        """
        self._identify(api_key, headers)
        return self.run, self.created

    @asynccontextmanager
    async def enter(self, api_key: str, headers: Mapping[str, str], path: str) -> AsyncIterator[str]:
        """Yield the key with which the request is forwarded: a key of the client's episode. The request is open during the
        `with` block. A client's annotations open an episode too, like its other requests.

        Raises:
            ApiError: the key is wrong, the client's name is invalid, the request comes from a web page of another site, too
                many clients have an episode, or no episode could be opened.
        """
        who = self._identify(api_key, headers)
        client = self._open_client(who) or self._begin(who)
        client.calls += 1
        self.calls += 1
        if client.calls >= self.most_calls:  # the next call opens another episode
            del self._clients[who]
        client.open_calls += 1
        if client.rest is not None:
            client.rest.cancel()
            client.rest = None
        try:
            opened = await self._opened(who, client)
            yield opened.emit_key if path == ANNOTATIONS else opened.key
        finally:
            client.open_calls -= 1
            if not client.open_calls:
                self._rest(who, client)

    async def end_episode(self, api_key: str, headers: Mapping[str, str], read: Read) -> Any:
        """End the client's episode with the answer and the rewards in the request's body, and return the JSON response.

        Args:
            api_key: the key of the request; empty if it has none.
            headers: the headers of the request.
            read: reads the body of the request; its argument is the most bytes.

        Raises:
            ApiError: the key is wrong, the body is invalid, the client has no episode, or the episode could not be ended.
        """
        who = self._identify(api_key, headers)  # before anything is kept of who may not
        end = _read_end(await read(MAX_END_BYTES))
        client = self._clients.pop(who, None)
        if client is None:
            raise ApiError(404, "You have no open episode.", "no_episode")
        if client.rest is not None:
            client.rest.cancel()
        opened = await self._opened(who, client)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await asyncio.wrap_future(self.episodes.end(opened.id, end.answer, end.rewards))
        except TimeoutError:  # it will be, and whoever asks again is told
            if who not in self._clients:
                self._clients[who] = client
                self._rest(who, client)
            raise _unavailable("the episode could not be ended") from None
        return {"episode": opened.id, "run": self.run, "status": "ended"}

    def _open_client(self, who: tuple[str, str]) -> _Client | None:
        """Return the client; None if there is no such client or its episode has ended."""
        client = self._clients.get(who)
        opened = None if client is None else _opened_by(client)
        if client is None or opened is None or self.episodes.is_open(opened.id):
            return client
        del self._clients[who]
        if client.rest is not None:
            client.rest.cancel()
        return None

    def _begin(self, who: tuple[str, str]) -> _Client:
        if len(self._clients) >= MAX_CLIENTS:
            message = f"{MAX_CLIENTS} episodes are open, which is the limit. End some: POST {END}."
            raise ApiError(429, message, "too_many_episodes", "rate_limit_error", retry_after=5)
        name = who[1] or ONE_FOR_ALL
        client = self._clients[who] = _Client(name, asyncio.create_task(self._open(name)))
        return client

    async def _open(self, name: str) -> "OpenEpisode":
        return await asyncio.wrap_future(self.episodes.open(name))

    async def _opened(self, who: tuple[str, str], client: _Client) -> "OpenEpisode":
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await asyncio.shield(client.opened)
        except Exception as error:
            if self._clients.get(who) is client:
                del self._clients[who]
            if not isinstance(error, AgentRLError | TimeoutError):
                raise
            log.warning("no episode could be opened: %s", error)
            raise _unavailable("no episode could be opened") from error

    def _rest(self, who: tuple[str, str], client: _Client) -> None:
        """Start the timer that ends the client's idle episode. If the client has another episode, end this one at once."""
        if self._clients.get(who) is client:
            client.rest = asyncio.get_running_loop().call_later(self.idle_seconds, self._end, who, client)
        else:
            self._end(who, client)

    def _end(self, who: tuple[str, str], client: _Client) -> None:
        if self._clients.get(who) is client:
            del self._clients[who]
        client.opened.add_done_callback(partial(self._end_opened, client))  # it may be opened yet, after all who waited went

    def _end_opened(self, client: _Client, done: object) -> None:
        opened = _opened_by(client)
        if opened is not None:
            self.episodes.end(opened.id, None, None)

    def _is_own(self, api_key: str) -> bool:
        return hmac.compare_digest(api_key.encode(errors="surrogateescape"), self.key.encode())

    def _identify(self, api_key: str, headers: Mapping[str, str]) -> tuple[str, str]:
        """Return the (API key, name) that identifies the client. The API key is empty if the server needs a key, which is then
        the same for all.

        Raises:
            ApiError: the key is wrong, the name is invalid, or the request comes from a web page of another site.
        """
        if self.key:
            if not self._is_own(api_key):
                message = "Wrong or missing API key. Send it: Authorization: Bearer KEY, or x-api-key: KEY."
                raise ApiError(401, message, "invalid_api_key", final=True)
            api_key = ""
        else:
            _check_local(headers)
        name = headers.get(HEADER, "").strip()
        if len(name) > MAX_NAME or not all(32 < ord(letter) < 127 for letter in name):
            message = f"X-Agentrl-Episode must have at most {MAX_NAME} printable ASCII characters and no spaces."
            raise ApiError(400, message, "invalid_episode")
        return api_key, name


def _opened_by(client: _Client) -> "OpenEpisode | None":
    """Return the client's episode; None while it is being opened, or if it could not be opened."""
    done = client.opened
    return done.result() if done.done() and not done.cancelled() and done.exception() is None else None


def _check_local(headers: Mapping[str, str]) -> None:
    """Check that a request without a key comes from this machine and not from a foreign web page. A page in a browser can send
    requests to this machine, and can make its own host name resolve to it.

    Raises:
        ApiError: the request's origin is another site, or the request names another host.
    """
    origin = headers.get("origin", "")
    host = headers.get("host", "localhost")
    if not names_loopback(f"//{host}") or (origin and not names_loopback(origin)):
        message = "Without a key, only this machine is served, as localhost or 127.0.0.1. Set AGENTRL_SERVE_KEY."
        raise ApiError(403, message, "not_local", "permission_error", final=True)


def _read_end(body: bytes) -> AgentResult:
    """Return the answer and the rewards in the body of a request that ends an episode.

    Raises:
        ApiError: the body is not valid JSON of this form.
    """
    try:
        value = json.loads(body, parse_int=parse_digits) if body.strip() else None
        result = read_result(value)
        if any(abs(reward) > MAX_REWARD for reward in (result.rewards or {}).values()):
            raise ValueError(f"a reward is between -{MAX_REWARD:g} and {MAX_REWARD:g}")
        return result
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = str(error).partition("\n")[0][:200]
        hint = 'Send nothing, a number, or {"text": ANSWER, "rewards": {NAME: NUMBER}}.'
        raise ApiError(400, f"Cannot end the episode: {reason}. {hint}", "invalid_request") from error


def _unavailable(what: str) -> ApiError:
    return ApiError(503, f"Now {what}. Send the call again.", "unavailable", "server_error", retry_after=5)
