"""Sampling by a server over HTTP: what such engines share, whichever routes their server speaks.

Each turn is one request that a thread waits for; the server batches them. It is greeted before the first turn, and again after
it was away: it may have come back with another window. A server that does not answer costs nobody an attempt (ServiceError:
the job is handed back and tried later); one that answers something else than what was asked ends the run.

Nothing here reads the base's weights.
"""

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import httpx2

from workflow.engine import Completion, GenerateRequest, closed, not_a_number
from workflow.errors import ConfigError, InfraError, ModelError, ServiceError
from workflow.policy import Policy
from workflow.settings import Settings
from workflow.trajectory import FinishReason

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 900.0
"""A turn that waits and samples for longer is given up: what holds the other end is gone."""

_AWAY = (429, 502, 503, 504)
"""What a server, or what stands before it, answers while it cannot serve."""


class Refused(ModelError):
    """The server `said` that it will not do what was asked; `status` is HTTP's."""

    def __init__(self, url: str, path: str, status: int, said: str) -> None:
        super().__init__(f"The server at {url} refused {path}: {status} {said:.300}")
        self.status = status
        self.said = said


class Connection:
    """A server's URL and the connections that are kept to it.

    Args:
        settings: with `engine_url` and `engine_key`.

    Raises:
        ConfigError: there is no URL.
    """

    def __init__(self, settings: Settings) -> None:
        if not settings.engine_url:
            raise ConfigError("This engine needs a server's URL.", "Set AGENTRL_ENGINE_URL=http://HOST:PORT.")
        self.url = settings.engine_url.rstrip("/").removesuffix("/v1")
        self._client = httpx2.Client(
            headers={"Authorization": f"Bearer {settings.engine_key}"} if settings.engine_key else {},
            timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=settings.slots),
        )

    def close(self) -> None:
        """Ends the connections; who waits for an answer gets a ServiceError."""
        self._client.close()

    def get(self, path: str) -> Any:
        """What the server answers, read as JSON. Raises as `post` does."""
        return _json(self.url, path, self._ask("GET", path, None))

    def post(self, path: str, body: Any) -> Any:
        """What the server answers to `body`, read as JSON.

        Raises:
            ServiceError: it does not answer, or is not ready.
            ConfigError: it wants another API key.
            Refused: it will not.
            InfraError: it failed.
            ModelError: its answer is no JSON object.
        """
        return _json(self.url, path, self._ask("POST", path, body))

    def tell(self, path: str, body: Any) -> None:
        """As `post`, for a route whose answer says nothing."""
        self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Any) -> httpx2.Response:
        try:
            response = self._client.request(method, self.url + path, json=body)
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise ConfigError(f"{self.url!r} is no URL: {error}.", "Set AGENTRL_ENGINE_URL=http://HOST:PORT.") from error
        except (httpx2.TransportError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            said = f"The engine's server at {self.url} does not answer: {type(error).__name__}: {error}."
            raise ServiceError(said, "Start it, or correct AGENTRL_ENGINE_URL.") from error
        status, said = response.status_code, " ".join(response.text.split())
        if status in _AWAY:
            raise ServiceError(f"The engine's server at {self.url} is not ready: {status} {said:.300}")
        if status in (401, 403):
            raise ConfigError(f"The server at {self.url} refuses the API key ({status}).", "Set AGENTRL_ENGINE_KEY.")
        if status >= 500:
            raise InfraError(f"The server at {self.url} failed: {status} {said:.300}")
        if status >= 300:
            raise Refused(self.url, path, status, said)
        return response


def _json(url: str, path: str, response: httpx2.Response) -> Any:
    try:
        tree = response.json()
    except ValueError as error:
        raise ModelError(f"The server at {url} answered {path} with what is no JSON: {response.text[:100]!r}.") from error
    if not isinstance(tree, dict):
        raise ModelError(f"The server at {url} answered {path} with what is no object: {response.text[:100]!r}.")
    return tree


@dataclass(frozen=True, slots=True)
class Turn:
    """What a server sampled; a logprob is None where its answer had no number."""

    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    finish_reason: FinishReason


class Server(Protocol):
    """The routes of one kind of server."""

    def greet(self) -> int:
        """Makes sure that it serves this base.

        Returns:
            Its window: tokens of prompt and answer together.
        """

    def sample(self, request: GenerateRequest, limit: int) -> Turn:
        """One turn of at most `limit` tokens."""

    def close(self) -> None:
        """Ends the connections."""


class ServedEngine:
    """Samples with a server.

    Args:
        policy: says which base, and how its turns end; its weights stay unread.
        server: its routes.
        slots: requests that are open at once, at most; the others wait in order.
    """

    def __init__(self, policy: Policy, server: Server, slots: int) -> None:
        self._policy = policy
        self._server = server
        self._greeting = threading.Lock()
        self._window: int | None = None
        self._slots = slots
        self._waiting: SimpleQueue[tuple[Future[Completion], GenerateRequest] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._submitting = threading.Lock()
        self._closed = False

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Asks for one completion. A prompt that fills the window ends at once as `length`, with nothing sampled.

        The future raises ServiceError (the server is away), ConfigError (what the server cannot do as it was started),
        ModelError (another base, an answer without ids or with NaN), CheckpointError or InfraError.
        """
        future: Future[Completion] = Future()
        with self._submitting:
            if self._closed:
                future.set_exception(closed())
                return future
            self._waiting.put((future, request))
            if len(self._threads) < self._slots:
                # A daemon, which no executor's thread is: a process that is to end does not wait for a server's answers.
                thread = threading.Thread(target=self._run, name="served", daemon=True)
                thread.start()
                self._threads.append(thread)
        return future

    def release(self, key: int | None = None) -> None:
        """Nothing is kept here; what the server keeps is its own affair."""

    def close(self) -> None:
        """Ends the threads; what is not finished fails."""
        with self._submitting:
            self._closed = True
        self._server.close()
        try:
            while (open_turn := self._waiting.get_nowait()) is not None:
                open_turn[0].set_exception(closed())
        except Empty:
            for _ in self._threads:
                self._waiting.put(None)

    def _run(self) -> None:
        while (turn := self._waiting.get()) is not None:
            future, request = turn
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._answer(request))
            except Exception as error:  # noqa: BLE001 - it goes to whoever waits for this turn, and the thread lives on
                future.set_exception(error)

    def _answer(self, request: GenerateRequest) -> Completion:
        if not request.prompt_ids:
            raise ModelError("A prompt needs at least one id.")
        self._policy.check(request.policy)
        try:
            limit = min(request.max_new_tokens, self._greeted() - len(request.prompt_ids))
            if limit < 1:
                return Completion((), (), "length", 0.0)
            started = time.perf_counter()
            turn = self._server.sample(request, limit)
        except ServiceError:
            self._window = None
            raise
        return _completion(turn, limit, time.perf_counter() - started)

    def _greeted(self) -> int:
        with self._greeting:
            if self._window is None:
                self._window = min(self._server.greet(), self._policy.max_context)
            return self._window


def _completion(turn: Turn, limit: int, seconds: float) -> Completion:
    if len(turn.token_ids) != len(turn.logprobs) or not 0 < len(turn.token_ids) <= limit:
        found = f"{len(turn.token_ids)} ids and {len(turn.logprobs)} logprobs"
        raise ModelError(f"The engine's server was asked for up to {limit} tokens and answered {found}.")
    logprobs = [math.nan if logprob is None else float(logprob) for logprob in turn.logprobs]
    if not all(map(math.isfinite, logprobs)):
        raise not_a_number()
    return Completion(tuple(turn.token_ids), tuple(logprobs), turn.finish_reason, seconds)


def token_ids(found: Any, url: str) -> list[int]:
    """The ids of an answer.

    Raises:
        ModelError: it has none.
    """
    if not isinstance(found, list) or not all(isinstance(token, int) for token in found):
        raise ModelError(
            f"The server at {url} is an engine without token ids: its answers have only text.",
            "Use one that returns them (vLLM's return_token_ids), or --engine rolling.",
        )
    return found


def seed(request: GenerateRequest) -> int:
    """63 bits that follow from key and position, for a server whose draws are its own."""
    return (request.key + request.position * 0x9E3779B97F4A7C15) % 2**63
