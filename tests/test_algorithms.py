"""Advantages, losses and GRPO: published numbers, and the laws that hold for any numbers."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workflow.advantages import TRL_EPSILON, VERL_EPSILON, group_relative, relative_to_group
from workflow.algorithms import Algorithm
from workflow.algorithms.grpo import grpo
from workflow.config import AlgorithmConfig
from workflow.errors import StateError
from workflow.losses import AGGREGATIONS, Normaliser, TokenBatch, aggregate, clipped_surrogate, clipped_with_kl, k3
from workflow.plugins import find
from workflow.trajectory import Episode, Group, Task

# One batch with known answers: computed by running verl's core_algos.py (2026-01-29) and TRL 1.16.0's GRPO loss, float32.
REWARDS = ((1.0, 0.0), (0.5, 0.25))
MASK = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
OLD = torch.tensor(
    [
        [-1, -0.5, -9, -9, -2, -0.1],
        [-0.3, -0.7, -1.1, -9, -9, -9],
        [-0.2, -9, -0.4, -0.6, -0.8, -9],
        [-1.5, -1.2, -0.9, -0.6, -0.3, -0.05],
    ],
    dtype=torch.float64,
)
NEW = OLD + torch.tensor(
    [
        [0.1, -0.3, 3, 3, 0.25, 0],
        [-0.4, 0.05, 0.3, 3, 3, 3],
        [0, 3, 0.5, -0.1, 0.2, 3],
        [0.02, -0.02, 0.4, -0.5, 0.1, 1.3],
    ],
    dtype=torch.float64,
)
REFERENCE = OLD - torch.tensor([0.05, -0.1, 0.2, 0, -0.3, 0.15], dtype=torch.float64)
WHOLE = Normaliser(tokens=17, rows=4, width=6)
VERL = {
    "token-mean": 0.127540,
    "seq-mean-token-sum": 0.542046,
    "seq-mean-token-mean": 0.058964,
    "seq-mean-token-sum-norm": 0.361364,
}
TRL = {"seq-mean-token-mean": 0.078642, "token-mean": 0.155276, "seq-mean-token-sum-norm-trl": 0.109987}
CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.28)


def advantages(epsilon: float) -> Tensor:
    return torch.cat([group_relative(torch.tensor(rewards), epsilon) for rewards in REWARDS])


def surrogate(epsilon: float, dual_clip: float | None) -> Tensor:
    per_row = advantages(epsilon)[:, None].expand_as(OLD)
    return clipped_surrogate(NEW - OLD, per_row, 0.2, 0.28, dual_clip)[0]


def batch_of(reference: Tensor | None = None) -> TokenBatch:
    return TokenBatch(NEW, OLD, advantages(VERL_EPSILON)[:, None].expand_as(OLD), MASK, reference)


def groups_of(*rewards: tuple[float | None, ...]) -> list[Group]:
    task = Task("train/1", (), "")
    return [Group(task, tuple(Episode(task, reward=reward, status="done") for reward in group)) for group in rewards]


# --- published numbers ------------------------------------------------------------------------------------------------------


def test_advantages_are_those_of_verl_and_trl() -> None:
    assert advantages(VERL_EPSILON).tolist() == pytest.approx([0.707106, -0.707106, 0.707103, -0.707103], abs=1e-5)
    assert advantages(TRL_EPSILON).tolist() == pytest.approx([0.707007, -0.707007, 0.706707, -0.706707], abs=1e-5)


@pytest.mark.parametrize("name", VERL)
def test_the_clipped_loss_with_dual_clip_is_that_of_verl(name: str) -> None:
    assert float(aggregate(surrogate(VERL_EPSILON, 3.0), MASK, name, WHOLE)) == pytest.approx(VERL[name], abs=1e-5)


@pytest.mark.parametrize("name", TRL)
def test_the_clipped_loss_without_dual_clip_is_that_of_trl(name: str) -> None:
    assert float(aggregate(surrogate(TRL_EPSILON, None), MASK, name, WHOLE)) == pytest.approx(TRL[name], abs=1e-5)


def test_the_kl_estimate_is_that_of_verl() -> None:
    assert float(aggregate(k3(NEW, REFERENCE), MASK, "token-mean", WHOLE)) == pytest.approx(0.088996, abs=1e-5)


def test_the_loss_with_kl_is_that_of_trl() -> None:
    per_token = surrogate(TRL_EPSILON, None) + 0.1 * k3(NEW, REFERENCE)
    assert float(aggregate(per_token, MASK, "seq-mean-token-mean", WHOLE)) == pytest.approx(0.086355, abs=1e-5)


def test_grpo_is_verls_convention_by_default() -> None:
    terms = clipped_with_kl(batch_of(), CONFIG, WHOLE)
    assert float(terms.loss) == pytest.approx(0.127540, abs=1e-5)
    with_kl = clipped_with_kl(batch_of(REFERENCE), replace_kl(0.1), WHOLE)
    assert float(with_kl.loss) == pytest.approx(0.127540 + 0.1 * 0.088996, abs=1e-5)
    assert float(with_kl.sums["kl"]) / 17 == pytest.approx(0.088996, abs=1e-5)
    assert [value for group in relative_to_group(groups_of(*REWARDS)) for value in group] == pytest.approx(
        [0.707106, -0.707106, 0.707103, -0.707103], abs=1e-5
    )


def replace_kl(kl_coef: float) -> AlgorithmConfig:
    return CONFIG.model_copy(update={"kl_coef": kl_coef})


def test_find_returns_the_algorithm() -> None:
    assert find("algorithms", "grpo") is grpo
    assert isinstance(grpo, Algorithm)
    assert grpo.needs_group


def test_an_episode_without_a_reward_is_an_error_not_a_zero() -> None:
    with pytest.raises(StateError, match="'train/1' has an episode without a reward"):
        relative_to_group(groups_of((1.0, None)))


# --- laws -------------------------------------------------------------------------------------------------------------------

REWARD = st.floats(-1e3, 1e3)


@given(REWARD, st.integers(2, 20))
def test_equal_rewards_give_exactly_no_advantage(reward: float, count: int) -> None:
    assert group_relative(torch.full((count,), reward)).tolist() == [0.0] * count


@given(st.lists(REWARD, min_size=2, max_size=20))
def test_advantages_of_a_group_add_up_to_zero_and_keep_the_order(rewards: list[float]) -> None:
    values = group_relative(torch.tensor(rewards, dtype=torch.float64)).tolist()
    assert sum(values) == pytest.approx(0, abs=1e-4)
    ranked = [value for _, value in sorted(zip(rewards, values, strict=True))]
    assert ranked == sorted(values)


@given(st.lists(REWARD, min_size=2, max_size=20), st.integers(-100, 100))
def test_advantages_do_not_depend_on_the_rewards_offset(rewards: list[float], offset: int) -> None:
    steps = [round(reward) for reward in rewards]
    shifted = group_relative(torch.tensor([step + offset for step in steps]))
    assert shifted.tolist() == pytest.approx(group_relative(torch.tensor(steps)).tolist(), abs=1e-9)


def test_a_group_of_one_keeps_its_reward() -> None:
    assert group_relative(torch.tensor([0.5])).tolist() == pytest.approx([0.5], abs=1e-6)


@pytest.mark.parametrize("reference", [None, REFERENCE], ids=["without KL", "with KL"])
@pytest.mark.parametrize("garbage", [50.0, 1e30, -1e30, math.inf, math.nan])
def test_what_stands_at_a_masked_token_changes_neither_loss_nor_gradient(reference: Tensor | None, garbage: float) -> None:
    def loss_and_gradient(batch: TokenBatch) -> tuple[float, Tensor]:
        logprobs = batch.logprobs.clone().requires_grad_()
        loss = clipped_with_kl(replace(batch, logprobs=logprobs), replace_kl(0.1), WHOLE).loss
        loss.backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        return loss.item(), logprobs.grad

    clean, clean_gradient = loss_and_gradient(batch_of(reference))
    dirty = replace(
        batch_of(None if reference is None else reference.masked_fill(~MASK, garbage)),
        logprobs=NEW.masked_fill(~MASK, garbage),
        old=OLD.masked_fill(~MASK, -garbage),
    )
    loss, gradient = loss_and_gradient(dirty)
    assert loss == clean
    assert torch.equal(gradient, clean_gradient)
    assert not gradient[~MASK].any()


@pytest.mark.parametrize("name", AGGREGATIONS)
@given(order=st.permutations(range(4)), cut=st.integers(0, 4), padding=st.integers(0, 3))
def test_an_aggregation_does_not_depend_on_order_padding_or_split(name: str, order: list[int], cut: int, padding: int) -> None:
    per_token = torch.nn.functional.pad(NEW[order], (0, padding), value=7.0)
    mask = torch.nn.functional.pad(MASK[order], (0, padding))
    parts = [aggregate(per_token[part], mask[part], name, WHOLE) for part in (slice(0, cut), slice(cut, 4))]
    assert float(sum(parts)) == pytest.approx(float(aggregate(NEW, MASK, name, WHOLE)), abs=1e-12)


def test_the_policy_that_sampled_has_ratio_one_and_the_plain_policy_gradient() -> None:
    logprobs = NEW.clone().requires_grad_()
    batch = replace(batch_of(), logprobs=logprobs, old=logprobs.detach())
    terms = clipped_with_kl(batch, CONFIG, WHOLE)
    terms.loss.backward()  # type: ignore[no-untyped-call]
    assert float(terms.sums["ratio"]) == 17.0
    assert float(terms.sums["clip_fraction"]) == 0.0
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, torch.where(MASK, -batch.advantages, 0.0) / 17)


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    loss, _ = clipped_surrogate(torch.tensor([5.0]), torch.tensor([-1.0]), 0.2, 0.2, 3.0)
    assert float(loss) == 3.0


@given(st.floats(-20, 0), st.floats(-20, 0))
def test_the_kl_estimate_is_never_negative(logprob: float, reference: float) -> None:
    value = float(k3(torch.tensor(logprob, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)))
    assert value >= -1e-12
    assert value > 0 or abs(logprob - reference) < 1e-6
