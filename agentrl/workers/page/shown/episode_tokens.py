"""Tokens of an episode, for the page and for `replay --tokens`: the exact ids, their texts and logprobs, and segments of tokens
of one kind.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import groupby
from typing import Any

from agentrl.workers.page.shown.credit_answers import TokenCredit, credit_tokens, find_reader
from agentrl.workers.page.shown.token_texts import FoundTexts, TokenTexts, find_texts
from agentrl.workflow.analysis.token_strip import ELSEWHERE, GUIDED, TokenPiece, list_pieces, place_chains
from agentrl.workflow.settings import Settings
from agentrl.workflow.store.driver_reader import Queryable
from agentrl.workflow.store.reads.episode_relations import load_run_of
from agentrl.workflow.store.reads.episode_shape import EpisodeShape, load_shape
from agentrl.workflow.store.reads.turn_rows import TOKEN_BYTES, StepTokens, load_steps, load_tokens, read_tokens
from agentrl.workflow.token_chains import reasons_not_to_train

AROUND = 4
"""The number of tokens on each side of the range that are decoded too, because they may contain the rest of a character. A
character has at most 4 bytes.
"""
MAX_COMPARED = 200
"""The most sampled tokens, and the most characters, that are compared to find out whether a tokenizer belongs to another model.
"""
NOT_STORED = {
    "ratio": "The ratio of trained to sampling probability is not stored per token. For a whole update: agentrl whatif.",
    "entropy": "Entropy is not stored per token; each iteration has its mean.",
    "kl": "KL is not stored per token; each iteration has its mean.",
}


class EpisodeTokens:
    """The tokens of an episode, which are read range by range. The chains of the episode follow one another."""

    def __init__(self, tx: Any, episode: int) -> None:
        """Load the episode's chains and steps in the transaction. Raise NotFoundError if there is no such episode."""
        self.shape: EpisodeShape = load_shape(tx, episode)
        self.run = load_run_of(tx, self.shape.run_id)
        self._tx = tx
        self._chains = place_chains(self.shape.value)

    @property
    def total(self) -> int:
        """The number of tokens in all chains together."""
        return self._chains[-1].end if self._chains else 0

    def read(self, start: int, size: int) -> dict[str, Any]:
        """Return at most `size` tokens, from position `start` on, without their texts. Raise StateError if the tokens were
        removed.
        """
        end = min(start + size, self.total)
        pieces = list_pieces(self.shape.value, self._chains, start, end) if start < end else []
        return self._read(pieces, start, end)

    def read_sampled(self, size: int | None, step: int | None = None) -> dict[str, Any]:
        """Return the first `size` sampled tokens (None: all) of the step or, without a step, of the episode, each token once.

        The result has the keys of `read`'s result, without the prompt tokens. `total` is the number of these sampled tokens
        before `size` cuts them. Raise StateError if the tokens were removed.
        """
        pieces = [
            piece
            for piece in list_pieces(self.shape.value, self._chains, 0, self.total)
            if piece.kind == "sampled" and not piece.shared and step in (None, piece.step)
        ]
        total = sum(piece.end - piece.start for piece in pieces)
        chosen: list[TokenPiece] = []
        left, end = total if size is None else size, 0
        for piece in pieces:
            if left > 0:
                chosen.append(piece)
                end = min(piece.end, piece.start + left)
                left -= piece.end - piece.start
        return {**self._read(chosen, 0, end), "total": total}

    def _read(self, pieces: Sequence[TokenPiece], start: int, end: int) -> dict[str, Any]:
        tokens_by_row = load_tokens(self._tx, self.shape.step_ids(sorted({piece.step for piece in pieces})))
        stored = {step: tokens_by_row.get(self.shape.rows[step]["id"]) for step in {piece.step for piece in pieces}}
        reader, _ = find_reader(self._tx, self.shape.id, self.shape.run_id, self.run)
        credit = credit_tokens(self._tx, reader, self.shape.id)
        ids, logprobs = _lay_out(pieces, stored, start, end)
        return {
            "total": self.total,
            "start": start,
            "ids": ids,
            "logprobs": logprobs,
            "segments": _segments(self.shape, pieces, credit, start, end),
            "advantages": _advantages(self.shape, pieces, credit, start, end),
            "metrics": _metrics(self.shape.id, logprobs, credit),
            "end": end,
            "pieces": pieces,
            "stored": stored,
        }

    def texts(self, token_texts: FoundTexts, read: dict[str, Any]) -> tuple[list[str] | None, str | None]:
        """Return the texts of the tokens that `read` or `read_sampled` returned, and None. If there are no texts, return None
        and the reason.
        """
        start, end = read["start"], read["end"]
        if token_texts.texts is None:
            return None, token_texts.why_none
        texts: list[str] = []
        for piece in read["pieces"]:
            texts += _piece_texts(token_texts.texts, piece, read["stored"].get(piece.step), start, end)
        return texts, None


