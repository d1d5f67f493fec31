"""Work on items that may not all fit into memory: the items are split into pieces, and into smaller pieces if memory runs out.

Write `for attempt in backoff.attempts(rows):` and, in the loop, `with attempt as microbatches:`. Each attempt runs the block of
the `with` statement again from its beginning.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentrl.workflow.errors import InfraError
from agentrl.workflow.models.device_errors import classify

T = TypeVar("T")

Pieces = Sequence[Sequence[T]]


@dataclass(slots=True)
class OomBackoff(Generic[T]):
    """A splitter of items into pieces that fit into memory. A size at which memory ran out is not tried again.

    Args:
        tokens: the most tokens of a piece, padding included; it is lowered after each failed attempt.
        cut: a function that splits a list of items into pieces, given the most tokens of a piece. It never splits an item.
        size: a function that returns a piece's size in tokens, padding included.
        item: the noun for an item, for messages.
        hint: the advice in the error message if not even one item fits.
    """

    tokens: int
    cut: Callable[[Sequence[T], int], Pieces[T]]
    size: Callable[[Sequence[T]], int]
    item: str
    hint: str
    _ran_out: bool = field(default=False, init=False)

    def attempts(self, items: Sequence[T]) -> Iterator[AbstractContextManager[Pieces[T]]]:
        """Yield attempts to process all items. Stop after the first attempt that has enough memory.

        Each attempt is a context manager that yields the pieces. After a failed attempt the pieces are smaller. The next call
        of `attempts` starts with the size that succeeded. Raise InfraError if memory does not suffice even for one item at a
        time. The context manager of the attempt raises this.
        """
        self._ran_out = True
        while self._ran_out:
            yield self._attempt(self.cut(items, self.tokens))

    @contextmanager
    def _attempt(self, pieces: Pieces[T]) -> Iterator[Pieces[T]]:
        self._ran_out = False
        try:
            yield pieces
        except (RuntimeError, MemoryError) as error:
            if classify(error) != "out_of_memory":
                raise
            several = [piece for piece in pieces if len(piece) > 1]
            if not several:
                max_tokens = max(map(self.size, pieces))
                raise InfraError(f"Memory does not suffice for one {self.item} of {max_tokens} tokens.", self.hint) from error
            self.tokens = max(map(self.size, several)) // 2
            self._ran_out = True
