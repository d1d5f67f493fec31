"""The common part of engines that sample with an HTTP server.

Each turn is one request, for which a thread waits; the server batches them. It is greeted before the first turn, and again
after it was away, since its window may have changed. A server that does not answer costs no attempt (ServiceError: the job is
handed back and tried later); one that answers a different question ends the run.

Nothing here reads the base's weights.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from agentrl.workflow.engines import Completion, GenerateRequest, Likeliest, closed_error
from agentrl.workflow.errors import InfraError, ModelError, ServiceError
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.trajectory import FinishReason

ROUNDING = 1e-3
"""A logprob may be this much above 0."""

LEAST = -3.4e38
"""The least finite float32, rounded: logprobs are recorded as float32."""


@dataclass(frozen=True, slots=True)
class ServerTurn:
    """A turn that a server sampled."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    top: Sequence[Likeliest] = ()


class EngineServer(Protocol):
    """The routes of one kind of server."""

    def greet(self) -> int:
        """Check that the server serves this base.

        Returns:
            The window: tokens of prompt and answer together.
        """

    def sample(self, request: GenerateRequest, limit: int) -> ServerTurn:
        """Sample one turn of at most `limit` tokens."""

    def close(self) -> None:
        """Close the connections."""


class ServedEngine:
    """An engine that samples with a server.

    Args:
        policy: names the base and the end of its turns; its weights are not read.
        server: the server's routes.
        slots: the most requests open at once; the others wait in order.
    """

    def __init__(self, policy: Policy, server: EngineServer, slots: int) -> None:
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
        """Submit a request. A prompt that fills the window ends at once as `length`, with nothing sampled.

        The future raises ServiceError (the server is away), ConfigError (the server was started without a needed option),
        ModelError (another base or vocabulary, an answer without ids or with NaN), CheckpointError or InfraError (the server
        failed, or its answer cannot be read or trusted).
        """
        future: Future[Completion] = Future()
        with self._submitting:
            if self._closed:
                future.set_exception(closed_error())
                return future
            self._waiting.put((future, request))
            if len(self._threads) < self._slots:
                # A daemon thread, unlike an executor's: a process that ends does not wait for the server's answers.
                thread = threading.Thread(target=self._run, name="served", daemon=True)
                thread.start()
                self._threads.append(thread)
        return future

    def window(self) -> int:
        """Return the tokens of prompt and answer together, as the server said when it was greeted last; it is greeted if it was
        not.

        Raises:
            ServiceError, ModelError, InfraError: as a turn does, see `submit`.
        """
        return self._ensure_greeted()

    def release(self, session: int | None = None) -> None:
        """Do nothing: nothing is kept here, and the server manages its own cache."""

    def close(self) -> None:
        """End the threads; unfinished requests fail."""
        with self._submitting:
            self._closed = True
        self._server.close()
        try:
            while (open_turn := self._waiting.get_nowait()) is not None:
                open_turn[0].set_exception(closed_error())
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
            limit = min(request.max_new_tokens, self._ensure_greeted() - len(request.prompt_ids))
            if limit < 1:
                return Completion((), (), "length", 0.0)
            started = time.perf_counter()
            turn = self._server.sample(request, limit)
        except ServiceError:
            self._window = None
            raise
        return _completion(turn, request, limit, time.perf_counter() - started)

    def _ensure_greeted(self) -> int:
        with self._greeting:
            if self._window is None:
                self._window = min(self._server.greet(), self._policy.max_context)
            return self._window


def _completion(turn: ServerTurn, request: GenerateRequest, limit: int, seconds: float) -> Completion:
    if len(turn.token_ids) != len(turn.logprobs) or not 0 < len(turn.token_ids) <= limit:
        counts = f"{len(turn.token_ids)} ids and {len(turn.logprobs)} logprobs"
        raise ModelError(f"The engine's server was asked for up to {limit} tokens and answered {counts}.")
    if len(turn.top) != (len(turn.token_ids) if request.top_logprobs else 0):
        raise ModelError(f"The engine's server told the likeliest tokens of {len(turn.top)} places of {len(turn.token_ids)}.")
    return Completion(tuple(turn.token_ids), tuple(turn.logprobs), turn.finish_reason, seconds, tuple(turn.top))


def token_ids(ids: list[int] | None, vocabulary: int, url: str) -> list[int]:
    """Check that an answer has ids, each below `vocabulary`, and return them.

    Raises:
        ModelError: the answer has no ids, or some outside of the vocabulary.
    """
    if ids is None:
        raise ModelError(
            f"The server at {url} does not return token ids.",
            "Use one that returns them (vLLM's return_token_ids), or --engine rolling.",
        )
    strange = next((token for token in ids if not 0 <= token < vocabulary), None)
    if strange is not None:
        raise ModelError(f"The server at {url} sampled the token {strange!s:.40}, and the model has those below {vocabulary}.")
    return ids


def logprobs(values: Sequence[float | None] | None, url: str) -> list[float]:
    """Check an answer's logprobs and return them.

    Raises:
        ModelError: there are none, or one is NaN or no finite float32.
        InfraError: one is above 0 by more than rounding.
    """
    if values is None:
        message = f"The server at {url} returns no logprobs, which training needs."
        raise ModelError(message, "Use vLLM, or --engine rolling.")
    believed = [logprob for logprob in values if logprob is not None and LEAST <= logprob <= ROUNDING]
    if len(believed) == len(values):
        return believed
    above = next((logprob for logprob in values if logprob is not None and logprob > ROUNDING), None)
    if above is not None:
        raise InfraError(f"The server at {url} gave a token the logprob {above:g}, which is above 0.")
    raise ModelError(f"The model of the server at {url} returned NaN instead of logits: a token's logprob is no number.")


def likeliest(candidates: Mapping[int, float | None], count: int, vocabulary: int, url: str) -> Likeliest:
    """Check the tokens that a response lists for one position, id -> logprob, and return the likeliest.

    Raises:
        ModelError: an id is outside of the vocabulary, or a logprob no number.
        InfraError: a logprob is above 0 by more than rounding.
    """
    pairs = zip(token_ids(list(candidates), vocabulary, url), logprobs(list(candidates.values()), url), strict=True)
    return tuple(sorted(pairs, key=lambda one: (-one[1], one[0]))[:count])


def seed(request: GenerateRequest) -> int:
    """Return a 63-bit seed from key and position, for a server that draws by itself."""
    return (request.key + request.position * 0x9E3779B97F4A7C15) % 2**63
