"""The sampler: prompts in, token ids with behavior logprobs out, many episodes at once in one rolling batch.

A request names its weights, its key and its position, and nothing else decides what is sampled: one uniform number per
token comes from (key, position), and picks a token by the inverse of the cumulative distribution in vocabulary order. So an
episode's tokens do not depend on who else is in the batch, in which order, or on the attempt that samples them (up to the
rounding of the model's own sums; `numerics: exact` leaves none that matter).

`TransformersEngine` runs the model of a `Policy` in one thread. Waiting requests join between two tokens, siblings with the
same prompt share its prefill, ended rows leave at once. Rows of different weights never share a batch: when the request at
the head of the queue wants others, the batch drains first, and then all that want those go together.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from workflow.errors import AgentRLError, InfraError, ModelError
from workflow.policy import Policy
from workflow.sampling import sample, uniforms
from workflow.slots import Slots, out_of_memory
from workflow.trajectory import FinishReason, PolicyRef

PREFILL_TOKENS = 8192
"""Padded prompt tokens in one call of the model, so that its activations stay small beside the weights."""

IDLE_SECONDS = 0.2
"""Without work for this long, key/value memory is given back: longer than a short tool call, sooner than a train job."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn to sample.

    Args:
        prompt_ids: the whole training row so far, exact ids; at least one.
        policy: which weights.
        key: 64 bits (`SamplingKey.bits`).
        position: tokens of the episode that were sampled before this turn.
        max_new_tokens: at most this many; the end token counts.
        temperature: logits are divided by it.
    """

    prompt_ids: tuple[int, ...]
    policy: PolicyRef
    key: int
    position: int
    max_new_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled.

    Args:
        token_ids: with the end token, where one was sampled.
        logprobs: one per token, natural log, of exactly the distribution it was drawn from; float32 values.
        finish_reason: `stop` at an end token, `length` at the limit or at the end of the model's context.
        seconds: from joining the batch to leaving it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    seconds: float


class Engine(Protocol):
    """Whatever samples. `keyed` says whether a request alone decides its tokens; `numerics: exact` refuses others."""

    keyed: bool

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Asks for one completion; errors come out of the future."""

    def close(self) -> None:
        """Ends the sampler; what is not finished fails."""


