"""Credit: how much better than expected an episode was. Pure functions of reward tensors; no model, no token, no row."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workflow.errors import StateError
from workflow.trajectory import Group

Credit = Callable[[Sequence[Group]], tuple[tuple[float, ...], ...]]
"""Groups of finished episodes -> one advantage per episode, in their order."""

VERL_EPSILON = 1e-6
TRL_EPSILON = 1e-4


def relative_to_group(groups: Sequence[Group]) -> tuple[tuple[float, ...], ...]:
    """Each episode's reward against the mean of its group, in units of the group's standard deviation.

    Raises:
        StateError: an episode without a reward.
    """
    return tuple(tuple(group_relative(_rewards(group)).tolist()) for group in groups)


def _rewards(group: Group) -> Tensor:
    rewards = [episode.reward for episode in group.episodes]
    if any(reward is None for reward in rewards):
        raise StateError(f"The group of task {group.task.key!r} has an episode without a reward.")
    return torch.tensor(rewards, dtype=torch.float64)


def group_relative(rewards: Tensor, epsilon: float = VERL_EPSILON) -> Tensor:
    """GRPO's advantage within one group, A = (R - mean) / (std + epsilon), std unbiased.

    Args:
        rewards: (G,) the scalar rewards of one group's episodes.
        epsilon: 1e-6 is verl's and the default, 1e-4 is TRL's. The smaller one lets A depend less on the rewards' scale,
            which is what the division is there for; a group without variance is caught exactly, not by epsilon.

    Returns:
        (G,) float64. Equal rewards give exactly 0. A group of one keeps its reward, as in verl (mean 0, std 1).

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision).
    """
    rewards = rewards.double()
    if len(rewards) == 1:
        return rewards / (1 + epsilon)
    # The rounded mean of equal numbers need not be that number, and the tiny rest would be divided by epsilon.
    if torch.equal(rewards, rewards[:1].expand_as(rewards)):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + epsilon)
