"""Work on what does not fit into memory at once: cut into pieces, and into smaller ones where memory runs out."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from agentrl.workflow.errors import InfraError
from agentrl.workflow.models.memory import out_of_memory

S = TypeVar("S")
T = TypeVar("T")


class OomBackoff(Generic[T]):
    """How items are cut; what once was too much stays too much.

    Args:
        tokens: that a piece has at most, to begin with, padding included.
        cut: the items and that number -> the pieces, in which no item is cut.
        size: of a piece, in tokens, padding included.
        item: what an item is called.
        hint: what to do where not even one item fits.
    """

    def __init__(
        self,
        tokens: int,
        cut: Callable[[Sequence[T], int], Sequence[Sequence[T]]],
        size: Callable[[Sequence[T]], int],
        item: str,
        hint: str,
    ) -> None:
        self._tokens = tokens
        self._cut = cut
        self._size = size
        self._item = item
        self._hint = hint

    def run(self, items: Sequence[T], on: Callable[[Sequence[Sequence[T]]], S]) -> S:
        """Runs `on` on the pieces of these items; where memory runs out, again on smaller ones, which later calls keep.

        Raises:
            InfraError: memory does not suffice even for one item at a time.
        """
        while True:
            pieces = self._cut(items, self._tokens)
            several = [piece for piece in pieces if len(piece) > 1]
            try:
                return on(pieces)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if not several:
                    most = max(map(self._size, pieces))
                    raise InfraError(f"Memory does not suffice for one {self._item} of {most} tokens.", self._hint) from error
            self._tokens = max(map(self._size, several)) // 2