@dataclass(slots=True)
class _Row:
    """A live request: what it has sampled so far."""

    request: GenerateRequest
    future: Future[Completion]
    limit: int
    started: float = 0.0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Tokens whose keys and values stand in the slot: all but the newest, which the next step reads."""
        return len(self.request.prompt_ids) + len(self.ids) - 1

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids, *self.ids)

    @property
    def newest(self) -> int:
        return self.ids[-1] if self.ids else self.request.prompt_ids[-1]

    def finish(self, reason: FinishReason) -> None:
        seconds = time.perf_counter() - self.started
        self.future.set_result(Completion(tuple(self.ids), tuple(self.logprobs), reason, seconds))


class TransformersEngine:
    """Samples from a `Policy`'s published weights.

    Args:
        policy: its lock is held during each call of the model, and only then, so that a trainer can take turns.
        slots: rows that are live at once, at most; the others wait in order.

    Raises:
        ModelError: a model whose layers do not all attend to the whole context.
    """

    keyed = True

    def __init__(self, policy: Policy, slots: int = 128) -> None:
        self._policy = policy
        self._limit = slots
        with policy.sampling() as model:
            config = cast(PreTrainedConfig, model.config)
        layers = DynamicCache(config=config)
        if any(layers.is_sliding) or any(layers.is_linear):
            raise ModelError(f"The sampler cannot run {config.model_type!r}: its layers do not all use full attention.")
        self._vocabulary = int(config.vocab_size)
        self._slots = Slots(len(layers.layers))
        self._rows: list[_Row] = []
        self._weights = ("", "")
        self._waiting: deque[_Row] = deque()
        self._joining: list[_Row] = []
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def submit(self, request: GenerateRequest) -> Future[Completion]:
        """Asks for one completion. A prompt that fills the context ends at once as `length`, with nothing sampled.

        The future raises ModelError (ids outside the vocabulary, NaN from the model), CheckpointError (weights that
        cannot be published) or InfraError (the model call failed, the sampler was closed).
        """
        room = self._policy.max_context - len(request.prompt_ids)
        row = _Row(request, Future(), limit=min(request.max_new_tokens, room))
        if not request.prompt_ids or not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocabulary:
            row.future.set_exception(ModelError(f"A prompt needs ids between 0 and {self._vocabulary - 1}, and at least one."))
        elif row.limit < 1:
            row.future.set_result(Completion((), (), "length", 0.0))
        else:
            self._enqueue(row)
        return row.future

    def close(self) -> None:
        """Ends the thread; what is waiting or live fails with InfraError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _enqueue(self, row: _Row) -> None:
        with self._changed:
            if self._closed:
                row.future.set_exception(_closed())
                return
            self._waiting.append(row)
            self._changed.notify()

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while self._wait():
                self._joining = self._take()
                self._admit(self._joining)
                if self._rows:
                    self._advance()
        finally:  # whatever ends the thread, nobody waits for it any longer
            with self._changed:
                self._closed = True
                _fail([*self._rows, *self._joining, *self._waiting], _closed())

    def _wait(self) -> bool:
        """Until there is something to do (True) or the engine is closed (False)."""

        def ready() -> bool:
            return self._closed or bool(self._waiting or self._rows)

        with self._changed:
            if not self._changed.wait_for(ready, timeout=IDLE_SECONDS):
                self._slots.clear()
                self._changed.wait_for(ready)
            return not self._closed

    def _take(self) -> list[_Row]:
        """The waiting rows that may join now: from the head on, as long as they want the weights that are sampled from.

        A new batch takes whoever wants the weights of the first in line: two runs take turns, and not with each row.
        """
        taken: list[_Row] = []
        with self._changed:
            if not self._rows and self._waiting:
                self._weights = _weights(self._waiting[0].request.policy)
                self._waiting = deque(sorted(self._waiting, key=lambda row: _weights(row.request.policy) != self._weights))
            while self._waiting and len(self._rows) + len(taken) < self._limit:
                if _weights(self._waiting[0].request.policy) != self._weights:
                    break
                row = self._waiting.popleft()
                if row.future.running() or row.future.set_running_or_notify_cancel():
                    taken.append(row)
        return taken

    def _admit(self, taken: Sequence[_Row]) -> None:
        if not taken:
            return
        started = time.perf_counter()
        try:
            self._policy.publish(taken[0].request.policy)
            joined = self._prefill(taken)
        except Exception as error:  # noqa: BLE001 - it goes to whoever waits for these rows, and the others go on
            if out_of_memory(error):
                self._retreat(taken, error)
            else:
                _fail(taken, error)
            return
        for row in joined:
            row.started = row.started or started
        self._rows += joined

    def _prefill(self, taken: Sequence[_Row]) -> list[_Row]:
        """Gives each row a slot that holds its prompt; each distinct prompt is computed once. The rows in slot order."""
        holders = {row.request.prompt_ids: slot for slot, row in enumerate(self._rows)}
        fresh: dict[tuple[int, ...], _Row] = {}
        copies: list[_Row] = []
        for row in taken:
            if row.context in holders or row.context in fresh:
                copies.append(row)
            else:
                fresh[row.context] = row
        firsts = sorted(fresh.values(), key=lambda row: row.cached)
        first = len(self._rows)
        for batch in _chunks(firsts):
            self._read_prompts(batch, first)
            holders |= {row.context: first + index for index, row in enumerate(batch)}
            first += len(batch)
        for slot, row in enumerate(copies, start=first):
            if row.cached:
                self._slots.copy(holders[row.context], slot, row.cached)
        return [*firsts, *copies]

    def _read_prompts(self, rows: Sequence[_Row], first: int) -> None:
        """All prompt tokens but the last, which the next step reads: so prefill and decoding share one way to sample."""
        width = max(row.cached for row in rows)
        if width == 0:
            return
        padded = [[*row.context[:-1], *(0,) * (width - row.cached)] for row in rows]
        self._slots.prefill(first, len(rows), width)
        self._call(torch.tensor(padded), torch.arange(width).expand(len(rows), -1), None)

    def _advance(self) -> None:
        """One token for every live row."""
        try:
            ids, logprobs = self._draw()
        except Exception as error:  # noqa: BLE001 - it goes to whoever waits for these rows, and the thread lives on
            if out_of_memory(error):
                self._retreat([], error)
            else:
                _fail(self._evicted(), error)
            return
        ended = []
        for slot, (row, token, logprob) in enumerate(zip(self._rows, ids, logprobs, strict=True)):
            if math.isnan(logprob):
                row.future.set_exception(ModelError("The model returned NaN instead of logits."))
                ended.append(slot)
                continue
            row.ids.append(int(token))
            row.logprobs.append(logprob)
            if row.ids[-1] in self._policy.chat.end_ids or len(row.ids) >= row.limit:
                row.finish("stop" if row.ids[-1] in self._policy.chat.end_ids else "length")
                ended.append(slot)
        for slot in reversed(ended):
            self._free(slot)

    def _evicted(self) -> list[_Row]:
        rows, self._rows = self._rows, []
        self._slots.clear()
        return rows

    def _retreat(self, joining: Sequence[_Row], error: Exception) -> None:
        """Memory ran out: half as many rows at once from now on. All go back to the head of the queue and go on from there."""
        rows = [*self._evicted(), *joining]
        self._limit = max(1, len(rows) // 2)
        if len(rows) == 1:
            _fail(rows, error)
            return
        with self._changed:
            self._waiting.extendleft(reversed(rows))

    def _draw(self) -> tuple[list[float], list[float]]:
        rows = self._rows
        positions = torch.tensor([row.cached for row in rows])
        longest = max(row.cached for row in rows)
        device = self._policy.device
        at = positions.to(device)
        self._slots.decode(at, longest)
        mask = torch.arange(longest + 1, device=device) <= at[:, None]
        logits = self._call(torch.tensor([[row.newest] for row in rows]), positions[:, None], mask)
        draws = uniforms(
            np.array([row.request.key for row in rows], dtype=np.uint64),
            np.array([row.request.position + len(row.ids) for row in rows], dtype=np.uint64),
        )
        temperatures = torch.tensor([row.request.temperature for row in rows], dtype=torch.float64, device=device)
        ids, logprobs = sample(logits, torch.from_numpy(draws).to(device), temperatures)
        # One tensor, so that a GPU is waited for once; ids are exact in float64.
        drawn, their_logprobs = torch.stack([ids.double(), logprobs.double()]).tolist()
        return drawn, their_logprobs

    def _call(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Logits (B, V) after the last of (B, T) ids. Padding needs no mask in a prefill: nothing looks to its right."""
        device = self._policy.device
        with self._policy.sampling() as model:
            logits: Tensor = model(
                input_ids=ids.to(device),
                position_ids=positions.to(device),
                attention_mask=mask,
                past_key_values=self._slots,
                use_cache=True,
                logits_to_keep=1,
            ).logits
        return logits[:, -1]

    def _free(self, slot: int) -> None:
        last = self._rows.pop()
        if slot < len(self._rows):
            self._slots.copy(len(self._rows), slot, last.cached)
            self._rows[slot] = last


def _weights(ref: PolicyRef) -> tuple[str, str]:
    return ref.base_hash, ref.sha256


def _chunks(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Rows sorted by length, in runs of at most PREFILL_TOKENS padded tokens."""
    chunks: list[list[_Row]] = []
    for row in rows:
        if chunks and (len(chunks[-1]) + 1) * row.cached <= PREFILL_TOKENS:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return chunks


def _fail(rows: Sequence[_Row], error: Exception) -> None:
    if not isinstance(error, AgentRLError):
        cause = error
        error = InfraError(f"Sampling failed: {type(cause).__name__}: {cause}.")
        error.__cause__ = cause
    for row in rows:
        over = row.future.done() and not row.future.cancelled()
        if row.future.running() or (not over and row.future.set_running_or_notify_cancel()):
            row.future.set_exception(error)


def _closed() -> InfraError:
    return InfraError("The sampler was closed before this turn was sampled.")
