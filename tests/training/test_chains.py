"""Episodes of several chains: what makes a row, what trains, and what each algorithm makes of them. Numbers by hand."""

from dataclasses import replace
from itertools import compress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workflow.algorithms import gradients, resolve_options
from agentrl.workflow.config import AlgorithmConfig
from agentrl.workflow.plugins import find
from agentrl.workflow.token_chains import UNREAD, as_read, chains_of, context_of, reasons_not_to_train
from agentrl.workflow.training.losses import Normaliser, TokenBatch, policy_loss
from agentrl.workflow.training.training_rows import TokenLayout, collate, pad, rows_of
from agentrl.workflow.trajectory import ROOT, Episode, Group, Message, Step, Task

TASK = Task("train/1", (), "")
SAID = Message("assistant", "")


def step(index: int, sampled: int, parent: int | None = None, **named: Any) -> Step:
    ids = tuple(range(10 * index, 10 * index + sampled))
    logprobs = tuple(-1.0 - token / 64 for token in ids)
    return Step(index, (), (7,) * (index + 1), ids, logprobs, "stop", SAID, 0, parent=parent, **named)


def episode(*steps: Step, reward: float = 1.0, number: int = 1) -> Episode:
    return Episode(TASK, steps=steps, status="done", reward=reward, id=number)


FORKED = episode(step(0, 2), step(1, 1, 0, chain=1, shared=2), step(2, 1, 0))
"""Chain 0: steps 0 and 2. Chain 1 shares with it the prompt of step 0 and the first token that it sampled."""


def test_chain_row_has_shared_prefix_and_trains_own_tokens() -> None:
    main, other = rows_of([FORKED])
    assert main.input_ids == (7, 0, 1, 7, 7, 7, 20)
    assert list(compress(main.input_ids, main.loss_mask)) == [0, 1, 20]
    assert other.input_ids == (7, 0, 7, 7, 10)
    assert other.action_mask == (False, True, False, False, True), "that the policy sampled it is a fact"
    assert list(compress(other.input_ids, other.loss_mask)) == [10]
    assert other.behavior_logprobs == (0, -1.0, 0, 0, -1.0 - 10 / 64)
    assert (main.weight, other.weight) == (0.5, 0.5)


def test_chain_may_share_all_of_a_partly_shared_row() -> None:
    deep = episode(step(0, 2), step(1, 2, 0, chain=1, shared=2), step(2, 1, 1, chain=2), step(3, 1, 1, chain=1))
    assert [[one.index for one in steps] for steps in chains_of(deep)] == [[0], [1, 3], [2]]
    for row, steps in zip(rows_of([deep]), chains_of(deep), strict=True):
        assert row.input_ids == deep.tokens_of(steps[-1].index)
    trained = [token for row in rows_of([deep]) for token in compress(row.input_ids, row.loss_mask)]
    assert sorted(trained) == sorted(token for one in deep.steps for token in one.sampled_ids)


@st.composite
def trees(draw: st.DrawFn) -> Episode:
    """Any episode: each step goes on from a chain's end, or begins another chain with a part of any line, or with nothing."""
    made: list[Step] = []
    for index in range(draw(st.integers(1, 6))):
        parent = draw(st.integers(ROOT, index - 1))
        goes_on = parent != ROOT and all(one.parent != parent or one.chain != made[parent].chain for one in made)
        chain = made[parent].chain if goes_on else max((one.chain for one in made), default=-1) + 1
        most = len(episode(*made).tokens_of(parent))
        shared = None if goes_on else draw(st.none() | st.integers(0, most))
        made.append(step(index, draw(st.integers(0, 3)), parent, chain=chain, shared=shared, delivered=draw(st.booleans())))
    return episode(*made)


@given(trees())
def test_read_episode_keeps_tokens_of_any_tree(told: Episode) -> None:
    read, places = as_read(told)
    idle = reasons_not_to_train(told)
    assert list(places) == [one.index for one in told.steps if one.index not in idle]
    for one, place in zip(read.steps, places, strict=True):
        assert one.index == read.steps.index(one)
        assert read.tokens_of(one.index) == told.tokens_of(place)
        assert one.sampled_ids == told.steps[place].sampled_ids
    assert as_read(read)[0] == read
    assert not reasons_not_to_train(read)


