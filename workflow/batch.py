"""Episodes -> tensors. One training row per unbroken run of tokens, padded on the right, grouped by length.

An episode is one row, unless a step says `new_row` (its template could not be continued); then it is several, and each
keeps its episode's advantage. Positions of all tensors are those of `input_ids`; what is said of a token at t is predicted
from the tokens before t, so a logprob tensor of shape (B, T - 1) goes with `[:, 1:]` of these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workflow.trajectory import Episode, Step

PAD_ID = 0
"""What fills a row's end; the attention mask hides it, so any id of the vocabulary will do."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training row as plain values; all sequences have one entry per token.

    Args:
        episode: index into the episodes it was made from.
        index: which row of that episode.
        input_ids: exact ids, never re-tokenised.
        action_mask: True where the policy sampled the token: a fact.
        loss_mask: the part of it that trains: not what a fork has from its parent.
        behavior_logprobs: as the sampler computed them; 0 where the token was not sampled.
    """

    episode: int
    index: int
    input_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]
    loss_mask: tuple[bool, ...]
    behavior_logprobs: tuple[float, ...]

    @property
    def key(self) -> tuple[int, int]:
        """Which row this is."""
        return self.episode, self.index


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows for one forward and backward; all tensors (B, T), `rows` says which row of which episode each line is."""

    rows: tuple[Row, ...]
    input_ids: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor


def rows_of(episodes: Sequence[Episode]) -> list[Row]:
    """The training rows of the episodes, in order; a row in which nothing trains is left out."""
    rows = [
        _row(number, index, steps, episode.fork_step)
        for number, episode in enumerate(episodes)
        for index, steps in enumerate(unbroken(episode))
    ]
    return [row for row in rows if any(row.loss_mask)]


def microbatches(rows: Sequence[Row], tokens: int, at_least: int = 1) -> list[list[Row]]:
    """Rows of like length together: at most `tokens` padded tokens each, `at_least` as many (where there are the rows).

    Longest first, so that what does not fit into memory is known at once. A row longer than `tokens` stays alone.
    """
    most = max(1, len(rows) // at_least)
    groups: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: (-len(row.input_ids), row.episode, row.index)):
        last = groups[-1] if groups else []
        if last and len(last) < most and (len(last) + 1) * len(last[0].input_ids) <= tokens:
            last.append(row)
        else:
            groups.append([row])
    return groups


def collate(rows: Sequence[Row], device: torch.device | str = "cpu") -> Microbatch:
    """The rows as tensors, padded on the right to the longest."""
    width = max(len(row.input_ids) for row in rows)
    return Microbatch(
        rows=tuple(rows),
        input_ids=_tensor([row.input_ids for row in rows], width, torch.int64, device),
        attention_mask=_tensor([(1,) * len(row.input_ids) for row in rows], width, torch.int64, device),
        action_mask=_tensor([row.action_mask for row in rows], width, torch.bool, device),
        loss_mask=_tensor([row.loss_mask for row in rows], width, torch.bool, device),
        behavior_logprobs=_tensor([row.behavior_logprobs for row in rows], width, torch.float32, device),
    )


def padded(lines: Sequence[Tensor], like: Tensor) -> Tensor:
    """1-D tensors of several lengths as one of the shape, type and place of `like` (B, T), 0 where a line has ended."""
    whole = torch.zeros_like(like)
    for target, line in zip(whole, lines, strict=True):
        target[: len(line)] = line
    return whole


def unbroken(episode: Episode) -> Iterator[list[Step]]:
    """The episode's steps, cut where one opens a new training row."""
    current: list[Step] = []
    for step in episode.steps:
        if step.new_row is not None and current:
            yield current
            current = []
        current.append(step)
    if current:
        yield current


def _row(episode: int, index: int, steps: Sequence[Step], fork_step: int) -> Row:
    ids: list[int] = []
    mask: list[bool] = []
    trains: list[bool] = []
    logprobs: list[float] = []
    for step in steps:
        ids += (*step.prompt_ids, *step.sampled_ids)
        mask += [False] * len(step.prompt_ids) + [True] * len(step.sampled_ids)
        trains += [False] * len(step.prompt_ids) + [step.index >= fork_step] * len(step.sampled_ids)
        logprobs += (*(0.0,) * len(step.prompt_ids), *step.behavior_logprobs)
    return Row(episode, index, tuple(ids), tuple(mask), tuple(trains), tuple(logprobs))


def _tensor(values: Sequence[Sequence[float]], width: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    # PAD_ID, False and 0.0 are all 0.
    return torch.tensor([[*line, *(PAD_ID,) * (width - len(line))] for line in values], dtype=dtype, device=device)
