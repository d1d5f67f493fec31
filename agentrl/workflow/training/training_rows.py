"""The conversion of episodes to tensors. Each chain of an episode (`workflow.token_chains`) is one training row.

The row of a later chain begins with the tokens that it shares with another chain; these train only in that other row. Every row
has the advantage of its episode. Rows are padded on the right and grouped by length, or by a common beginning.

Column t of a (B, T) tensor belongs to token t of `input_ids`. A logprob of token t is predicted from the tokens before t. So a
logprob tensor of shape (B, T - 1) belongs to columns `[:, 1:]` of the other tensors.

A line is a row of a microbatch's tensors, and contains one training row. If this saves work, a beginning that several training
rows have in common, such as a group's prompt, is stored only once. Their lines then begin with the last token before the first
trained token.

Values of trained tokens are stored flat, (tokens,), row after row (`TokenLayout`). There are two views of them:

- by episode, (N, T), for advantages: the trained tokens of each episode, one after another
- on the lines of a microbatch, (B, T - 1), for the model: at their places between the tokens that do not train

Each view has a mask: `pad(values, mask)` lays flat values out, and `padded[mask]` is flat again.
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
"""The token id of padding. The attention mask hides it, so any id of the vocabulary would do."""

CALL_TOKENS = 128
"""The cost of the additional model call that reads shared beginnings, as a number of tokens."""

PREFIX_TOKENS_PER_TOKEN = 16
"""The number of tokens of a shared beginning that take as much memory as one token of a row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training row as plain values. Each sequence has one entry per token.

    Args:
        episode: the index into the episodes that the rows were made from.
        index: the number of the row within its episode.
        input_ids: the exact ids; text is never tokenized again.
        action_mask: True if the policy sampled the token.
        loss_mask: True if the token trains. A subset of `action_mask`: tokens of a fork's parent or of another chain do not
            train. At least one token trains.
        behavior_logprobs: logprobs as the sampler computed them; 0 if the token was not sampled.
        weight: the row's share of its episode; the shares of an episode's rows sum to 1.

    Attributes:
        prefix: the number of tokens before the one that predicts the first trained token.
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
        """The key that identifies the row: `episode` and `index`."""
        return self.episode, self.index


@dataclass(frozen=True, slots=True)
class Microbatch:
    """B training rows as tensors, for one forward and backward pass. Each tensor is (B, T), except `weights` (B,): one divided
    by the number of training rows of the row's episode. If `prefixes` is None, the tensors contain complete rows. Otherwise
    `prefixes` contains the common beginnings of the rows, and the tensors contain only the tokens after them.
    """

    prefixes: Prefixes | None
    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor
    weights: Tensor


def rows_of(episodes: Sequence[Episode]) -> list[Row]:
    """Return the training rows of the episodes, in the order of the episodes and their chains.

    Turns that the client did not receive are left out (`as_read`). Rows without a trained token are left out too.
    """
    rows: list[Row] = []
    for number, (episode, _) in enumerate(map(as_read, episodes)):
        idle = reasons_not_to_train(episode)
        rows += (
            _row(number, index, context_of(episode, steps[0]), steps, idle)
            for index, steps in enumerate(chains_of(episode))
            if any(step.index not in idle and step.trainable_tokens for step in steps)
        )
    counts = Counter(row.episode for row in rows)
    return [row if counts[row.episode] == 1 else replace(row, weight=1 / counts[row.episode]) for row in rows]


