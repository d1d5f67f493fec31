"""Which tokens credit sees, what each of them earned, and where its advantage goes."""

import math
from dataclasses import replace

import pytest
import torch

from agentrl.workflow.config import AlgorithmConfig
from agentrl.workflow.errors import RewardError, StateError
from agentrl.workflow.training.advantages import relative_to_group
from agentrl.workflow.training.training_rows import Row, TokenLayout, collate, pad
from agentrl.workflow.trajectory import Episode, Group, Message, Step, Task

TASK = Task("train/1", (), "")


def step(index: int, prompt: int, sampled: int, reward: float = 0.0, new_row: str | None = None) -> Step:
    ids = tuple(range(10 * index, 10 * index + sampled))
    said = Message("assistant", "")
    return Step(index, (), (7,) * prompt, ids, (-1.0,) * sampled, "stop", said, 0, new_row=new_row, reward=reward)


def episode(*steps: Step, reward: float = 1.0, number: int = 1) -> Episode:
    return Episode(TASK, steps=steps, status="done", reward=reward, id=number)


def tokens_of(*episodes: Episode) -> tuple[TokenLayout, list[Group]]:
    return TokenLayout.of(episodes), [Group(TASK, episodes)]


def test_token_rewards_stand_at_last_token_of_step_and_episode() -> None:
    tokens, groups = tokens_of(
        episode(step(0, 3, 2, reward=0.25), step(1, 4, 3, reward=0.5), reward=2.0), episode(step(0, 3, 1))
    )
    earned = tokens.make_earned(groups)
    assert earned.rewards.tolist() == [[0, 0.25, 0, 0, 1.75], [1, 0, 0, 0, 0]]
    assert earned.mask.tolist() == [[True] * 5, [True, *[False] * 4]]
    assert earned.turns[0].tolist() == [0, 0, 1, 1, 1]
    assert earned.totals.tolist() == [2.0, 1.0]
    assert earned.groups.tolist() == [0, 0]


def test_token_layout_converts_between_episodes_and_rows() -> None:
    """Two rows of one episode, tool text between, and a row of another."""
    tokens, _ = tokens_of(episode(step(0, 3, 2), step(1, 4, 1), step(2, 6, 2, new_row="the template")), episode(step(0, 2, 3)))
    flat = torch.arange(1.0, 9)
    whole = tokens.by_episode(flat)
    assert whole.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert whole[tokens.mask].tolist() == flat.tolist()
    longest_last = [tokens.rows[2], tokens.rows[0]]
    mask = collate(longest_last).loss_mask[:, 1:]
    lines = pad(flat[tokens.places(longest_last)], mask)
    assert lines.tolist() == [[0, 6, 7, 8, 0, 0, 0, 0, 0], [0, 0, 1, 2, 0, 0, 0, 0, 3]]
    assert tokens.flatten(longest_last, lines[mask]).tolist() == [1, 2, 3, 0, 0, 6, 7, 8]


def test_token_layout_of_fork_excludes_parent_tokens() -> None:
    forked = replace(episode(step(0, 3, 2, reward=0.25), step(1, 4, 3, reward=0.5), reward=2.0), fork_step=1)
    tokens, groups = tokens_of(forked)
    assert tokens.make_earned(groups).rewards.tolist() == [[0, 0, 1.75]], "what the inherited step earned is its parent's"
    assert tokens.make_earned(groups).totals.tolist() == [2.0], "its siblings have it too"


def test_token_rewards_of_equal_sums_are_equal() -> None:
    tokens, groups = tokens_of(
        episode(step(0, 3, 2, reward=0.2), step(1, 4, 3, reward=-0.1), reward=1.1), episode(step(0, 3, 1), reward=1.1)
    )
    assert not relative_to_group(tokens.make_earned(groups), AlgorithmConfig(scale="group")).advantages.any()


def test_token_rewards_subtract_penalty_and_carry_values() -> None:
    tokens, groups = tokens_of(episode(step(0, 3, 2)))
    earned = tokens.make_earned(groups, torch.tensor([[0.5, 0.25]]), torch.tensor([[9.0, 8.0]]))
    assert earned.rewards.tolist() == [[-0.5, 0.75]]
    assert earned.values is not None
    assert earned.values.tolist() == [[9, 8]]


@pytest.mark.parametrize("reward", [math.nan, math.inf, None])
def test_token_layout_names_episode_with_invalid_reward(reward: float | None) -> None:
    tokens, groups = tokens_of(replace(episode(step(0, 3, 2), number=41), reward=reward))
    with pytest.raises(RewardError, match="Episode 41 has a reward that is not a finite number"):
        tokens.make_earned(groups)


def test_token_layout_names_episode_with_invalid_step_reward() -> None:
    tokens, groups = tokens_of(episode(step(0, 3, 2, reward=math.nan), number=41))
    with pytest.raises(RewardError, match=r"Episode 41 has a reward that is not a finite number: 1.0, nan."):
        tokens.make_earned(groups)


def test_token_layout_names_empty_episode() -> None:
    tokens, groups = tokens_of(episode(number=41), episode(step(0, 3, 2)))
    with pytest.raises(StateError, match="Episode 41 is done and has no step"):
        tokens.make_earned(groups)


def test_training_row_without_trained_token_names_its_episode() -> None:
    with pytest.raises(StateError, match="Row 0 of episode 3 has no token that trains"):
        Row(3, 0, (1, 2), (False, True), (False, False), (0.0, -1.0))
