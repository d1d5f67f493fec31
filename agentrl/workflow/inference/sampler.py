"""agentrl's own engine: the model of a `Policy`, run in one thread over a rolling batch (`inference.decoding_batch`).

Waiting turns join between two tokens, and ended turns leave at once. All turns in the batch use the same weights. If the first
request in the queue needs other weights, no further turn joins until the batch is empty. Then all requests for the new weights
join.
"""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from logging import getLogger

import torch

from agentrl.workflow.engines import Completion, GenerateRequest, closed_error, fail_futures
from agentrl.workflow.errors import AgentRLError, InfraError, ModelError
from agentrl.workflow.inference.decoding_batch import ActiveTurn, Batch
from agentrl.workflow.inference.model_rows import open_rows
from agentrl.workflow.models.device_errors import as_device_lost, classify
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings

log = getLogger("agentrl.engine")

IDLE_SECONDS = 2.0
"""The time without work, in seconds, after which the KV cache is freed."""

CALM_STEPS = 2000
"""The number of decoding steps after which the limit of live turns is doubled, if memory suffices and turns wait for a slot."""

SHARE = 8
"""The divisor for the number of free slots at which turns join: 1/8 of the slots must be free, if more turns wait than fit.

Reading a prompt delays each live turn by about the time of one token. An empty slot costs only its own time.
"""


def start(policy: Policy, settings: Settings) -> "RollingEngine":
    """Start the engine with the machine's settings."""
    return RollingEngine(policy, settings.slots)


