"""What GRPO makes of groups, by its formula alone."""

from collections.abc import Sequence

import torch

from agentrl.workflow.training.advantages import group_relative
from agentrl.workflow.trajectory import Group


def grpo_credits(groups: Sequence[Group]) -> list[list[float]]:
    """One advantage per episode, in the groups' order."""
    return [group_relative(torch.tensor([episode.reward for episode in group.episodes])).tolist() for group in groups]
