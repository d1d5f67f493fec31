"""Why an episode has its advantage: what rows lead to is what training computes, for every algorithm that ships."""

import random
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest

from agentrl.workflow.algorithms import gradients, resolve_options
from agentrl.workflow.analysis import outcome_text
from agentrl.workflow.analysis.credit_reasons import (
    _EXPLAIN,
    BY_EPISODE,
    Credit,
    Scored,
    credit_by_returns,
    explain_credit,
)
from agentrl.workflow.config import AlgorithmConfig
from agentrl.workflow.store.reads.ledger import FATES
from agentrl.workflow.token_chains import as_read, reasons_not_to_train
from agentrl.workflow.training.advantages import Credit as Credits
from agentrl.workflow.training.prepared_update import episode_advantages
from agentrl.workflow.training.training_rows import TokenLayout
from agentrl.workflow.trajectory import ROOT, Episode, Group, Task
from tests.support.told_turns import turn

TASK = Task("t", (), "")


def draw_groups(draw: random.Random) -> list[Group]:
    """An update's groups: episodes of several turns and chains, some turns unread, rewards of steps among them."""
    found, number = [], 0
    for slot in range(3):
        members = []
        for sample in range(draw.choice((2, 3, 4))):
            number += 1
            members.append(draw_episode(draw, number, sample))
        found.append(Group(TASK, tuple(members), slot))
    return found


def draw_episode(draw: random.Random, number: int, sample: int) -> Episode:
    """One of them."""
    made = []
    chains = 1
    for index in range(draw.randint(1, 5)):
        parts = index > 0 and draw.random() < 0.3
        chains += parts
        more = {"new_row": "it parts", "parent": ROOT, "chain": chains - 1} if parts else {"chain": chains - 1}
        sampled = draw.randint(1, 6)
        guided = tuple(place for place in range(sampled) if index + place and draw.random() < 0.2)
        step = turn(index, (0,) * draw.randint(1, 3), (0,) * sampled, guided=guided, **more)
        made.append(replace(step, reward=draw.choice((0.0, 0.0, 0.5)), delivered=draw.random() < 0.9 or index == 0))
    reward = draw.choice((0.0, 1.0, 1.0, 2.5))
    return Episode(TASK, sample, tuple(made), "done", "answered", reward=reward, id=number)


def scored(group: Group) -> list[Scored]:
    """The group's episodes as rows tell them."""
    return [Scored(each.id, group.slot, each.reward or 0.0, _trained_tokens(each)) for each in group.episodes]


def _trained_tokens(episode: Episode) -> int:
    read, _ = as_read(episode)
    idle = reasons_not_to_train(read)
    return sum(step.trainable_tokens for step in read.steps if step.index not in idle)


def options_of(name: str, convention: str = "verl", **more: object) -> AlgorithmConfig:
    """The algorithm's options, settled."""
    return resolve_options(AlgorithmConfig.model_validate({"name": name, "convention": convention, **more}))


def credit_of(name: str) -> Credits:
    """The function that training credits with."""
    module, _, function = gradients()[name].credit.partition(":")
    found: Credits = getattr(import_module(module), function)
    return found


def test_explain_credit_covers_every_algorithm() -> None:
    assert {*_EXPLAIN} == {*gradients()}


@pytest.mark.parametrize("convention", ["verl", "trl"])
@pytest.mark.parametrize("name", BY_EPISODE)
def test_explain_credit_equals_credit_of_training(name: str, convention: str) -> None:
    scales = ("group", "batch", "none") if "scale" in gradients()[name].options else (None,)
    draw = random.Random(name)
    for scale in scales:
        options = options_of(name, convention, **({"scale": scale} if scale else {}))
        for _ in range(20):
            groups = draw_groups(draw)
            layout = TokenLayout.of([each for group in groups for each in group.episodes])
            credited = credit_of(name)(layout.make_earned(groups), options)
            recorded = episode_advantages(credited, layout)
            update = [each for group in groups for each in scored(group)]
            for group in groups:
                for each in scored(group):
                    config = options.model_dump(mode="json")
                    found = explain_credit(Credit(name, config, recorded[each.id], each, scored(group), partial(tuple, update)))
                    assert found["computed"] == pytest.approx(recorded[each.id], abs=1e-6), (name, scale, found)
                    assert found["agrees"]


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("name", ["reinforce", "reinforce_plus_plus"])
def test_explain_credit_returns_equal_training_by_token(name: str, discount: float) -> None:
    options = options_of(name, discount=discount)
    draw = random.Random(5)
    for _ in range(30):
        groups = draw_groups(draw)
        episodes = [each for group in groups for each in group.episodes]
        layout = TokenLayout.of(episodes)
        credited = credit_of(name)(layout.make_earned(groups), options).advantages
        for number, episode in enumerate(episodes):
            found = credit_by_returns(episodes, episode.id, discount, whitened=name != "reinforce")
            told = [value for step in found.values() for value in step]
            assert told == pytest.approx(credited[number, : int(layout.lengths[number])].tolist(), abs=1e-6)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_explain_credit_skips_non_finite_rewards(reward: float) -> None:
    group = [Scored(1, 0, reward, 3), Scored(2, 0, 1.0, 3)]
    for name in _EXPLAIN:
        found = explain_credit(Credit(name, {}, 0.5, group[1], group, lambda: group))
        assert (found["computed"], found["value"]) == (None, 0.5)


def test_outcomes_each_have_a_sentence() -> None:
    assert {*outcome_text.SENTENCES} == {*FATES}
