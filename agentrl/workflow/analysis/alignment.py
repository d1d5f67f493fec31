"""The alignment of the token sequences of a group's episodes: how many first tokens they share, and at which token each differs
from the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TOKEN_BYTES = 4
BLOCK = 4096
"""The number of bytes that are compared at once."""


@dataclass(frozen=True, slots=True)
class TokenBranch:
    """The tokens from `start` to before `end` that all lines in `members` share.

    A line is the token sequence of one episode; `members` has the keys of lines. Every other line with the same tokens before
    `start` has another token at `start`, or ends there.
    """

    start: int
    end: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Alignment:
    """The shared beginnings of several lines (token sequences), as a prefix tree.

    Args:
        common: the number of tokens that all lines share.
        branches: the branches of the tree. A branch comes after the branch that it continues. A branch without tokens is the
            end of a line.
        alone_from: for each line, the index of its first token that no other line shares: every other line differs there or
            before. The value is the length of the line if another line begins with all of its tokens.
    """

    common: int
    branches: Sequence[TokenBranch]
    alone_from: Mapping[int, int]


def align(lines: Mapping[int, bytes]) -> Alignment:
    """Align lines from their first tokens on. Each line is packed: 4 bytes per token id."""
    branches: list[TokenBranch] = []
    alone: dict[int, int] = {}
    waiting: list[tuple[int, list[int]]] = [(0, [*lines])] if lines else []
    while waiting:
        start, members = waiting.pop(0)
        end = _common_end(lines, members, start)
        branches.append(TokenBranch(start, end, tuple(members)))
        if len(members) == 1:
            alone[members[0]] = start
            continue
        following: dict[bytes, list[int]] = {}
        for member in members:
            token = lines[member][end * TOKEN_BYTES : (end + 1) * TOKEN_BYTES]
            if token:
                following.setdefault(token, []).append(member)
            else:
                alone[member] = end
        waiting += [(end, some) for some in following.values()]
    return Alignment(branches[0].end if branches else 0, branches, alone)


def _common_end(lines: Mapping[int, bytes], members: Sequence[int], start: int) -> int:
    """Return the index of the first token, from `start` on, that is not the same in all of these lines."""
    first = lines[members[0]]
    end = len(first) // TOKEN_BYTES
    for member in members[1:]:
        end = min(end, _first_difference(first, lines[member], start, end))
    return end


def _first_difference(one: bytes, other: bytes, start: int, end: int) -> int:
    """Return the index of the first token, from `start` on, in which the lines differ."""
    at, last = start * TOKEN_BYTES, min(end * TOKEN_BYTES, len(other))
    while at < last and one[at : (stop := min(at + BLOCK, last))] == other[at:stop]:
        at = stop
    while at < last and one[at : at + TOKEN_BYTES] == other[at : at + TOKEN_BYTES]:
        at += TOKEN_BYTES
    return min(at, last) // TOKEN_BYTES