def test_repeated_request_trains_like_undisturbed_episode() -> None:
    calm = episode(step(0, 2), step(1, 3, 0), step(2, 2, chain=1, parent=0, shared=2))

    def again(one: Step, index: int, **named: Any) -> Step:
        return replace(one, index=index, **named)

    first, second, third = calm.steps
    cut = {"delivered": False, "sampled_ids": (5,), "behavior_logprobs": (-2.0,)}
    broken = episode(
        again(first, 0, **cut),
        again(first, 1, parent=0, shared=1, chain=1, prompt_ids=()),
        again(second, 2, parent=1, chain=1, **cut),
        again(second, 3, parent=1, chain=2, new_row="another step continues its parent"),
        again(third, 4, parent=2, chain=3, shared=2, **cut),
        again(third, 5, parent=1, chain=4, shared=2),
    )
    assert rows_of([broken]) == rows_of([calm])
    read, places = as_read(broken)
    assert list(places) == [1, 3, 5]
    assert [one.chain for one in read.steps] == [0, 0, 1]
    assert [one.prompt_ids for one in read.steps] == [one.prompt_ids for one in calm.steps]


@given(trees())
def test_chain_rows_train_each_sampled_token_once_or_give_reason(told: Episode) -> None:
    rows, idle, read = rows_of([told]), reasons_not_to_train(told), as_read(told)[0]
    chains = chains_of(read)
    for one in (told, read):
        assert sorted(step.index for steps in chains_of(one) for step in steps) == [step.index for step in one.steps]
    for row in rows:
        assert row.input_ids == read.tokens_of(chains[row.index][-1].index)
        known = [0.0 if logprob is None else logprob for _, logprob in context_of(read, chains[row.index][0])]
        assert list(row.behavior_logprobs[: len(known)]) == known
    trained = sorted(token for row in rows for token in compress(row.input_ids, row.loss_mask))
    assert trained == sorted(token for one in told.steps if one.index not in idle for token in one.sampled_ids)
    assert sum(row.weight for row in rows) == pytest.approx(float(bool(rows)))
    assert not rows or len(TokenLayout.of([told]).make_earned([Group(TASK, (told,))]).turns[0]) == len(trained)


def test_undelivered_step_without_continuation_does_not_train() -> None:
    lost = replace(FORKED, steps=(*FORKED.steps[:2], replace(FORKED.steps[2], delivered=False)))
    assert reasons_not_to_train(lost) == {2: UNREAD}
    assert [list(compress(row.input_ids, row.loss_mask)) for row in rows_of([lost])] == [[0, 1], [10]]
    alone = replace(FORKED, steps=(FORKED.steps[0], replace(FORKED.steps[1], delivered=False), FORKED.steps[2]))
    (row,) = rows_of([alone])
    assert (row.index, row.weight) == (0, 1.0), "a row in which nothing trains is left out, and weighs nothing"


def test_undelivered_step_with_continuation_trains() -> None:
    first = replace(FORKED.steps[0], delivered=False)
    assert reasons_not_to_train(replace(FORKED, steps=(first, *FORKED.steps[1:]))) == {}
    assert reasons_not_to_train(episode(first, FORKED.steps[1])) == {0: UNREAD}, "only its beginning was continued"


def test_chain_rows_without_numbers_are_unchanged() -> None:
    old = episode(step(0, 2, new_row="first"), step(1, 1), step(2, 1, new_row="the template"), step(3, 1))
    assert [[one.index for one in steps] for steps in chains_of(old)] == [[0, 1], [2, 3]]
    tokens = TokenLayout.of([old])
    earned = tokens.make_earned([Group(TASK, (old,))])
    assert earned.rewards.tolist() == [[0, 0, 0, 0, 1]]
    assert find("credits", "agentrl.workflow.training.advantages:returns_to_go")(
        earned, AlgorithmConfig(discount=0.5)
    ).advantages.tolist() == [[0.0625, 0.125, 0.25, 0.5, 1]]


def test_chain_last_turn_gets_outcome_and_later_rewards() -> None:
    rewards = (0.125, 0.25, 0.5)
    steps = tuple(replace(one, reward=reward) for one, reward in zip(FORKED.steps, rewards, strict=True))
    told = replace(FORKED, steps=steps, reward=2.0)
    earned = TokenLayout.of([told]).make_earned([Group(TASK, (told,))])
    assert earned.turns.tolist() == [[0, 0, 2, 1]]
    assert earned.chains is not None
    assert earned.chains.tolist() == [[0, 0, 0, 1]]
    assert earned.rewards.tolist() == [[0, 0.125, 0.5 + 1.125, 0.25 + 1.125 + 0.5]]
    assert earned.totals.tolist() == [2.0], "the baseline is the episode's"


