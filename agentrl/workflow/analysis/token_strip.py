"""The tokens of an episode on one line. The line has all chains of the episode, one after another. A chain has the tokens that
the model read and sampled.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentrl.workflow.token_chains import chains_of
from agentrl.workflow.trajectory import ROOT, Episode, Step

ELSEWHERE = "it trains in the chain that sampled it"
"""The reason why a sampled token does not train at the beginning of another chain."""

GUIDED = "the grammar of its turn chose it, not the policy"
"""The reason why a token of a turn with a grammar does not train."""


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """Adjacent tokens of one kind: new prompt tokens of a step, or sampled tokens.

    Args:
        start: the position of the first token on the line.
        end: the position after the last token on the line.
        kind: `prompt` or `sampled`.
        step: the index of the step that stores the tokens.
        chain: the number of the chain to which this part of the line belongs.
        first: the index of the first token among the step's tokens of this kind.
        shared: True if the tokens are those that this chain shares with another chain at its beginning.
    """

    start: int
    end: int
    kind: Literal["prompt", "sampled"]
    step: int
    chain: int
    first: int = 0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class ChainPlace:
    """A chain, and the positions of its tokens on the line."""

    start: int
    end: int
    chain: int
    steps: Sequence[Step]


def place_chains(episode: Episode) -> list[ChainPlace]:
    """Return the episode's chains, each with the positions of its tokens when all chains are laid out one after another."""
    places: list[ChainPlace] = []
    lengths = _line_lengths(episode)
    start = 0
    for steps in chains_of(episode):
        own = sum(len(step.prompt_ids) + len(step.sampled_ids) for step in steps)
        end = start + _context_length(steps[0], lengths) + own
        places.append(ChainPlace(start, end, steps[0].chain, steps))
        start = end
    return places


def list_pieces(episode: Episode, places: Sequence[ChainPlace], start: int, end: int) -> list[TokenPiece]:
    """Return the pieces with a token at a position from `start` to before `end`. A piece is returned completely, even if it
    begins before `start` or ends after `end`.
    """
    lengths = _line_lengths(episode)
    near = (place for place in places if place.start < end and place.end > start)
    return [
        piece for place in near for piece in _chain_pieces(episode, place, lengths) if piece.start < end and piece.end > start
    ]


def _chain_pieces(episode: Episode, place: ChainPlace, lengths: Mapping[int, int]) -> Iterator[TokenPiece]:
    first = place.steps[0]
    length = _context_length(first, lengths)
    if length:
        yield from _context_pieces(episode, first, place, length)
    at = place.start + length
    for step in place.steps:
        for kind, ids in (("prompt", step.prompt_ids), ("sampled", step.sampled_ids)):
            if ids:
                yield TokenPiece(at, at + len(ids), kind, step.index, place.chain)  # type: ignore[arg-type]
                at += len(ids)


def _context_pieces(episode: Episode, first: Step, place: ChainPlace, length: int) -> list[TokenPiece]:
    """Return the pieces of the first `length` tokens of the line that the chain's first step continues."""
    pieces: list[TokenPiece] = []
    end = 0
    for step in episode.line(first.parent if first.parent is not None else ROOT):
        if step.shared is not None and step.shared < end:
            end = step.shared
            pieces = _before(pieces, end)
        for kind, ids in (("prompt", step.prompt_ids), ("sampled", step.sampled_ids)):
            if ids:
                pieces.append(TokenPiece(end, end + len(ids), kind, step.index, place.chain, shared=True))  # type: ignore[arg-type]
                end += len(ids)
    moved = (replace(piece, start=piece.start + place.start, end=piece.end + place.start) for piece in _before(pieces, length))
    return list(moved)


def _before(pieces: Sequence[TokenPiece], end: int) -> list[TokenPiece]:
    return [replace(piece, end=min(piece.end, end)) for piece in pieces if piece.start < end]


def _context_length(first: Step, lengths: Mapping[int, int]) -> int:
    if first.parent is None or first.parent == ROOT:
        return 0
    whole = lengths.get(first.parent, 0)
    return whole if first.shared is None else min(whole, first.shared)


def _line_lengths(episode: Episode) -> dict[int, int]:
    """Return, by the index of each step, the number of tokens up to the end of the step, including its context."""
    lengths = {ROOT: 0}
    for step in episode.steps:
        lengths[step.index] = _context_length(step, lengths) + len(step.prompt_ids) + len(step.sampled_ids)
    return lengths
