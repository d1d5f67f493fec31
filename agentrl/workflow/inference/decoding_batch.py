"""The rolling batch of live turns, which are the turns that are being sampled. Each decoding step samples one token for each
live turn.

When a turn joins, the model first reads its prompt. If several turns have the same prompt, the model reads the prompt once, and
the other turns copy its keys and values. If the keys and values of the episode's previous turn are still cached, only the new
tokens are read. State that changes with every token is in arrays with one entry per slot. So no Python code runs for each
single turn in each step, except for turns that end.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.workflow.chat.grammar import WHOLE_MASS, GrammarError, TurnMatcher
from agentrl.workflow.engines import Completion, GenerateRequest, Likeliest, nan_error
from agentrl.workflow.inference.model_rows import Kept, ModelRows
from agentrl.workflow.inference.sampling import (
    allowed_mass,
    draw,
    likeliest,
    lowest_logit,
    sample,
    scale_logits,
    uniforms,
)
from agentrl.workflow.inference.slot_rows import Tokens
from agentrl.workflow.models.device_errors import classify
from agentrl.workflow.models.memory import free_cached_blocks
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.trajectory import FinishReason

Number = TypeVar("Number", np.int64, np.float64)

FIRST_WIDTH = 64
"""The initial capacity for sampled tokens per turn; it is doubled when needed."""

_STATE = np.dtype(
    [
        ("key", "u8"),
        ("drawn", "u8"),  # position of the next draw
        ("cached", "i8"),  # tokens whose keys and values the slot holds
        ("newest", "i8"),  # the token after them, which the next step reads
        ("count", "i8"),  # tokens sampled
        ("limit", "i8"),  # the most tokens to sample
        ("watched", "?"),  # whether the turn has stop strings
        ("heard", "?"),  # whether a callback gets each token
        ("guided", "?"),  # whether a grammar limits the draws
        ("tops", "i8"),  # how many of the likeliest tokens are told
        ("temperature", "f8"),
        ("top_k", "i8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
    ]
)
"""The state of a slot that changes with every token, and the slot's sampling options."""


