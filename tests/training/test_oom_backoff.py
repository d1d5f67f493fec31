"""Attempts at what does not fit into memory at once: all of it again in smaller pieces, which stay small."""

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from agentrl.workflow.errors import InfraError
from agentrl.workflow.training.oom_backoff import OomBackoff


def backoff_of(tokens: int) -> OomBackoff[int]:
    """Items that are as long as they say, cut in their order."""

    def cut(items: Sequence[int], tokens: int) -> list[list[int]]:
        pieces: list[list[int]] = [[]]
        for item in items:
            if pieces[-1] and sum(pieces[-1]) + item > tokens:
                pieces.append([])
            pieces[-1].append(item)
        return pieces

    return OomBackoff(tokens, cut, sum, "item", "Take less.")


def read(backoff: OomBackoff[int], items: Sequence[int], room: Callable[[Sequence[int]], bool]) -> list[list[list[int]]]:
    """The pieces of each attempt."""
    tried: list[list[list[int]]] = []
    for attempt in backoff.attempts(items):
        with attempt as pieces:
            tried.append([])
            for piece in pieces:
                tried[-1].append(list(piece))
                if not room(piece):
                    raise torch.OutOfMemoryError
    return tried


def test_oom_backoff_makes_one_attempt_with_enough_memory() -> None:
    assert read(backoff_of(10), [4, 4, 4], lambda piece: True) == [[[4, 4], [4]]]


def test_oom_backoff_repeats_all_in_smaller_pieces() -> None:
    backoff = backoff_of(100)
    tried = read(backoff, [4, 4, 4, 4], lambda piece: sum(piece) <= 4)
    assert tried == [[[4, 4, 4, 4]], [[4, 4]], [[4], [4], [4], [4]]]
    assert read(backoff, [2, 2, 3], lambda piece: True) == [[[2, 2], [3]]]


def test_oom_backoff_fails_if_one_item_does_not_fit() -> None:
    with pytest.raises(InfraError, match=r"Memory does not suffice for one item of 9 tokens\. Take less\."):
        read(backoff_of(9), [2, 2, 9], lambda piece: 9 not in piece)


def test_oom_backoff_passes_other_errors_on() -> None:
    with pytest.raises(RuntimeError, match="a bug"), next(backoff_of(10).attempts([4, 4])):
        raise RuntimeError("a bug")


def test_oom_backoff_frees_memory_of_failed_attempt() -> None:
    held: list[weakref.ref[Tensor]] = []

    def work(pieces: Sequence[Sequence[int]]) -> None:
        large = torch.ones(1)
        held.append(weakref.ref(large))
        if len(pieces) < 3:
            raise torch.OutOfMemoryError

    for attempt in backoff_of(100).attempts([4, 4, 4]):
        assert all(tensor() is None for tensor in held)
        with attempt as pieces:
            work(pieces)
    assert len(held) == 2