# Each algorithm: a group of FORKED with reward 1 and an episode of one chain, two tokens long, with reward 0.

PAIR = (FORKED, episode(step(0, 2), reward=0.0, number=2))
NEW = torch.tensor([-1.0, -1, -1, -1, -2, -2], dtype=torch.float64)
RATIO = torch.tensor([1.1, 1.1, 1.1, 0.9, 0.9, 0.9], dtype=torch.float64)
VALUES = torch.tensor([0.2, 0.4, 0.6, 0.5, 0.3, 0.1], dtype=torch.float64)
DEVIATIONS = [0.5**0.5] * 4 + [-(0.5**0.5)] * 2

GOLDEN: dict[str, tuple[dict[str, Any], list[float], float]] = {
    # (-1.1 a x 3 - 0.9 a - 0.9 b x 2) / 6 tokens
    "grpo": ({}, DEVIATIONS, -0.282843),
    "dapo": ({}, DEVIATIONS, -0.282843),
    "rloo": ({}, [1.0] * 4 + [-1.0] * 2, -0.4),
    "pass_at_k": ({}, [2**0.5] * 4 + [0.0] * 2, -0.989949),
    # (-3.3 a / 2 - 0.9 a / 2 - 1.8 b) / (2 episodes x 10)
    "dr_grpo": ({}, [0.5] * 4 + [-0.5] * 2, -0.0075),
    # 4 and 2 tokens: R - 4/6
    "opo": ({}, [1 / 3] * 4 + [-2 / 3] * 2, -0.222222),
    # one ratio for each chain: (-(1.1 + 0.9) / 2 a - 0.9 b) / 2 episodes
    "gspo": ({"clip_low": 0.2, "clip_high": 0.2}, DEVIATIONS, -0.0353553),
    "cispo": ({}, DEVIATIONS, 0.0707107),
    # gates of 2.099917, 1.900083, 1.804853: (-(2.099917 + 1.900083) / 2 a - 1.804853 b) / 2 episodes
    "sapo": ({}, DEVIATIONS, -0.0689949),
    # the return does not leave a chain
    "reinforce": ({"discount": 0.5}, [0.25, 0.5, 1, 1, 0, 0], 0.458333),
    "reinforce_plus_plus": ({"discount": 0.5}, [-0.454169, 0.090834, 1.180843, 1.180843, -0.999174, -0.999174], -0.0272508),
    "reinforce_plus_plus_baseline": ({}, [0.645497] * 4 + [-1.290994] * 2, -0.0645497),
    # before the whitening 0.4, 0.4, 0.4 | 0.5 | -0.25, -0.1
    "ppo": ({"gae_lambda": 0.5}, [0.554092] * 3 + [0.870716, -1.503964, -1.029028], -0.0554092),
    # turns of chain 0 are steps 0 and 2; before the whitening 0.2, 0, 0.4 | 0.5 | -0.25, -0.1
    "turn_ppo": (
        {"discount": 0.5, "gae_lambda": 0.5},
        [0.25612, -0.426867, 0.939108, 1.280602, -1.280602, -0.768361],
        -0.025612,
    ),
}
"""Algorithm -> its options; the advantages of chain 0, chain 1 and the other episode; the loss."""


@pytest.mark.parametrize("name", gradients())
def test_algorithms_treat_chains_as_documented(name: str) -> None:
    named, advantages, loss = GOLDEN[name]
    algorithm, options = find("algorithms", name), resolve_options(AlgorithmConfig(name=name, **named))
    tokens = TokenLayout.of(PAIR)
    earned = tokens.make_earned([Group(TASK, PAIR)], values=tokens.by_episode(VALUES) if algorithm.critic else None)
    credited = find("credits", algorithm.credit)(earned, options)
    flat = credited.advantages[tokens.mask]
    assert flat.tolist() == pytest.approx(advantages, abs=2e-6)
    if name == "ppo":
        assert credited.returns[tokens.mask].tolist() == pytest.approx([0.6, 0.8, 1, 1, 0.05, 0])
    rows = collate(tokens.rows)
    mask = rows.loss_mask[:, 1:]
    new, old, credit = (pad(values[tokens.places(tokens.rows)], mask) for values in (NEW, NEW - RATIO.log(), flat))
    batch = TokenBatch(new, old, credit, mask, weights=rows.weights)
    found = policy_loss(find("surrogates", algorithm.surrogate_of(options)), batch, options, Normaliser(6, 3, 10, 2)).loss
    assert float(found) == pytest.approx(loss, abs=2e-6)
