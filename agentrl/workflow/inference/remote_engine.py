"""The common part of engines that sample with an HTTP server.

Each turn is one request, and one thread waits for the response; the server batches the requests. Before its first turn on a
server, the engine checks the server and asks for its context window (`greet`). The engine repeats this check after the server
was unavailable, because the window may have changed. A wrong response ends the run.

With several servers, the turns of a session go to one server, whose prefix cache has the earlier turns. A new session goes to
the server with the fewest open turns. If a server does not respond, its open turns are sampled again on the other servers, and
its sessions move there. After `RETRY_SECONDS`, one turn tries the server again. If no server responds, the rollout job stops
and is tried again later. This does not count as a failed attempt.

This module does not read the base's weights.
"""

import threading
import time
from collections import OrderedDict
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
"""The largest logprob above 0 that counts as rounding."""

LEAST = -3.4e38
"""The lowest finite float32, rounded. Logprobs are recorded as float32."""


RETRY_SECONDS = 10.0
"""The time until a server that did not respond is tried again, in seconds, while another server responds."""

MAX_SESSIONS = 4096
"""The most sessions whose server is remembered. A forgotten session goes to the server with the fewest open turns."""


@dataclass(frozen=True, slots=True)
class ServerTurn:
    """A turn that a server has sampled."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    top: Sequence[Likeliest] = ()


class EngineServer(Protocol):
    """A client for the routes of one kind of server."""

    def greet(self) -> int:
        """Check that the server serves this base.

        Return the context window: the most tokens of prompt and response together.
        """

    def sample(self, request: GenerateRequest, limit: int) -> ServerTurn:
        """Sample one turn of at most `limit` tokens."""

    def close(self) -> None:
        """Close the connections."""


class _Seat:
    """A server, and the state that the engine keeps of it.

    `window` is None until the server was greeted, and after it did not respond. `retry_at` is the moment on the monotonic clock
    before which no turn goes to a server that did not respond; 0 while it responds.
    """

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.greeting = threading.Lock()
        self.window: int | None = None
        self.open_turns = 0
        self.retry_at = 0.0


class ServedEngine:
    """An engine that samples with one or several servers.

    Args:
        policy: the policy that names the base and the end tokens; its weights are not read.
        servers: the clients for the servers; at least one.
        slots: the most open requests, of all servers together. Further requests wait, in the order of their arrival.
    """

    def __init__(self, policy: Policy, servers: Sequence[EngineServer], slots: int) -> None:
        self._policy = policy
        self._seats = [_Seat(server) for server in servers]
        self._seating = threading.Lock()
        self._sessions: OrderedDict[int, _Seat] = OrderedDict()
        self._slots = slots
        self._waiting: SimpleQueue[tuple[Future[Completion], GenerateRequest] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._submitting = threading.Lock()
        self._closed = False

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Submit a request. If the prompt fills the window, the turn ends at once as `length`, without sampled tokens.

        The future raises ServiceError (the server is unavailable), ConfigError (the server was started without a needed
        option), ModelError (another base or vocabulary, a response without ids or with NaN), CheckpointError (the weights
        cannot be read) or InfraError (the server failed, or its response is invalid).
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
        """Return the most tokens of prompt and response together on every server that responds. Check servers that have not
        been checked.

        Raises:
            ServiceError: no server responds.
            ModelError, InfraError: see `submit`.
        """
        windows, refusal = list[int](), None
        for seat in sorted(self._seats, key=lambda one: one.retry_at):
            if windows and seat.retry_at > time.monotonic():
                break
            try:
                windows.append(self._greeted_window(seat))
            except ServiceError as error:
                refusal, seat.retry_at = error, time.monotonic() + RETRY_SECONDS
        if not windows and refusal:
            raise refusal
        return min(windows)

    def release(self, session: int | None = None) -> None:
        """Forget the server of a session; without `session`, of all sessions. The servers manage their own caches."""
        with self._seating:
            if session is None:
                self._sessions.clear()
            else:
                self._sessions.pop(session, None)

    def close(self) -> None:
        """Stop the threads. Unfinished requests fail."""
        with self._submitting:
            self._closed = True
        for seat in self._seats:
            seat.server.close()
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
        failed: list[_Seat] = []
        while True:
            seat = self._take_seat(request.session, failed)
            try:
                return self._sample(seat.server, request, self._greeted_window(seat))
            except ServiceError:
                failed.append(seat)
                if len(failed) == len(self._seats):
                    raise
            finally:
                self._leave_seat(seat, is_down=seat in failed)

    def _sample(self, server: EngineServer, request: GenerateRequest, window: int) -> Completion:
        limit = min(request.max_new_tokens, window - len(request.prompt_ids))
        if limit < 1:
            return Completion((), (), "length", 0.0)
        started = time.perf_counter()
        turn = server.sample(request, limit)
        return _completion(turn, request, limit, time.perf_counter() - started)

    def _take_seat(self, session: int | None, failed: Sequence[_Seat]) -> _Seat:
        """Choose the server of a turn and count the turn there.

        A server that did not respond is chosen if its time of retry has come and the session has no other server. It is also
        chosen if all others failed for this turn.
        """
        with self._seating:
            now = time.monotonic()
            seats = [seat for seat in self._seats if seat not in failed]
            ready = [seat for seat in seats if seat.retry_at <= now]
            seat = min(ready, key=lambda one: one.open_turns) if ready else min(seats, key=lambda one: one.retry_at)
            if session is not None:
                own = self._sessions.get(session)
                seat = own if own in ready else seat
                self._sessions[session] = seat
                self._sessions.move_to_end(session)
                if len(self._sessions) > MAX_SESSIONS:
                    self._sessions.popitem(last=False)
            if seat.retry_at:  # it did not respond: this turn tries it, the others wait for the result elsewhere
                seat.retry_at = now + RETRY_SECONDS
            seat.open_turns += 1
            return seat

    def _leave_seat(self, seat: _Seat, is_down: bool) -> None:
        with self._seating:
            seat.open_turns -= 1
            if is_down:
                seat.window, seat.retry_at = None, time.monotonic() + RETRY_SECONDS
            elif seat.window is not None:
                seat.retry_at = 0.0

    def _greeted_window(self, seat: _Seat) -> int:
        with seat.greeting:
            window = seat.window
            if window is None:
                window = seat.window = min(seat.server.greet(), self._policy.max_context)
            return window


def _completion(turn: ServerTurn, request: GenerateRequest, limit: int, seconds: float) -> Completion:
    if len(turn.token_ids) != len(turn.logprobs) or not 0 < len(turn.token_ids) <= limit:
        counts = f"{len(turn.token_ids)} ids and {len(turn.logprobs)} logprobs"
        raise ModelError(f"The engine's server returned {counts} for a request of at most {limit} tokens.")
    if len(turn.top) != (len(turn.token_ids) if request.top_logprobs else 0):
        raise ModelError(
            f"The engine's server returned the likeliest tokens for {len(turn.top)} of {len(turn.token_ids)} tokens."
        )
    return Completion(tuple(turn.token_ids), tuple(turn.logprobs), turn.finish_reason, seconds, tuple(turn.top))


def token_ids(ids: list[int] | None, vocabulary: int, url: str) -> list[int]:
    """Check the ids of a response, and return them. There must be ids, and each must be below `vocabulary`.

    Raises:
        ModelError: the response has no ids, or one is outside of the vocabulary.
    """
    if ids is None:
        raise ModelError(
            f"The server at {url} does not return token ids.",
            "Use one that returns them (vLLM's return_token_ids), or --engine rolling. To record only its texts with"
            " `agentrl serve`: --engine openai_text.",
        )
    strange = next((token for token in ids if not 0 <= token < vocabulary), None)
    if strange is not None:
        raise ModelError(
            f"The server at {url} sampled the token {strange!s:.40}, but the model has the tokens 0 to {vocabulary - 1}."
        )
    return ids


def logprobs(values: Sequence[float | None] | None, url: str) -> list[float]:
    """Check the logprobs of a response, and return them.

    Raises:
        ModelError: there are no logprobs, or one is NaN or not a finite float32.
        InfraError: a logprob is above 0 by more than rounding.
    """
    if values is None:
        message = f"The server at {url} returns no logprobs, which training needs."
        raise ModelError(message, "Use a server that returns them, such as vLLM, or --engine rolling.")
    believed = [logprob for logprob in values if logprob is not None and LEAST <= logprob <= ROUNDING]
    if len(believed) == len(values):
        return believed
    above = next((logprob for logprob in values if logprob is not None and logprob > ROUNDING), None)
    if above is not None:
        raise InfraError(f"The server at {url} gave a token the logprob {above:g}, which is above 0.")
    raise ModelError(
        f"The server at {url} gave a token a logprob that is not finite: the server's model probably returned NaN."
    )


def likeliest(candidates: Mapping[int, float | None], count: int, vocabulary: int, url: str) -> Likeliest:
    """Check the logprobs that a response lists for one position, by token id. Return the likeliest tokens.

    Raises:
        ModelError: an id is outside of the vocabulary, or a logprob is not a number.
        InfraError: a logprob is above 0 by more than rounding.
    """
    pairs = zip(token_ids(list(candidates), vocabulary, url), logprobs(list(candidates.values()), url), strict=True)
    return tuple(sorted(pairs, key=lambda one: (-one[1], one[0]))[:count])


def seed(request: GenerateRequest) -> int:
    """Return a 63-bit seed, derived from the request's key and position. It is for servers that make their own random draws."""
    return (request.key + request.position * 0x9E3779B97F4A7C15) % 2**63
