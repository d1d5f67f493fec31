"""Packing of several training rows into one tensor row, called a line, without attention between the training rows. Rows of
unequal length then need less padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.workflow.training.training_rows import PAD_ID, Row


@dataclass(frozen=True, slots=True)
class PackedLines:
    """Training rows, packed into B lines of up to T tokens. Each tensor is (B, T).

    Args:
        input_ids: the token ids.
        positions: the position of each token in its training row; 0 for padding.
        score_mask: True if the token trains.
        owner: the number of the training row that each token belongs to.
    """

    input_ids: Tensor
    positions: Tensor
    score_mask: Tensor
    owner: Tensor
    rows: int

    def sums(self, values: Tensor) -> Tensor:
        """Return one sum per training row: the sum of `values` over the row's scored tokens. `values` is (B, T - 1); the first
        token of a line has no value.
        """
        score_mask = self.score_mask[:, 1:]
        return values.new_zeros(self.rows).index_add(0, self.owner[:, 1:][score_mask], values[score_mask])


def assign_lines(rows: Sequence[Row]) -> list[list[int]]:
    """Assign rows to lines. Return, for each line, the numbers of its rows.

    No line is longer than the longest row. The longest rows are placed first, each on the first line that has room.
    """
    lengths = [len(row.input_ids) for row in rows]
    lines: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(rows)), key=lambda number: -lengths[number]):
        line = next((at for at, left in enumerate(room) if left >= lengths[number]), len(lines))
        if line == len(lines):
            lines.append([])
            room.append(max(lengths))
        lines[line].append(number)
        room[line] -= lengths[number]
    return lines


def packed_size(rows: Sequence[Row]) -> int:
    """Return the number of tokens that the model reads for packed rows, padding included."""
    return len(assign_lines(rows)) * max(len(row.input_ids) for row in rows)


def pack_rows(rows: Sequence[Row], device: torch.device | str = "cpu") -> PackedLines | None:
    """Pack the rows on fewer lines than there are rows. Return None if that is impossible."""
    lines = assign_lines(rows)
    if len(lines) == len(rows):
        return None
    shape = len(lines), max(len(row.input_ids) for row in rows)
    ids = torch.full(shape, PAD_ID)
    positions, owner = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    score_mask = torch.zeros(shape, dtype=torch.bool)
    for line, numbers in enumerate(lines):
        start = 0
        for number in numbers:
            row = rows[number]
            span = slice(start, start + len(row.input_ids))
            ids[line, span] = torch.tensor(row.input_ids)
            positions[line, span] = torch.arange(len(row.input_ids))
            owner[line, span] = number
            score_mask[line, span] = torch.tensor(row.loss_mask)
            score_mask[line, start] = False  # nothing of its row stands before it
            start = span.stop
    return PackedLines(ids.to(device), positions.to(device), score_mask.to(device), owner.to(device), len(rows))