class RollingEngine:
    """An engine that samples from the published weights of a `Policy`.

    Args:
        policy: the policy. Its lock is held only during each call of the model, so a trainer can run between two calls.
        slots: the most turns that are live at once. Further turns wait, in the order of their arrival.

    Raises:
        ModelError: the model cannot be sampled here (`model_rows.open_rows`).
    """

    def __init__(self, policy: Policy, slots: int = 128) -> None:
        self._policy = policy
        self._slots = _SlotLimit(slots)
        self._vocabulary = policy.vocabulary
        self._batch = Batch(policy, open_rows(policy), slots)
        self._weights = ("", "")
        self._waiting: deque[ActiveTurn] = deque()
        self._joining: list[ActiveTurn] = []
        self._released: list[int | None] = []
        self._closed = False
        self._end: AgentRLError = closed_error()
        """What turns fail with once the engine is closed."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Submit a request. If the prompt fills the context, the turn ends at once as `length`, without sampled tokens.

        The future raises ModelError (ids outside of the vocabulary, NaN from the model, stop strings with a tokenizer that does
        not give the bytes of its tokens), GrammarError (a grammar that cannot be followed), CheckpointError (weights that
        cannot be published), InfraError (the model call failed, or the sampler was closed) or DeviceLost (every later call on
        this device fails).
        """
        room = self._policy.max_context - len(request.prompt_ids)
        turn = ActiveTurn(request, Future(), limit=min(request.max_new_tokens, room))
        if not request.prompt_ids or not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocabulary:
            turn.future.set_exception(ModelError(f"A prompt needs ids between 0 and {self._vocabulary - 1}, and at least one."))
        elif turn.limit < 1:
            turn.future.set_result(Completion((), (), "length", 0.0))
        else:
            try:
                if request.stop:
                    self._policy.chat.stops(request.stop)
                if request.grammar:
                    turn.matcher = self._policy.chat.grammars.matcher(request.grammar)
            except (ModelError, InfraError) as error:
                turn.future.set_exception(error)
            else:
                self._enqueue(turn)
        return turn.future

    def counts(self) -> dict[str, int]:
        """Return the number of `live` turns, the number of `waiting` turns, and the `limit` of live turns."""
        return {"live": len(self._batch.turns), "waiting": len(self._waiting), "limit": self._slots.limit}

    def release(self, session: int | None = None) -> None:
        """Free the memory that is cached for the next turn of a session.

        With None, free the memory of all sessions before this method returns. Do not call this method while you hold the
        policy's lock.
        """
        with self._changed:
            self._released.append(session)
            if session is None:
                self._changed.notify_all()
                self._changed.wait_for(lambda: None not in self._released or self._closed)

    def close(self) -> None:
        """Stop the thread. Waiting and live turns fail with InfraError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _enqueue(self, turn: ActiveTurn) -> None:
        with self._changed:
            if self._closed:
                turn.future.set_exception(self._end)
                return
            self._waiting.append(turn)
            self._changed.notify_all()

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while self._wait():
                self._release()
                self._joining = self._take()
                self._admit(self._joining)
                if self._batch.turns:
                    self._advance()
        except Exception as error:
            lost = as_device_lost(error)
            if lost is None:
                raise
            self._end = lost
        finally:  # whatever ends the thread, no request waits for ever
            with self._changed:
                self._closed = True
                self._changed.notify_all()
                _fail([*self._batch.turns, *self._joining, *self._waiting], self._end)

    def _wait(self) -> bool:
        """Wait until there is work or the engine is closed. Return True if there is work."""

        def ready() -> bool:
            return self._closed or None in self._released or bool(self._waiting or self._batch.turns)

        with self._changed:
            if not self._changed.wait_for(ready, timeout=IDLE_SECONDS):
                self._batch.clear()
                self._changed.wait_for(ready)
            return not self._closed

    def _release(self) -> None:
        with self._changed:
            released = list(self._released)
        for session in released:
            self._batch.forget(session)
        if None in released and not self._batch.turns:
            self._batch.clear()
        with self._changed:
            del self._released[: len(released)]
            self._changed.notify_all()

    def _take(self) -> list[ActiveTurn]:
        """Remove the turns that join now from the queue, and return them: the first turns of the queue that need the current
        weights.

        If the batch is empty, the weights of the queue's first turn become current, and all turns that need them move to the
        head of the queue. So two runs alternate by batches, not by turns.
        """
        turns: list[ActiveTurn] = []
        with self._changed:
            if not self._batch.turns and self._waiting:
                self._weights = self._waiting[0].request.policy.weights
                self._waiting = deque(sorted(self._waiting, key=lambda turn: turn.request.policy.weights != self._weights))
            limit = self._slots.limit
            room = limit - len(self._batch.turns)
            if room < min(len(self._waiting), limit // SHARE):
                return []
            while self._waiting and len(turns) < room:
                if self._waiting[0].request.policy.weights != self._weights:
                    break
                turn = self._waiting.popleft()
                if turn.future.running() or turn.future.set_running_or_notify_cancel():
                    turns.append(turn)
        return turns

    def _admit(self, turns: Sequence[ActiveTurn]) -> None:
        if not turns:
            return
        try:
            if self._policy.publish(turns[0].request.policy):
                self._batch.forget()  # keys and values of other weights
        except Exception as error:  # noqa: BLE001 - it goes to whoever waits for these turns, and the others go on
            self._handle(error, turns)
        else:
            self._join(turns)

    def _join(self, turns: Sequence[ActiveTurn]) -> None:
        """Add turns to the batch. If that fails, add each half separately, so only a faulty turn fails."""
        try:
            self._batch.join(turns)
        except Exception as error:  # noqa: BLE001 - it goes to whoever waits for these turns, and the others go on
            if len(turns) > 1 and classify(error) == "other":
                half = len(turns) // 2
                self._join(turns[:half])
                self._join(turns[half:])
            else:
                self._handle(error, turns)

    def _advance(self) -> None:
        """Sample one token for every live turn."""
        try:
            self._batch.step()
        except Exception as error:  # noqa: BLE001 - it goes to whoever waits for these turns, and the thread lives on
            self._handle(error, [])
        else:
            if self._waiting and self._slots.note_calm_step():
                log.info("memory has been sufficient for a while: sampling %d turns at once", self._slots.limit)

    def _handle(self, error: Exception, joining: Sequence[ActiveTurn]) -> None:
        """Handle an error of the turns that were joining, or, if `joining` is empty, of the live turns.

        The thread continues.

        Raises:
            Exception: the error itself, if the device is lost; it ends the thread.
        """
        match classify(error):
            case "out_of_memory":
                self._retreat(joining, error)
            case "device_lost":
                raise error
            case "other":
                _fail(joining or self._batch.evict(), error)

    def _retreat(self, joining: Sequence[ActiveTurn], error: Exception) -> None:
        """Reduce the memory use after memory ran out.

        If values are cached for later turns, cache fewer of them. Otherwise sample half as many turns at once for a while.
        Evicted turns return to the head of the queue and continue from their tokens.
        """
        turns = list(joining)
        if self._batch.has_kept:
            turns = [*self._batch.keep_less(stepping=not joining), *turns]
        else:
            turns = [*self._batch.evict(), *turns]
            if len(turns) == 1:
                _fail(turns, error)
                return
            self._slots.halve(len(turns))
            log.warning("not enough memory for %d turns at once: sampling %d", len(turns), self._slots.limit)
        with self._changed:
            self._waiting.extendleft(reversed(turns))


class _SlotLimit:
    """The limit of the turns that are sampled at once.

    It is halved if memory runs out. It is doubled, up to `slots`, after some time with enough memory. Another process may take
    memory only for a moment, but a limit that is too large fails each time. So if memory runs out soon after the limit was
    raised, the next rise waits twice as long.
    """

    def __init__(self, slots: int) -> None:
        self.limit = slots
        self._slots = slots
        self._patience = CALM_STEPS
        self._calm_steps = 0
        self._has_grown = False

    def halve(self, turns: int) -> None:
        """Lower the limit to half of `turns`, the number of turns for which memory did not suffice."""
        failed_again = self._has_grown and self._calm_steps < self._patience
        self._patience = 2 * self._patience if failed_again else CALM_STEPS
        self.limit = max(1, turns // 2)
        self._calm_steps, self._has_grown = 0, False

    def note_calm_step(self) -> bool:
        """Count a decoding step with enough memory, in which turns waited for a slot. Return True if the limit was raised."""
        self._calm_steps += 1
        if self.limit == self._slots or self._calm_steps < self._patience:
            return False
        self.limit = min(2 * self.limit, self._slots)
        self._calm_steps, self._has_grown = 0, True
        return True


def _fail(turns: Sequence[ActiveTurn], error: Exception) -> None:
    fail_futures((turn.future for turn in turns), error)
