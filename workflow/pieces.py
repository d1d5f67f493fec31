"""Work on rows that do not fit into memory at once: cut into microbatches, and into smaller ones where memory runs out."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from workflow.batch import Row, microbatches, size
from workflow.config import UpdateConfig
from workflow.errors import InfraError
from workflow.memory import out_of_memory

T = TypeVar("T")


class Pieces:
    """How rows are cut; what once was too much stays too much.

    Args:
        options: how many tokens a microbatch may have, and how many microbatches there are at least.
        share: whether rows that begin alike have their beginning read once.
    """

    def __init__(self, options: UpdateConfig, share: bool) -> None:
        self.share = share
        self._tokens = options.microbatch_tokens
        self._fewest = options.gradient_accumulation_steps

    def work(self, rows: Sequence[Row], on: Callable[[Sequence[Sequence[Row]]], T]) -> T:
        """Runs `on` on the microbatches of these rows; where memory runs out, again on smaller ones, which later calls keep.

        Raises:
            InfraError: memory does not suffice even for one row at a time.
        """
        while True:
            pieces = microbatches(rows, self._tokens, self._fewest, self.share)
            try:
                return on(pieces)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if all(len(piece) == 1 for piece in pieces):
                    raise InfraError(
                        f"Memory does not suffice for one row of {len(pieces[0][0].input_ids)} tokens.",
                        "Set update.gradient_checkpointing=true or model.load_in_4bit=true, or lower rollout.max_new_tokens.",
                    ) from error
            self._tokens = max(size(piece, self.share) for piece in pieces if len(piece) > 1) // 2
