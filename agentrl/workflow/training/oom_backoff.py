"""Work on items that do not fit into memory at once: cut into pieces, and into smaller ones if memory runs out.

`for attempt in backoff.attempts(rows):` and in it `with attempt as microbatches:`; what stands there begins anew each time.
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
    """The cut of items into pieces; a size that was once too much stays too much.

    Args:
        tokens: that a piece has at most, padding included; fewer after an attempt that failed.
        cut: the items and that number -> the pieces, in which no item is cut.
        size: of a piece, in tokens, padding included.
        item: what an item is called.
        hint: what to do where not even one item fits.
    """

    tokens: int
    cut: Callable[[Sequence[T], int], Pieces[T]]
    size: Callable[[Sequence[T]], int]
    item: str
    hint: str
    _ran_out: bool = field(default=False, init=False)

    def attempts(self, items: Sequence[T]) -> Iterator[AbstractContextManager[Pieces[T]]]:
        """Attempts at all of these items, of which the last one does not run out of memory.

        Each is to be entered, and gives the pieces: smaller ones than before, at which later calls begin too.

        Raises:
            InfraError: out of the attempt: memory does not suffice even for one item at a time.
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