def _lay_out(
    pieces: Sequence[TokenPiece], stored: Mapping[int, StepTokens | None], start: int, end: int
) -> tuple[list[int], list[float | None]]:
    ids: list[int] = []
    logprobs: list[float | None] = []
    for piece in pieces:
        first, last = _within(piece, start, end)
        piece_ids = _unpack("i", _packed_ids(piece, stored.get(piece.step)), first, last)
        ids += piece_ids
        if piece.kind == "prompt" or (tokens := stored.get(piece.step)) is None:
            logprobs += [None] * len(piece_ids)
            continue
        sampled = [value if math.isfinite(value) else None for value in _unpack("f", tokens.logprobs, first, last)]
        logprobs += sampled + [None] * (len(piece_ids) - len(sampled))
    return ids, logprobs


def _within(piece: TokenPiece, start: int, end: int) -> tuple[int, int]:
    """Return the first position in the piece that is inside the range, and the one after the last."""
    return max(0, start - piece.start), min(piece.end, end) - piece.start


def _packed_ids(piece: TokenPiece, tokens: StepTokens | None) -> bytes:
    if tokens is None:
        return b""
    return tokens.prompt_ids if piece.kind == "prompt" else tokens.sampled_ids


def _unpack(kind: str, packed: bytes, first: int, last: int) -> list[Any]:
    part = packed[first * TOKEN_BYTES : last * TOKEN_BYTES]
    return list(struct.unpack(f"<{len(part) // TOKEN_BYTES}{kind}", part[: len(part) // TOKEN_BYTES * TOKEN_BYTES]))


def _piece_texts(texts: TokenTexts, piece: TokenPiece, tokens: StepTokens | None, start: int, end: int) -> list[str]:
    """Return the texts of those tokens of the piece that are inside the range."""
    first, last = _within(piece, start, end)
    before = max(0, first - AROUND)
    length = piece.end - piece.start
    ids = _unpack("i", _packed_ids(piece, tokens), before, min(length, last + AROUND))
    return texts.of(ids)[first - before : last - before]


def _segments(
    shape: EpisodeShape, pieces: Sequence[TokenPiece], credit: TokenCredit, start: int, end: int
) -> list[dict[str, Any]]:
    idle = reasons_not_to_train(shape.value)
    guided = {step.index: frozenset(step.guided) for step in shape.value.steps if step.guided}
    return [
        {
            "start": first,
            "end": last,
            "kind": piece.kind,
            "step": piece.step,
            "chain": piece.chain,
            "trains": _trains(piece, idle) and not is_guided,
            "why_not": _why_not(piece, idle) or (GUIDED if is_guided else None),
            "advantage": _segment_advantage(piece, credit) if _trains(piece, idle) and not is_guided else None,
        }
        for piece in pieces
        for first, last, is_guided in _runs(piece, guided.get(piece.step, frozenset()), start, end)
    ]


def _runs(piece: TokenPiece, guided: Set[int], start: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the positions of the piece inside the range, divided where tokens that a grammar chose begin or end."""
    first, last = max(piece.start, start), min(piece.end, end)
    if piece.kind == "prompt" or not guided:
        yield first, last, False
        return
    for is_guided, run in groupby(range(first, last), lambda place: place - piece.start in guided):
        places = list(run)
        yield places[0], places[-1] + 1, is_guided


def _trains(piece: TokenPiece, idle: Mapping[int, str]) -> bool:
    return piece.kind == "sampled" and not piece.shared and piece.step not in idle


def _why_not(piece: TokenPiece, idle: Mapping[int, str]) -> str | None:
    if piece.kind == "prompt":
        return None
    return idle.get(piece.step) or (ELSEWHERE if piece.shared else None)


def _segment_advantage(piece: TokenPiece, credit: TokenCredit) -> float | None:
    if credit.of_steps is None:
        return credit.of_all
    values = credit.of_steps.get(piece.step, ())
    return values[0] if values and values[0] == values[-1] else None


def _advantages(
    shape: EpisodeShape, pieces: Sequence[TokenPiece], credit: TokenCredit, start: int, end: int
) -> list[float | None] | None:
    if credit.of_steps is None or all(values[0] == values[-1] for values in credit.of_steps.values() if values):
        return None
    idle, steps = reasons_not_to_train(shape.value), {step.index: step for step in shape.value.steps}
    advantages: list[float | None] = []
    for piece in pieces:
        first, last = _within(piece, start, end)
        trained = credit.of_steps.get(piece.step, ()) if _trains(piece, idle) else ()
        some = _spread(trained, frozenset(steps[piece.step].guided))[first:last]
        advantages += some + [None] * (last - first - len(some))
    return advantages


def _spread(values: Sequence[float], guided: Set[int]) -> list[float | None]:
    """Return the values of the tokens that train at the places of these tokens among all sampled ones; None at the others."""
    rest = iter(values)
    return [None if place in guided else next(rest) for place in range(len(values) + len(guided))] if values else []


def _metrics(episode: int, logprobs: Sequence[float | None], credit: TokenCredit) -> list[dict[str, str]]:
    some = any(value is not None for value in logprobs)
    verify = f"Recompute and compare it: agentrl replay {episode} --verify tokens"
    stored = {"source": "stored", "how": f"The sampler's natural logarithm, at its temperature. {verify}"}
    missing = {"source": "missing", "how": "No token was sampled here, or its sampler did not report logprobs."}
    return [
        {"name": "logprob", **(stored if some else missing)},
        {"name": "advantage", "source": credit.source, "how": credit.how},
        *({"name": name, "source": "missing", "how": how} for name, how in NOT_STORED.items()),
    ]


def find_checked_texts(store: Queryable, where: Settings, base: str, shape: EpisodeShape | None) -> FoundTexts:
    """Return the texts of the tokens of an episode's base model, or the reason why they are not available.

    If the tokenizer may be that of another model with the same name, the episode's first sampled turn is decoded. If the text
    differs from the recorded text, the result has no texts. Without a `shape`, nothing is checked.
    """
    texts = find_texts(where, base)
    return texts if texts.sure or shape is None else store.ask(lambda tx: _check_namesake(tx, shape, texts))


def _check_namesake(tx: Any, shape: EpisodeShape, token_texts: FoundTexts) -> FoundTexts:
    ids = [row["id"] for row in shape.rows if row["sampled_tokens"]][:1]
    steps, tokens = load_steps(tx, ids), load_tokens(tx, ids)
    if not steps or not tokens:
        return token_texts
    return token_texts.checked(_unpack("i", tokens[ids[0]].sampled_ids, 0, MAX_COMPARED), steps[0]["text"][:MAX_COMPARED])


def packed_line(tx: Any, shape: EpisodeShape, max_tokens: int) -> bytes:
    """Return the first `max_tokens` tokens of the episode as packed ids. The chains of the episode follow one another. None of
    the tokens may have been removed.
    """
    pieces = list_pieces(shape.value, place_chains(shape.value), 0, max_tokens)
    tokens_by_row = read_tokens(tx, shape.step_ids(sorted({piece.step for piece in pieces})))
    stored = {step: tokens_by_row.get(shape.rows[step]["id"]) for step in {piece.step for piece in pieces}}
    parts = (_packed_ids(piece, stored[piece.step])[: (piece.end - piece.start) * TOKEN_BYTES] for piece in pieces)
    return b"".join(parts)[: max_tokens * TOKEN_BYTES]


def place_in_line(shape: EpisodeShape, token: int) -> tuple[int | None, str | None]:
    """Return the step and the kind of the token at this position. After the end of the episode, return None for both."""
    pieces = list_pieces(shape.value, place_chains(shape.value), token, token + 1)
    return (pieces[0].step, pieces[0].kind) if pieces else (None, None)
