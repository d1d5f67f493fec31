"""The tokens of an episode in a line: its chains one after another, as its model read and sampled them.

A chain begins with what it shares with another one's line, as its training row does. Nothing here reads a token: pieces say
where the tokens of a stretch of the line are kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentrl.workflow.token_chains import chains_of
from agentrl.workflow.trajectory import ROOT, Episode, Step

ELSEWHERE = "it trains in the chain that sampled it"
"""Why a sampled token that another chain begins with does not train there."""


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """Adjacent tokens of one kind: added by a step's prompt, or sampled.

    Args:
        start, end: their places in the line.
        step: whose they are, and `chain`, in which chain they stand here.
        first: the place of the first one among the step's own.
        shared: they are the beginning of a chain, which another one has.
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
    """A chain and where its tokens are in the line."""

    start: int
    end: int
    chain: int
    steps: Sequence[Step]


def place_chains(episode: Episode) -> list[ChainPlace]:
    """Return the episode's chains in the line."""
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
    """Return the pieces with a token from `start` to before `end`, whole."""
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
    """What the chain begins with: the line of the step that its first one continues, as far as it does."""
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
    """Index of a step -> the number of tokens of its line; what continues a step that is not there begins anew."""
    lengths = {ROOT: 0}
    for step in episode.steps:
        lengths[step.index] = _context_length(step, lengths) + len(step.prompt_ids) + len(step.sampled_ids)
    return lengths
