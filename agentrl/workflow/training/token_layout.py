"""The trained tokens of some episodes: flat where they are kept, padded where they are used.

What is known of them lies flat, (tokens,), row after row. Credit sees it by episode, (N, T), an episode's tokens one after
another; the model on the lines of a microbatch, (B, T - 1), among others: prompts, what tools said, what a fork has from its
parent. A mask says where they are in either view: `pad(values, mask)` lays them out, `padded[mask]` is flat again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.workflow.errors import RewardError, StateError
from agentrl.workflow.token_chains import as_read, chains_of, reasons_not_to_train
from agentrl.workflow.training.advantages import TokenRewards
from agentrl.workflow.training.training_rows import Row, rows_of
from agentrl.workflow.trajectory import Episode, Group


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
