"""From episodes to what credit sees, and from its advantages back to training rows.

Credit works on (N, T): the trained tokens of N episodes, one after another. Rows hold the same tokens among others: prompts,
what tools said, what a fork has from its parent. `TokenLayout` knows which is which.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.workflow.errors import RewardError, StateError
from agentrl.workflow.training.advantages import Earned
from agentrl.workflow.training.batch import Row
from agentrl.workflow.trajectory import Episode, Group

Constants = dict[tuple[int, int], Tensor]
"""One value for each token after a row's prefix, without gradient, by `Row.key`."""


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The trained tokens of some episodes, and where in their rows they are.

    Args:
        episodes: N of them, the rows' `episode` counts through them.
        rows: all their rows in which something trains.
        lengths: (N,), trained tokens of each.
    """

    episodes: Sequence[Episode]
    rows: Sequence[Row]
    lengths: Tensor

    @classmethod
    def of(cls, episodes: Sequence[Episode], rows: Sequence[Row]) -> "TokenLayout":
        """The layout of these episodes and their rows (`training.batch.rows_of`)."""
        lengths = torch.zeros(len(episodes), dtype=torch.long)
        for row in rows:
            lengths[row.episode] += sum(row.loss_mask)
        return cls(episodes, rows, lengths)

    @property
    def mask(self) -> Tensor:
        """(N, T), True where there is a token."""
        return torch.arange(int(self.lengths.max()) if len(self.lengths) else 0)[None] < self.lengths[:, None]

    def gather(self, known: Mapping[tuple[int, int], Tensor]) -> Tensor:
        """Gathers values of the rows' tokens as (N, T) float64."""
        whole = torch.zeros(self.mask.shape, dtype=torch.float64)
        filled = [0] * len(self.episodes)
        for row in self.rows:
            values = known[row.key][_trained_mask(row)].double().cpu()
            start = filled[row.episode]
            whole[row.episode, start : start + len(values)] = values
            filled[row.episode] += len(values)
        return whole

    def scatter(self, values: Tensor) -> Constants:
        """Reverses `gather`: (N, T) -> by row, 0 where nothing trains."""
        found: Constants = {}
        filled = [0] * len(self.episodes)
        for row in self.rows:
            trains = _trained_mask(row)
            line = torch.zeros(len(trains), dtype=torch.float64)
            count, start = int(trains.sum()), filled[row.episode]
            line[trains] = values[row.episode, start : start + count]
            filled[row.episode] += count
            found[row.key] = line
        return found

    def make_earned(self, groups: Sequence[Group], penalty: Tensor | None = None, values: Tensor | None = None) -> Earned:
        """What each token earned.

        Args:
            groups: those of the episodes, in their order.
            penalty: (N, T), taken off the rewards.
            values: (N, T), the critic's.

        Raises:
            RewardError: an episode's reward is missing, or no finite number.
            StateError: an episode is empty.
        """
        rewards, turns = torch.zeros(self.mask.shape, dtype=torch.float64), torch.zeros(self.mask.shape, dtype=torch.long)
        for number, episode in enumerate(self.episodes):
            _check(episode)
            _fill_rewards(episode, rewards[number], turns[number])
        of = torch.tensor([number for number, group in enumerate(groups) for _ in group.episodes])
        outcomes = torch.tensor([episode.reward for episode in self.episodes], dtype=torch.float64)
        if penalty is not None:
            rewards, outcomes = rewards - penalty, outcomes - (penalty * self.mask).sum(-1)
        return Earned(rewards, self.mask, turns, of, values, outcomes)


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


def _fill_rewards(episode: Episode, rewards: Tensor, turns: Tensor) -> None:
    """A step's reward goes to its last token, what no step earned to the episode's own last one.

    What a fork's inherited steps earned is none of its own tokens'.
    """
    end, rest = 0, float(episode.reward or 0.0) - sum(step.reward for step in episode.steps)
    for step in episode.steps:
        if step.index < episode.fork_step or not step.sampled_ids:
            continue
        start, end = end, end + len(step.sampled_ids)
        turns[start:end] = step.index
        rewards[end - 1] += step.reward
    if end:
        rewards[end - 1] += rest


def _trained_mask(row: Row) -> Tensor:
    return torch.tensor(row.loss_mask[row.prefix + 1 :])