def microbatches(rows: Sequence[Row], tokens: int, at_least: int = 1, share: bool = False) -> list[list[Row]]:
    """Split the rows into microbatches of rows of similar length.

    The longest rows come first, so a microbatch that does not fit into memory fails early.

    Args:
        tokens: the most tokens of a microbatch, padding included. A longer row gets its own microbatch.
        at_least: the least number of microbatches; with fewer rows, each row is a microbatch.
        share: whether to group rows by a common beginning instead, if the model then reads fewer tokens.
    """
    max_rows = max(1, len(rows) // at_least)
    by_length = sorted(rows, key=lambda row: (-len(row.input_ids), row.episode, row.index))
    if not share:
        return _fill_microbatches([(row, None) for row in by_length], tokens, max_rows)[0]
    longest: dict[tuple[int, ...], int] = {}
    entries = [(row, longest.setdefault(_beginning(row), place)) for place, row in enumerate(by_length)]
    plans = [_fill_microbatches(order, tokens, max_rows) for order in (entries, sorted(entries, key=lambda pair: pair[1]))]
    return min(plans, key=lambda plan: plan[1] + len(plan[0]) * CALL_TOKENS)[0]


def row_tokens(row: Row) -> int:
    """Return the number of tokens of a row, without padding."""
    return len(row.input_ids)


def size(rows: Sequence[Row], share: bool = False) -> int:
    """Return the number of padded tokens that the model reads for a microbatch of these rows."""
    extent = _Extent()
    for row in rows:
        extent.add(row, _beginning(row) if share else None)
    return extent.size()


def collate(rows: Sequence[Row], device: torch.device | str = "cpu", share: bool = False) -> Microbatch:
    """Return the rows as tensors, padded on the right to the longest row.

    With `share`, a common beginning of rows is stored once, if the model then reads fewer tokens.
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
    """Make the training row of a chain.

    Args:
        before: the tokens before the chain's own steps, each with its logprob; None if the token was not sampled.
        steps: the steps of the chain.
        idle: the indices of the steps that do not train.
    """
    ids = [token for token, _ in before]
    mask = [logprob is not None for _, logprob in before]
    trains = [False] * len(before)
    logprobs = [logprob or 0.0 for _, logprob in before]
    for step in steps:
        ids += (*step.prompt_ids, *step.sampled_ids)
        mask += [False] * len(step.prompt_ids) + [True] * len(step.sampled_ids)
        guided = frozenset(step.guided)
        trains += [False] * len(step.prompt_ids)
        trains += [step.index not in idle and place not in guided for place in range(len(step.sampled_ids))]
        logprobs += (*(0.0,) * len(step.prompt_ids), *step.behavior_logprobs)
    return Row(episode, index, tuple(ids), tuple(mask), tuple(trains), tuple(logprobs))


class _Extent:
    """A counter of the tokens that the model reads. Rows are added one by one.

    Each row is added with an identifier of its beginning, or with None if beginnings are not shared.
    """

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
        """Return the number of tokens for all added rows, padding included."""
        whole = self.rows * self._longest
        if not self._beginnings:
            return whole
        lines = self.rows * (self._line + self._prefix // PREFIX_TOKENS_PER_TOKEN)
        return min(whole, len(self._beginnings) * self._prefix + lines + CALL_TOKENS)


def _fill_microbatches(order: Sequence[tuple[Row, Hashable | None]], tokens: int, max_rows: int) -> tuple[list[list[Row]], int]:
    """Fill microbatches with the rows in this order, each as far as the limits allow.

    Returns:
        The microbatches, and the total number of tokens that the model reads for them.
    """
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
    """Return a tensor of the mask's shape with the flat values (tokens,) where the mask is True, in order, and 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The order of the trained tokens of some episodes in flat tensors.

    Args:
        episodes: the N episodes; `Row.episode` is the index into them.
        rows: all rows of the episodes that have trained tokens.
        lengths: (N,), the number of trained tokens of each episode.
        by_row: the flat indices of each row's trained tokens, by `Row.key`.
    """

    episodes: Sequence[Episode]
    rows: Sequence[Row]
    lengths: Tensor
    by_row: Mapping[tuple[int, int], Tensor]

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> "TokenLayout":
        """Return the layout of the trained tokens of these episodes. Each episode is used as its client read it (`as_read`)."""
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
        """The mask (N, T) of the view by episode: True for a token, False for padding."""
        return torch.arange(int(self.lengths.max()) if len(self.lengths) else 0)[None] < self.lengths[:, None]

    def by_episode(self, values: Tensor) -> Tensor:
        """Lay out flat values by episode, (N, T) float64, on the CPU."""
        return pad(values.double().cpu(), self.mask)

    def places(self, rows: Sequence[Row]) -> Tensor:
        """Return the flat indices of these rows' trained tokens, in the order of the rows."""
        return torch.cat([self.by_row[row.key] for row in rows])

    def flatten(self, rows: Sequence[Row], values: Tensor) -> Tensor:
        """Return a tensor (tokens,) with one value for each token of the layout: a value of `values`, or 0 for a token that is
        not in `rows`.

        Args:
            rows: the rows that have values.
            values: the values of the trained tokens of `rows`, in the order of the rows.
        """
        return values.new_zeros(int(self.lengths.sum())).index_copy(0, self.places(rows).to(values.device), values)

    def make_earned(self, groups: Sequence[Group], penalty: Tensor | None = None, values: Tensor | None = None) -> TokenRewards:
        """Return the rewards of each token. Raise RewardError if an episode's reward is missing, or not a finite number. Raise
        StateError if an episode has no step.

        Args:
            groups: the groups of the episodes, in the order of the episodes.
            penalty: (N, T), subtracted from the rewards.
            values: (N, T), the critic's values.
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
    """Raise RewardError if a reward of the episode is missing or not finite, StateError if the episode has no step."""
    if not episode.steps:
        raise StateError(f"Episode {episode.id} is done and has no step.")
    rewards = [episode.reward, *(step.reward for step in episode.steps)]
    if not all(reward is not None and math.isfinite(reward) for reward in rewards):
        raise RewardError(f"Episode {episode.id} has a reward that is not a finite number: {', '.join(map(str, rewards))}.")


def _fill_rewards(episode: Episode, rewards: Tensor, turns: Tensor, chains: Tensor) -> None:
    """Write the rewards, steps and chains of an episode's trained tokens into the tensors (T,).

    The last token of a step gets the step's reward. The last token of each chain also gets the part of the episode's reward
    that belongs to no step, and the rewards of later steps of other chains. Rewards of a fork's inherited steps go to no token.
    """
    end, rest = 0, float(episode.reward or 0.0) - sum(step.reward for step in episode.steps)
    idle = reasons_not_to_train(episode)
    last: dict[int, tuple[int, int]] = {}  # a chain's number -> its last token and step
    for step in (step for steps in chains_of(episode) for step in steps):
        if step.index in idle or not step.trainable_tokens:
            continue
        start, end = end, end + step.trainable_tokens
        turns[start:end], chains[start:end] = step.index, step.chain
        rewards[end - 1] += step.reward
        last[step.chain] = end - 1, step.index
    for chain, (token, index) in last.items():
        later = sum(step.reward for step in episode.steps if step.index > index and step.chain != chain)
        rewards[token] += rest + later
