"""Episodes -> tensors. One training row per chain, padded on the right, grouped by length or beginning.

An episode is one row, unless it has several chains (`workflow.chains`): because its template could not be continued, or because
an agent began another conversation. Each begins with what it shares with another, which trains there, and has its episode's
advantage. Positions of all tensors are those of `input_ids`; what is said of a token at t is predicted from the tokens before
t, so a logprob tensor of shape (B, T - 1) goes with `[:, 1:]` of these.

The rows of a group begin with the same prompt. Where it saves work, a microbatch holds it once, and its lines begin with the
last token before what trains.
"""

from collections import Counter
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from agentrl.workflow.errors import StateError
from agentrl.workflow.models.logprobs import Prefixes
from agentrl.workflow.token_chains import as_read, chains_of, context_of, reasons_not_to_train
from agentrl.workflow.trajectory import Episode, Step

PAD_ID = 0
"""The id that fills a row's end; the attention mask hides it, so any id of the vocabulary will do."""

CALL_TOKENS = 128
"""The cost of one more call of the model, for the beginnings, in tokens."""

PREFIX_TOKENS_PER_TOKEN = 16
"""The number of tokens of a shared beginning that take the memory of one token that a row reads."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training row as plain values; all sequences have one entry per token.

    Args:
        episode: index into the episodes it was made from.
        index: which row of that episode.
        input_ids: exact ids, never re-tokenised.
        action_mask: True where the policy sampled the token: a fact.
        loss_mask: the part of it that trains: not what a fork has from its parent, nor another chain; something does.
        behavior_logprobs: as the sampler computed them; 0 where the token was not sampled.
        weight: the row's share of its episode; those of an episode's rows sum to 1.

    Attributes:
        prefix: the number of tokens before the one that the first trained token is predicted from.
    """

    episode: int
    index: int
    input_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]
    loss_mask: tuple[bool, ...]
    behavior_logprobs: tuple[float, ...]
    weight: float = 1.0
    prefix: int = field(init=False)

    def __post_init__(self) -> None:
        if True not in self.loss_mask:
            raise StateError(f"Row {self.index} of episode {self.episode} has no token that trains.")
        # Planning asks for it many times, so it is looked for once.
        object.__setattr__(self, "prefix", max(0, self.loss_mask.index(True) - 1))

    @property
    def key(self) -> tuple[int, int]:
        """The row's identity."""
        return self.episode, self.index


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows for one forward and backward, each on a line.

    Args:
        prefixes: the beginnings before the lines, if these are shared.
        weights: (B,), the rows'.
        others: (B, T).
    """

    prefixes: Prefixes | None
    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor
    weights: Tensor


def rows_of(episodes: Sequence[Episode]) -> list[Row]:
    """Return the training rows of the episodes as they were read, in order; a row in which nothing trains is left out."""
    rows: list[Row] = []
    for number, (episode, _) in enumerate(map(as_read, episodes)):
        idle = reasons_not_to_train(episode)
        rows += (
            _row(number, index, episode, steps, idle)
            for index, steps in enumerate(chains_of(episode))
            if any(step.index not in idle and step.sampled_ids for step in steps)
        )
    counts = Counter(row.episode for row in rows)
    return [row if counts[row.episode] == 1 else replace(row, weight=1 / counts[row.episode]) for row in rows]


def microbatches(rows: Sequence[Row], tokens: int, at_least: int = 1, share: bool = False) -> list[list[Row]]:
    """Return rows of like length together: at most `tokens` padded tokens each, `at_least` as many (where there are the rows).

    Longest first, so that what does not fit into memory is known at once. A row longer than `tokens` stays alone. With `share`,
    rows of the same beginning go together instead, where the model then has less to read.
    """
    max_rows = max(1, len(rows) // at_least)
    by_length = sorted(rows, key=lambda row: (-len(row.input_ids), row.episode, row.index))
    if not share:
        return _fill_microbatches([(row, None) for row in by_length], tokens, max_rows)[0]
    longest: dict[tuple[int, ...], int] = {}
    entries = [(row, longest.setdefault(_beginning(row), place)) for place, row in enumerate(by_length)]
    plans = [_fill_microbatches(order, tokens, max_rows) for order in (entries, sorted(entries, key=lambda pair: pair[1]))]
    return min(plans, key=lambda plan: plan[1] + len(plan[0]) * CALL_TOKENS)[0]


def size(rows: Sequence[Row], share: bool = False) -> int:
    """Return padded tokens that the model reads for a microbatch of these rows."""
    extent = _Extent()
    for row in rows:
        extent.add(row, _beginning(row) if share else None)
    return extent.size()


def collate(rows: Sequence[Row], device: torch.device | str = "cpu", share: bool = False) -> Microbatch:
    """Return the rows as tensors, padded on the right to the longest; with `share`, their beginnings once, where that is
    less.
    """
    shared = share and size(rows, share) < size(rows)
    starts = [row.prefix if shared else 0 for row in rows]
    lengths = [len(row.input_ids) - start for row, start in zip(rows, starts, strict=True)]

    def tensor(name: str, dtype: DTypeLike) -> Tensor:
        return _tensor([getattr(row, name)[start:] for row, start in zip(rows, starts, strict=True)], dtype, device)

    return Microbatch(
        prefixes=_prefixes(rows, device) if shared else None,
        input_ids=tensor("input_ids", np.int64),
        attention_mask=_tensor([np.ones(length) for length in lengths], np.int64, device),
        loss_mask=tensor("loss_mask", np.bool_),
        behavior_logprobs=tensor("behavior_logprobs", np.float32),
        weights=torch.tensor([row.weight for row in rows], dtype=torch.float64, device=device),
    )


def _row(episode: int, index: int, of: Episode, steps: Sequence[Step], idle: Container[int]) -> Row:
    """The row of a chain; the steps whose indices are `idle` do not train."""
    before = context_of(of, steps[0])
    ids = [token for token, _ in before]
    mask = [logprob is not None for _, logprob in before]
    trains = [False] * len(before)
    logprobs = [logprob or 0.0 for _, logprob in before]
    for step in steps:
        ids += (*step.prompt_ids, *step.sampled_ids)
        mask += [False] * len(step.prompt_ids) + [True] * len(step.sampled_ids)
        trains += [False] * len(step.prompt_ids) + [step.index not in idle] * len(step.sampled_ids)
        logprobs += (*(0.0,) * len(step.prompt_ids), *step.behavior_logprobs)
    return Row(episode, index, tuple(ids), tuple(mask), tuple(trains), tuple(logprobs))


class _Extent:
    """How much the model reads for rows that come one by one, each with what stands for its beginning, None to share none."""

    def __init__(self) -> None:
        self.rows = 0
        self._longest = self._line = self._prefix = 0
        self._beginnings: set[Hashable] = set()

    def add(self, row: Row, beginning: Hashable | None) -> None:
        self.rows += 1
        self._longest = max(self._longest, len(row.input_ids))
        if beginning is not None:
            self._line = max(self._line, len(row.input_ids) - row.prefix)
            self._prefix = max(self._prefix, row.prefix)
            self._beginnings.add(beginning)

    def size(self) -> int:
        """Padded tokens."""
        whole = self.rows * self._longest
        if not self._beginnings:
            return whole
        lines = self.rows * (self._line + self._prefix // PREFIX_TOKENS_PER_TOKEN)
        return min(whole, len(self._beginnings) * self._prefix + lines + CALL_TOKENS)


def _fill_microbatches(order: Sequence[tuple[Row, Hashable | None]], tokens: int, max_rows: int) -> tuple[list[list[Row]], int]:
    """Microbatches of the rows in this order, each as long as it may be, and the sum of their sizes."""
    pieces: list[list[Row]] = []
    extent, total, last = _Extent(), 0, 0
    for row, beginning in order:
        extent.add(row, beginning)
        if not pieces or extent.rows > max_rows or extent.size() > tokens:
            pieces.append([])
            total += last
            extent = _Extent()
            extent.add(row, beginning)
        pieces[-1].append(row)
        last = extent.size()
    return pieces, total + last


def _beginning(row: Row) -> tuple[int, ...]:
    return row.input_ids[: row.prefix]


def _prefixes(rows: Sequence[Row], device: torch.device | str) -> Prefixes:
    number: dict[tuple[int, ...], int] = {}
    of = [number.setdefault(_beginning(row), len(number)) for row in rows]
    mask = _tensor([np.ones(len(beginning)) for beginning in number], np.int64, device)
    return Prefixes(_tensor(list(number), np.int64, device), mask, torch.tensor(of, device=device))


def _tensor(lines: Sequence[Sequence[float] | NDArray[np.float64]], dtype: DTypeLike, device: torch.device | str) -> Tensor:
    # PAD_ID, False and 0.0 are all 0.
    whole = np.zeros((len(lines), max(map(len, lines))), dtype)
    for target, line in zip(whole, lines, strict=True):
        target[: len(line)] = line
    return torch.from_numpy(whole).to(device)
