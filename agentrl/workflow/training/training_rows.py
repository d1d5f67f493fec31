"""Episodes -> tensors. One training row per chain, padded on the right, grouped by length or beginning.

An episode is one row, unless it has several chains (`workflow.token_chains`): because its template could not be continued, or
because an agent began another conversation. Each begins with what it shares with another, which trains there, and has its
episode's advantage. Positions of all tensors are those of `input_ids`; what is said of a token at t is predicted from the
tokens before t, so a logprob tensor of shape (B, T - 1) goes with `[:, 1:]` of these.

The rows of a group begin with the same prompt. Where it saves work, a microbatch holds it once, and its lines begin with the
last token before what trains.

What is known of the trained tokens lies flat, (tokens,), row after row (`TokenLayout`). Credit sees it by episode, (N, T), an
episode's tokens one after another; the model on the lines of a microbatch, (B, T - 1), among others: prompts, what tools said,
what a fork has from its parent. A mask says where they are in either view: `pad(values, mask)` lays them out, `padded[mask]` is
flat again.
"""

import math
from collections import Counter
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from agentrl.workflow.errors import RewardError, StateError
from agentrl.workflow.models.logprobs import Prefixes
from agentrl.workflow.token_chains import as_read, chains_of, context_of, reasons_not_to_train
from agentrl.workflow.training.advantages import TokenRewards
from agentrl.workflow.trajectory import Episode, Group, Step

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
            _row(number, index, context_of(episode, steps[0]), steps, idle)
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


def _row(
    episode: int, index: int, before: Sequence[tuple[int, float | None]], steps: Sequence[Step], idle: Container[int]
) -> Row:
    """The row of a chain after the tokens `before` it; the steps whose indices are `idle` do not train."""
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


def pad(values: Tensor, mask: Tensor) -> Tensor:
    """Lays flat values (tokens,) out where the mask is True; 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The order of the trained tokens of some episodes.

    Args:
        episodes: N of them, the rows' `episode` counts through them.
        rows: all their rows in which something trains.
        lengths: (N,), trained tokens of each.
        by_row: the flat places of each row's trained tokens, by `Row.key`.
    """

    episodes: Sequence[Episode]
    rows: Sequence[Row]
    lengths: Tensor
    by_row: Mapping[tuple[int, int], Tensor]

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> "TokenLayout":
        """Return the layout of these episodes' training rows, as they were read."""
        episodes = [as_read(episode)[0] for episode in episodes]
        rows = rows_of(episodes)
        counts = [sum(row.loss_mask) for row in rows]
        lengths = torch.zeros(len(episodes), dtype=torch.long)
        for row, count in zip(rows, counts, strict=True):
            lengths[row.episode] += count
        places = torch.split(torch.arange(sum(counts)), counts)
        return cls(episodes, rows, lengths, dict(zip((row.key for row in rows), places, strict=True)))

    @property
    def mask(self) -> Tensor:
        """Return (N, T), True where there is a token."""
        return torch.arange(int(self.lengths.max()) if len(self.lengths) else 0)[None] < self.lengths[:, None]

    def by_episode(self, values: Tensor) -> Tensor:
        """Return flat values as credit sees them, (N, T) float64."""
        return pad(values.double().cpu(), self.mask)

    def places(self, rows: Sequence[Row]) -> Tensor:
        """Return the flat places of these rows' trained tokens, in the order of the rows."""
        return torch.cat([self.by_row[row.key] for row in rows])

    def flatten(self, rows: Sequence[Row], values: Tensor) -> Tensor:
        """Return flat values from those of these rows' trained tokens, in the order of the rows; 0 for other rows' tokens."""
        return values.new_zeros(int(self.lengths.sum())).index_copy(0, self.places(rows).to(values.device), values)

    def make_earned(self, groups: Sequence[Group], penalty: Tensor | None = None, values: Tensor | None = None) -> TokenRewards:
        """Return the earnings of each token.

        Args:
            groups: those of the episodes, in their order.
            penalty: (N, T), taken off the rewards.
            values: (N, T), the critic's.

        Raises:
            RewardError: an episode's reward is missing, or no finite number.
            StateError: an episode is empty.
        """
        rewards = torch.zeros(self.mask.shape, dtype=torch.float64)
        turns, chains = (torch.zeros(self.mask.shape, dtype=torch.long) for _ in range(2))
        for number, episode in enumerate(self.episodes):
            _check(episode)
            _fill_rewards(episode, rewards[number], turns[number], chains[number])
        of = torch.tensor([number for number, group in enumerate(groups) for _ in group.episodes])
        outcomes = torch.tensor([episode.reward for episode in self.episodes], dtype=torch.float64)
        if penalty is not None:
            rewards, outcomes = rewards - penalty, outcomes - (penalty * self.mask).sum(-1)
        return TokenRewards(rewards, self.mask, turns, of, values, outcomes, chains)


def _check(episode: Episode) -> None:
    """Makes sure that an episode can be credited.

    Raises:
        RewardError: its reward, or that of one of its steps, is missing or no finite number.
        StateError: it has no step.
    """
    if not episode.steps:
        raise StateError(f"Episode {episode.id} is done and has no step.")
    rewards = [episode.reward, *(step.reward for step in episode.steps)]
    if not all(reward is not None and math.isfinite(reward) for reward in rewards):
        raise RewardError(f"Episode {episode.id} has a reward that cannot be credited: {', '.join(map(str, rewards))}.")


def _fill_rewards(episode: Episode, rewards: Tensor, turns: Tensor, chains: Tensor) -> None:
    """A step's reward goes to its last token; the last one of each chain also gets what the episode earned after it.

    That is what no step earned, which all chains share, and what later steps of other chains earned: to a chain the rest of its
    episode is the future. What a fork's inherited steps earned is none of its own tokens'.
    """
    end, rest = 0, float(episode.reward or 0.0) - sum(step.reward for step in episode.steps)
    idle = reasons_not_to_train(episode)
    last: dict[int, tuple[int, int]] = {}  # a chain's number -> its last token and step
    for step in (step for steps in chains_of(episode) for step in steps):
        if step.index in idle or not step.sampled_ids:
            continue
        start, end = end, end + len(step.sampled_ids)
        turns[start:end], chains[start:end] = step.index, step.chain
        rewards[end - 1] += step.reward
        last[step.chain] = end - 1, step.index
    for chain, (token, index) in last.items():
        later = sum(step.reward for step in episode.steps if step.index > index and step.chain != chain)
        rewards[token] += rest + later