@dataclass(slots=True)
class ActiveTurn:
    """A request, with the tokens that were already sampled for it before it was last evicted.

    `matcher` is the state of the request's grammar after these tokens, and `guided` the indices of the tokens that the grammar
    chose.
    """

    request: GenerateRequest
    future: Future[Completion]
    limit: int
    started: float = 0.0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Likeliest] = field(default_factory=list)
    matcher: TurnMatcher | None = None
    guided: list[int] = field(default_factory=list)

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens that the model must read when the turn joins: the prompt and the tokens that were already sampled."""
        return (*self.request.prompt_ids, *self.ids)

    def finish(self, reason: FinishReason) -> None:
        """Set the result of the request."""
        seconds = time.perf_counter() - self.started
        values = (tuple(self.ids), tuple(self.logprobs), reason, seconds, tuple(self.top), tuple(self.guided))
        self.future.set_result(Completion(*values))


@dataclass(frozen=True, slots=True)
class _EndedTurn:
    """The cached values of an ended turn. The next turn of the same episode can continue from them."""

    ids: tuple[int, ...]
    cache: Kept


class Batch:
    """The live turns, in the order of the model's rows, and the cached values of ended turns.

    Args:
        policy: the policy whose published weights are used for sampling.
        rows: the policy's model, with the cached values of the live turns.
        slots: the most turns that are live at once.
    """

    def __init__(self, policy: Policy, rows: ModelRows, slots: int) -> None:
        self.turns: list[ActiveTurn] = []
        self._rows = rows
        self._policy = policy
        self._state: NDArray[np.void] = np.zeros(slots, _STATE)
        self._ids: NDArray[np.int64] = np.zeros((slots, FIRST_WIDTH), np.int64)
        self._logprobs: NDArray[np.float64] = np.zeros((slots, FIRST_WIDTH), np.float64)
        self._ends = np.array(sorted(policy.chat.end_ids), np.int64)
        self._left: OrderedDict[int, _EndedTurn] = OrderedDict()
        self._share = 1.0

    @property
    def has_kept(self) -> bool:
        """True if the batch caches values of ended turns for later turns."""
        return bool(self._left)

    def join(self, turns: Sequence[ActiveTurn]) -> None:
        """Add turns to the batch: read their prompts into the slots after the live turns.

        An exception leaves the live turns unchanged.
        """
        started = time.perf_counter()
        fresh, back, copies, holders = self._sort_joining(turns)
        first = len(self.turns)
        self._rows.reserve(first + len(turns))
        # All prompt tokens but the last, which the next step reads: so prefill and decoding sample in the same way.
        self._rows.read(first, [turn.context[:-1] for turn in fresh])
        holders |= {turn.context: first + index for index, turn in enumerate(fresh)}
        self._rows.resume(first + len(fresh), [(cache, turn.context[cache.length : -1]) for turn, cache in back])
        joined = [*fresh, *(turn for turn, _ in back)]
        for context, alike in copies.items():
            self._rows.copy(holders[context], first + len(joined), len(alike), len(context) - 1)
            joined += alike
        for slot, turn in enumerate(joined, start=first):
            turn.started = turn.started or started
            self._enter(slot, turn)
        self.turns += joined

    def step(self) -> None:
        """Sample one token for every live turn. Set the result of each turn that ends with this token."""
        rows = self._state[: len(self.turns)]
        ids, logprobs, tops = self._draw(rows)
        everyone, counts = np.arange(len(rows)), rows["count"]
        if counts.max() == self._ids.shape[1]:
            self._ids, self._logprobs = _widen(self._ids), _widen(self._logprobs)
        self._ids[everyone, counts] = rows["newest"] = ids
        self._logprobs[everyone, counts] = logprobs
        for name in ("drawn", "cached", "count"):
            rows[name] += 1
        for slot, top in tops.items():
            self.turns[slot].top.append(top)
        stops = np.isin(ids, self._ends)
        for watched in np.flatnonzero(rows["watched"] & ~stops):
            stops[watched] = self._is_stopped(int(watched))
        broken = np.isnan(logprobs)
        over = stops | (rows["count"] >= rows["limit"]) | broken
        for row in np.flatnonzero(rows["heard"] & ~broken):
            listener = self.turns[int(row)].request.heard
            over[row] |= listener is not None and not listener(int(ids[row]))
        if over.any():
            self._end(np.flatnonzero(over).tolist(), stops, broken)

    def evict(self) -> list[ActiveTurn]:
        """Remove all turns from the batch and return them with their sampled tokens. Free all memory."""
        turns = self.turns
        for slot, turn in enumerate(turns):
            self._write_back(slot, turn)
        self.turns = []
        self.clear()
        return turns

    def keep_less(self, stepping: bool) -> list[ActiveTurn]:
        """Free the cached values of ended turns, and halve the number of tokens that are cached from now on.

        Return the turns that were evicted, if any.

        Args:
            stepping: whether memory ran out in a decoding step. If the cache cannot go back to the state
                before a failed step, all turns are evicted.
        """
        self.forget()
        self._rows.reserve(len(self.turns))  # not for the turns that could not join
        self._share /= 2
        return self.evict() if stepping and not self._rows.rewinds else []

    def forget(self, session: int | None = None) -> None:
        """Free the keys and values that are cached for the next turn of a session; None: of all sessions."""
        if session is None:
            self._left.clear()
        else:
            self._left.pop(session, None)

    def clear(self) -> None:
        """Free all memory, and release it to other processes. No turn may be live."""
        self._left.clear()
        self._rows.clear()
        free_cached_blocks(self._policy.device)

    # joining

    def _sort_joining(
        self, turns: Sequence[ActiveTurn]
    ) -> tuple[list[ActiveTurn], list[tuple[ActiveTurn, Kept]], dict[Tokens, list[ActiveTurn]], dict[Tokens, int]]:
        """Sort turns by the way in which they join.

        Returns:
            A tuple of four: the turns to read, shortest first; the turns to resume, each with its cached values, fewest new
                tokens first;
            the turns whose context is that of another row, by context; and the row of each prompt that a live turn holds.
        """
        holders = {turn.request.prompt_ids: slot for slot, turn in enumerate(self.turns)} if self._rows.rewinds else {}
        fresh: dict[Tokens, ActiveTurn] = {}
        back: list[tuple[ActiveTurn, Kept]] = []
        copies: dict[Tokens, list[ActiveTurn]] = {}
        for turn in turns:
            left = None if turn.request.session is None else self._left.pop(turn.request.session, None)
            if left is not None and turn.context[: len(left.ids)] == left.ids and len(turn.context) > len(left.ids):
                back.append((turn, left.cache))
            elif turn.context in holders or turn.context in fresh:
                copies.setdefault(turn.context, []).append(turn)
            else:
                fresh[turn.context] = turn
        back.sort(key=lambda pair: len(pair[0].context) - pair[1].length)
        return sorted(fresh.values(), key=lambda turn: len(turn.context)), back, copies, holders

    def _enter(self, slot: int, turn: ActiveTurn) -> None:
        request, count = turn.request, len(turn.ids)
        cuts = (request.temperature, request.top_k, request.top_p, request.min_p)
        context = turn.context
        flags = (bool(request.stop), request.heard is not None, turn.matcher is not None, request.top_logprobs)
        self._state[slot] = (
            request.key, request.position + count, len(context) - 1, context[-1], count, turn.limit, *flags, *cuts
        )  # fmt: skip
        while self._ids.shape[1] < count:
            self._ids, self._logprobs = _widen(self._ids), _widen(self._logprobs)
        self._ids[slot, :count], self._logprobs[slot, :count] = turn.ids, turn.logprobs

    # sampling

    def _draw(self, rows: NDArray[np.void]) -> tuple[NDArray[np.int64], NDArray[np.float64], dict[int, Likeliest]]:
        """Draw the next token of each row. Return the tokens and their logprobs, both (n,), and the likeliest tokens.

        The likeliest tokens are returned only for rows whose requests want them.
        """
        numbers = np.stack(
            [rows["newest"], rows["cached"], uniforms(rows["key"].copy(), rows["drawn"].copy()), rows["temperature"]]
        )
        logits, on_device = self._next_tokens(numbers)
        if rows["top_k"].any() or (rows["top_p"] < 1).any() or rows["min_p"].any():
            on_device = self._draw_limited(rows, logits, numbers)
        drawn = on_device.cpu().numpy()
        if rows["guided"].any():
            self._draw_guided(rows, logits, numbers, drawn)
        tops = self._tops(rows, logits, drawn) if rows["tops"].any() else {}
        return drawn[0].astype(np.int64), drawn[1], tops

    def _next_tokens(self, numbers: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
        """Read one more token of each row, see `DecodeGraphs.next_tokens`."""
        if self._rows.graphs is not None:
            return self._rows.graphs.next_tokens(torch.from_numpy(numbers))
        newest, read = torch.from_numpy(numbers[:2].astype(np.int64))
        # Copied before the model is called: a copy to a GPU waits until all earlier calls have ended.
        draws, temperature = torch.from_numpy(numbers[2:]).to(self._policy.device)
        logits = self._rows.next_logits(newest, read)
        return logits, draw(logits, draws, temperature)

    def _draw_limited(self, rows: NDArray[np.void], logits: Tensor, numbers: NDArray[np.float64]) -> Tensor:
        """Draw again for rows that limit their draws, see `sampling.draw`."""
        draws, temperature = torch.from_numpy(numbers[2:]).to(logits.device)
        cuts = [torch.from_numpy(rows[name].copy()).to(logits.device) for name in ("top_k", "top_p", "min_p")]
        return draw(logits, draws, temperature, lowest_logit(scale_logits(logits, temperature), *cuts))

    def _draw_guided(
        self, rows: NDArray[np.void], logits: Tensor, numbers: NDArray[np.float64], drawn: NDArray[np.float64]
    ) -> None:
        """Draw again for rows with a grammar, write the result into `drawn`, and continue the grammars.

        A row whose grammar became too complex, so that it allows no token, gets NaN as its logprob, which ends its turn.
        """
        slots = np.flatnonzero(rows["guided"])
        masks = [self._allowed(int(slot), logits.shape[-1]) for slot in slots]
        allowed = torch.from_numpy(np.stack(masks)).to(logits.device)
        some = logits[torch.from_numpy(slots).to(logits.device)]
        draws, temperature = torch.from_numpy(numbers[2:, slots]).to(logits.device)
        cuts = [torch.from_numpy(rows[name][slots]).to(logits.device) for name in ("top_k", "top_p", "min_p")]
        floor = lowest_logit(scale_logits(some, temperature).masked_fill(~allowed, -torch.inf), *cuts)
        ids, logprobs = sample(some, draws, temperature, floor, allowed)
        masses = allowed_mass(some, temperature, allowed).cpu().numpy()
        drawn[:, slots] = torch.stack([ids.double(), logprobs.double()]).cpu().numpy()
        for place, slot in enumerate(map(int, slots)):
            turn, token = self.turns[slot], int(drawn[0, slot])
            if not masks[place].any():
                drawn[1, slot] = np.nan
            elif turn.matcher is not None:
                if not masses[place] >= WHOLE_MASS:
                    turn.guided.append(int(rows["count"][slot]))
                if token not in self._policy.chat.end_ids:
                    turn.matcher.take(token)

    def _allowed(self, slot: int, vocabulary: int) -> NDArray[np.bool_]:
        matcher = self.turns[slot].matcher
        assert matcher is not None
        return matcher.allowed(vocabulary)

    def _tops(self, rows: NDArray[np.void], logits: Tensor, drawn: NDArray[np.float64]) -> dict[int, Likeliest]:
        """Return the likeliest tokens of each row. The sampled token has exactly the logprob with which it was sampled."""
        slots = np.flatnonzero(rows["tops"])
        temperature = torch.from_numpy(rows["temperature"][slots]).to(logits.device)
        ids, logprobs = likeliest(logits[torch.from_numpy(slots).to(logits.device)], temperature, int(rows["tops"].max()))
        rankings = zip(slots.tolist(), ids.tolist(), logprobs.tolist(), strict=True)
        return {row: _top(best, best_logprobs, drawn[:, row], int(rows["tops"][row])) for row, best, best_logprobs in rankings}

    def _is_stopped(self, slot: int) -> bool:
        stops = self._policy.chat.stops(self.turns[slot].request.stop)
        return stops.is_completed(self._ids[slot, : self._state[slot]["count"]])

    def _end(self, slots: Sequence[int], stops: NDArray[np.bool_], broken: NDArray[np.bool_]) -> None:
        """End the turns in these slots. `stops` and `broken`, both (n,), say which rows got a stop token, and which NaN."""
        turns = [self.turns[slot] for slot in slots]
        for slot, turn in zip(slots, turns, strict=True):
            self._write_back(slot, turn)
        self._keep([slot for slot in slots if not broken[slot] and self._follows(slot, bool(stops[slot]))])
        self._free(slots, [slot for slot in slots if broken[slot]])
        for slot, turn in zip(slots, turns, strict=True):
            self._answer(turn, bool(stops[slot]), bool(broken[slot]))

    def _follows(self, slot: int, stopped: bool) -> bool:
        """Return whether another turn of the episode may follow."""
        request = self.turns[slot].request
        return request.session is not None and request.follows and (stopped or request.follows_length)

    def _answer(self, turn: ActiveTurn, stopped: bool, broken: bool) -> None:
        if broken:
            if turn.matcher is None or not turn.matcher.has_failed:
                turn.future.set_exception(nan_error())
            elif len(turn.ids) == 1:
                turn.future.set_exception(GrammarError("The constraint is too complex."))
            else:  # the tokens before count: a client must not be able to undo a turn by its constraint
                del turn.ids[-1], turn.logprobs[-1], turn.top[len(turn.ids) :]
                turn.finish("length")
            return
        turn.finish("stop" if stopped else "length")

    def _free(self, slots: Sequence[int], broken: Sequence[int]) -> None:
        """Remove rows from the batch. The last of the other rows take their slots."""
        count = len(self.turns) - len(slots)
        others = sorted({*range(count, len(self.turns))}.difference(slots))
        targets = [slot for slot in slots if slot < count]
        moves = dict(zip(others, targets, strict=True))
        self._rows.drop(slots, broken, moves, int(self._state["cached"][others].max(initial=0)))
        if moves:
            for values in (self._state, self._ids, self._logprobs):
                values[targets] = values[others]
        for source, target in moves.items():
            self.turns[target] = self.turns[source]
        del self.turns[count:]

    def _keep(self, slots: Sequence[int]) -> None:
        """Cache the values of ended turns for the next turns of their sessions.

        The cached values may take the memory of a share of the rows' capacity.
        """
        if not slots or not self._rows.resumes:
            return
        lengths = self._state["cached"][list(slots)].tolist()
        try:
            for slot, length, cache in zip(slots, lengths, self._rows.take(slots, lengths), strict=True):
                turn = self.turns[slot]
                assert turn.request.session is not None
                self._left[turn.request.session] = _EndedTurn(turn.context[:length], cache)
            while (excess := self._left_tokens() - self._share * self._rows.tokens) > 0:
                self._shrink(excess)
        except (RuntimeError, MemoryError) as error:
            if classify(error) != "out_of_memory":
                raise
            self._left.clear()  # costs only time

    def _shrink(self, excess: float) -> None:
        """Free memory in the block with the most rows that are no longer cached. If there is none, free it in the oldest block,
        by dropping the oldest rows that together have memory for `excess` tokens.

        At least a quarter of the block is freed, if necessary by dropping rows, because its other rows are copied. So there are
        at most three copies for each row that is freed.
        """
        blocks: dict[int, list[int]] = {}
        for session, left in self._left.items():
            blocks.setdefault(id(left.cache.block), []).append(session)
        unused_rows = {key: self._left[alike[0]].cache.block.rows - len(alike) for key, alike in blocks.items()}
        key = max(blocks, key=lambda key: unused_rows[key])  # of equal ones, the oldest
        sessions, unused = blocks[key], unused_rows[key]
        block = self._left[sessions[0]].cache.block
        needed = 0 if unused else math.ceil(excess * block.rows / max(1, block.tokens))
        dropped = max(needed, math.ceil(block.rows / 4) - unused, 0)
        for session in sessions[:dropped]:
            del self._left[session]
        others = sessions[dropped:]
        compacted = self._rows.compact([self._left[session].cache for session in others]) if others else []
        for session, cache in zip(others, compacted, strict=True):
            self._left[session] = _EndedTurn(self._left[session].ids, cache)

    def _left_tokens(self) -> int:
        """Return the number of tokens for which the cached values of ended turns take memory."""
        blocks = {id(left.cache.block): left.cache.block for left in self._left.values()}
        return sum(block.tokens for block in blocks.values())

    def _write_back(self, slot: int, turn: ActiveTurn) -> None:
        count = self._state[slot]["count"]
        turn.ids, turn.logprobs = self._ids[slot, :count].tolist(), self._logprobs[slot, :count].tolist()


def _top(ids: Sequence[int], logprobs: Sequence[float], drawn: NDArray[np.float64], count: int) -> Likeliest:
    token, logprob = int(drawn[0]), float(drawn[1])
    best = list(zip(ids, logprobs, strict=True))[:count]
    return tuple((id, logprob if id == token else value) for id, value in best if value > -np.inf)


def _widen(values: NDArray[Number]) -> NDArray[Number]:
    return np.concatenate([values, np.zeros_like(values)], axis=1)
