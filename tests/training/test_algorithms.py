"""Credit, losses and the algorithms made of them: published numbers, and the laws that hold for any numbers."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.workflow.algorithms import Algorithm, gradients, resolve_options, resolve_run
from agentrl.workflow.algorithms.grpo import grpo
from agentrl.workflow.config import AlgorithmConfig, RunConfig, build
from agentrl.workflow.errors import ConfigError, StateError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.plugins import find
from agentrl.workflow.training import advantages as credit
from agentrl.workflow.training.advantages import TRL_EPSILON, VERL_EPSILON, Credit, TokenRewards, group_relative, whiten
from agentrl.workflow.training.losses import (
    AGGREGATIONS,
    KL,
    Normaliser,
    TokenBatch,
    aggregate,
    clipped_surrogate,
    importance_weights,
    k3,
    policy_loss,
    value_loss,
)
from tests.conftest import missing

# One batch with known answers: computed by running verl's core_algos.py (2026-01-29) and TRL 1.16.0's GRPO loss, float32.


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    """Reference values by name, from the file beside gsm8k's."""
    folder = os.environ.get("AGENTRL_GSM8K_DIR")
    file = Path(folder).parent / "golden.json" if folder else None
    if file is None or not file.is_file():
        missing("golden.json beside AGENTRL_GSM8K_DIR")
    values: dict[str, Any] = json.loads(file.read_text())["values"]
    return values


REWARDS = ((1.0, 0.0), (0.5, 0.25))
MASK = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
LAST = (5, 2, 4, 5)
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
VALUES = torch.tensor(
    [
        [0.2, 0.3, 0.1, 0.1, 0.5, 0.6],
        [0.1, 0, -0.1, 0, 0, 0],
        [0.3, 0.2, 0.3, 0.35, 0.4, 0],
        [0.1, 0.1, 0.2, 0.2, 0.3, 0.3],
    ],
    dtype=torch.float64,
)
PREDICTED = VALUES + torch.tensor([0.3, -0.3, 0.1, 0, 0.6, -0.05], dtype=torch.float64)
WHOLE = Normaliser(tokens=17, rows=4, width=6)
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def options(name: str = "grpo", **named: Any) -> AlgorithmConfig:
    return resolve_options(AlgorithmConfig(name=name, **named))


def earned(values: Tensor | None = None) -> TokenRewards:
    """The batch as credit sees it: without what stands between the sampled tokens."""
    rewards = torch.zeros_like(OLD)
    for row, (place, reward) in enumerate(zip(LAST, [r for group in REWARDS for r in group], strict=True)):
        rewards[row, place] = reward
    packed = [packed_to_the_left(tensor) for tensor in (rewards, MASK.double(), OLD if values is None else values)]
    turns = torch.tensor([[0, 0, 1, 1, 1, 1], [0] * 6, [0, 1, 1, 1, 1, 1], [0] * 6])
    return TokenRewards(packed[0], packed[1].bool(), turns, torch.tensor([0, 0, 1, 1]), None if values is None else packed[2])


def packed_to_the_left(values: Tensor) -> Tensor:
    whole = torch.zeros_like(values)
    for row, mask in enumerate(MASK):
        whole[row, : int(mask.sum())] = values[row][mask]
    return whole


def in_place(values: Tensor) -> Tensor:
    """The reverse: where each token stands in the batch."""
    whole = torch.zeros_like(values)
    for row, mask in enumerate(MASK):
        whole[row][mask] = values[row, : int(mask.sum())]
    return whole


def credited(name: str = "grpo", values: Tensor | None = None, **named: Any) -> Tensor:
    """The algorithm's advantages, each at its token's place."""
    found: Algorithm = find("algorithms", name)
    compute: Credit = find("credits", found.credit)
    return in_place(compute(earned(values), options(name, **named)).advantages)


def batch_of(advantages: Tensor, reference: Tensor | None = None) -> TokenBatch:
    return TokenBatch(NEW, OLD, advantages, MASK, reference)


def loss_of(name: str, advantages: Tensor | None = None, **named: Any) -> float:
    """The algorithm's loss of the batch with its own credit, or with that of another."""
    chosen = options(name, **named)
    found: Algorithm = find("algorithms", name)
    batch = batch_of(credited(name, **named) if advantages is None else advantages, REFERENCE if chosen.kl_coef else None)
    return float(policy_loss(find("surrogates", found.surrogate_of(chosen)), batch, chosen, WHOLE).loss)


def per_row(values: Tensor) -> list[float]:
    return [float(row[mask][0]) for row, mask in zip(values, MASK, strict=True)]


# --- published numbers: credit ------------------------------------------------------------------------------------------------


def close(expected: Any) -> Any:
    return pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "named", "key"),
    [
        ("grpo", {}, "verl.grpo adv (per seq)"),
        ("grpo", {"convention": "trl"}, "trl.grpo adv scale_rewards=group"),
        ("grpo", {"convention": "trl", "scale": "batch"}, "trl.grpo adv scale_rewards=batch"),
        ("grpo", {"convention": "trl", "scale": "none"}, "trl.grpo adv scale_rewards=none"),
        ("dr_grpo", {}, "verl.grpo(no std)=Dr.GRPO adv"),
        ("rloo", {}, "verl.rloo adv"),
        ("rloo", {"convention": "trl"}, "trl.rloo adv"),
        ("opo", {}, "verl.opo adv"),
        ("pass_at_k", {}, "verl.passk adv"),
    ],
)
def test_credit_equals_published_numbers(golden: dict[str, Any], name: str, named: dict[str, Any], key: str) -> None:
    assert per_row(credited(name, **named)) == close(golden[key])


def test_reinforce_plus_plus_baseline_equals_verl(golden: dict[str, Any]) -> None:
    expected = golden["verl.reinforce++_baseline adv*mask"]
    assert credited("reinforce_plus_plus_baseline").flatten().tolist() == close(expected)


def test_reinforce_plus_plus_equals_verl_except_over_tool_text(golden: dict[str, Any]) -> None:
    """Whitened, verl's returns give verl's numbers; ours differ before tool text, where verl loses them."""
    ours = torch.where(MASK, torch.tensor([r for group in REWARDS for r in group])[:, None], 0.0).double()
    lost = ours.clone()
    lost[0, :2] = 0
    lost[2, 0] = 0
    assert whiten(lost, MASK).flatten().tolist() == close(golden["verl.reinforce++ adv*mask"])
    assert torch.allclose(credited("reinforce_plus_plus"), whiten(ours, MASK))
    assert torch.equal(credited("reinforce"), ours)


def test_gae_equals_verl_with_unwhitened_returns(golden: dict[str, Any]) -> None:
    found = credit.gae(earned(VALUES), options("ppo", gae_lambda=0.95))
    assert found.returns is not None
    assert in_place(found.advantages).flatten().tolist() == close(golden["verl.gae adv*mask (whitened)"])
    assert in_place(found.returns).flatten().tolist() == close(golden["verl.gae returns*mask"])
    raw = in_place(found.returns - packed_to_the_left(VALUES))[3].tolist()
    assert raw == close(golden["trl-ppo raw GAE row3 (gamma1,lam.95)"])


def test_gae_over_turns_equals_hand_computed_values() -> None:
    """Two turns of 2 and 1 tokens, by hand: discount 0.9, lambda 0.5; the first token costs 0.1."""
    one = TokenRewards(
        rewards=torch.tensor([[-0.1, 0.2, 1.0]], dtype=torch.float64),
        mask=torch.ones(1, 3, dtype=torch.bool),
        turns=torch.tensor([[0, 0, 1]]),
        groups=torch.zeros(1),
        values=torch.tensor([[0.5, 0.6, 0.4]], dtype=torch.float64),
    )
    second = 1.0 - 0.4
    first = 0.2 + 0.9 * (0.4 + 0.5 * second) - 0.6
    expected = torch.tensor([[-0.1 + 0.6 - 0.5 + 0.5 * first, first, second]], dtype=torch.float64)
    found = credit.turn_gae(one, options("turn_ppo", discount=0.9, gae_lambda=0.5))
    assert found.returns is not None
    assert one.values is not None
    assert torch.allclose(found.returns, expected + one.values)
    assert torch.allclose(found.advantages, whiten(expected, one.mask))


@pytest.mark.parametrize("penalty", [0.0, 0.3], ids=["", "a penalty on every token"])
def test_gae_over_turns_without_decay_is_gae(penalty: float) -> None:
    some = earned(VALUES)
    some = replace(some, rewards=some.rewards - penalty * torch.rand(some.mask.shape, dtype=torch.float64) * some.mask)
    plain = credit.gae(some, options("ppo", discount=1.0, gae_lambda=1.0))
    by_turn = credit.turn_gae(some, options("turn_ppo", discount=1.0, gae_lambda=1.0))
    assert torch.allclose(plain.advantages, by_turn.advantages)
    assert plain.returns is not None
    assert by_turn.returns is not None
    assert torch.allclose(plain.returns, by_turn.returns)


# --- published numbers: loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_clipped_loss_with_dual_clip_equals_verl(golden: dict[str, Any], name: str) -> None:
    # The recorded numbers are from a verl whose norm divided by T alone; since 0.9.1 it divides by the sequences too.
    sequences = WHOLE.sequences if name == "seq-mean-token-sum-norm" else 1
    assert loss_of("grpo", **CLIPS, aggregation=name) == close(golden[f"verl.vanilla eps=.2/.28 {name}"] / sequences)


TRL = {"convention": "trl", **CLIPS}
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "trl.grpo eps=.2/.28": ("grpo", TRL),
    "trl.bnpo eps=.2/.28": ("grpo", {**TRL, "aggregation": "token-mean"}),
    "trl.dapo eps=.2/.28": ("dapo", TRL),
    "trl.dr_grpo with adv none-scaled": ("dr_grpo", TRL),
    "trl.dr_grpo eps=.2/.28": ("dr_grpo", {**TRL, "scale": "group"}),
    "trl.grpo beta=.1 bias_corr=False": ("grpo", {**TRL, "kl_coef": 0.1}),
    "trl.grpo beta=.1 bias_corr=True": ("grpo", {**TRL, "kl_coef": 0.1, "kl_estimator": "k3-corrected"}),
    "verl.gspo eps=.2/.28": ("gspo", CLIPS),
    "trl.grpo level=sequence (GSPO)": ("gspo", TRL),
    "verl.cispo eps=.2/.28 token-mean": ("cispo", CLIPS),
    "trl.cispo epsilon_high=5.0": ("cispo", {"convention": "trl"}),
    "trl.cispo epsilon_high=1.28": ("cispo", {"convention": "trl", "clip_high": 1.28}),
    "verl.sapo tau 1/1.05": ("sapo", {}),
    "trl.sapo eps=.2/.28": ("sapo", {"convention": "trl"}),
    "trl.rloo loss eps .2 (mask=mask)": ("rloo", {"convention": "trl"}),
}


@pytest.mark.parametrize("key", LOSSES)
def test_loss_equals_published_numbers(golden: dict[str, Any], key: str) -> None:
    name, named = LOSSES[key]
    assert loss_of(name, **named) == close(golden[key])


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimates_equal_verl(golden: dict[str, Any], name: str) -> None:
    found = aggregate(KL[name](NEW, REFERENCE), MASK, "token-mean", WHOLE)
    assert float(found) == close(golden[f"verl.kl {name} masked token-mean"])


def test_value_loss_equals_verl(golden: dict[str, Any]) -> None:
    returns = credit.gae(earned(VALUES), options("ppo", gae_lambda=0.95)).returns
    assert returns is not None
    errors = value_loss(PREDICTED, VALUES, in_place(returns), 0.2)
    assert float(aggregate(errors, MASK, "token-mean", WHOLE)) == close(golden["verl.value_loss clip .2 token-mean"])
    plain = value_loss(PREDICTED, VALUES, in_place(returns), None)
    assert torch.equal(plain, 0.5 * (PREDICTED - in_place(returns)) ** 2)


def test_grpo_convention_defaults_to_verl(golden: dict[str, Any]) -> None:
    plain = golden["verl.vanilla eps=.2/.28 token-mean"]
    assert loss_of("grpo", **CLIPS) == close(plain)
    assert loss_of("grpo", **CLIPS, kl_coef=0.1) == close(plain + 0.1 * golden["verl.kl k3 masked token-mean"])


# --- options ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", gradients())
def test_algorithms_name_existing_parts_and_options(name: str) -> None:
    found: Algorithm = find("algorithms", name)
    assert found.name == name
    for convention in ("verl", "trl"):
        chosen = options(name, convention=convention)
        assert chosen.aggregation in AGGREGATIONS
        find("surrogates", found.surrogate_of(chosen))
        assert resolve_options(chosen) == chosen
    assert math.isfinite(loss_of(name, OLD))


def test_find_returns_algorithm() -> None:
    assert find("algorithms", "grpo") is grpo
    assert grpo.needs_group


@pytest.mark.parametrize(
    ("name", "named", "said"),
    [
        (
            "reinforce",
            {"clip_low": 0.1},
            "algorithm.clip_low has no effect with reinforce. reinforce takes aggregation, discount.",
        ),
        ("grpo", {"gae_lambda": 0.9}, "algorithm.gae_lambda has no effect with grpo."),
        ("sapo", {"dual_clip": 3.0}, "algorithm.dual_clip has no effect with sapo."),
        ("cispo", {"convention": "trl", "clip_low": 0.2}, "algorithm.clip_low has no effect with cispo."),
    ],
)
def test_algorithm_refuses_option_that_it_ignores(name: str, named: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        options(name, **named)
    assert f"{refused.value.message} {refused.value.hint}".startswith(said)


@pytest.mark.parametrize(("name", "clip_high"), [("grpo", 0.2), ("ppo", 0.2), ("gspo", 4e-4)])
def test_dual_clip_below_other_clip_is_refused(name: str, clip_high: float) -> None:
    def chosen(dual_clip: float) -> float | None:
        run = build({"algorithm.name": name, "algorithm.dual_clip": dual_clip})
        return resolve_run(run).algorithm.dual_clip

    for within in (1.0, 1 + clip_high):
        with pytest.raises(ConfigError, match=r"algorithm\.dual_clip=.* must be above 1 \+ clip_high") as refused:
            chosen(within)
        assert refused.value.hint == f"Set algorithm.dual_clip above {1 + clip_high:g}, or to 0 for none."
    assert [chosen(beyond) for beyond in (0.0, 1.3)] == [0.0, 1.3]


@pytest.mark.parametrize("named", [{"kl_in": "reward"}, {"kl_estimator": "k1"}, {"kl_target": 0.1}])
def test_kl_options_without_kl_are_refused(named: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has no effect if kl_coef is 0"):
        AlgorithmConfig(**named)


def test_stored_algorithm_config_of_older_format_is_read() -> None:
    of_runs = RunConfig().model_dump(mode="json")
    for algorithm in (
        {"name": "dr_grpo", "aggregation": "seq-mean-token-sum-norm-trl"},
        {"kl_coef": 0.1, "kl_estimator": "k1"},
    ):
        Experiment.load({**of_runs, "algorithm": of_runs["algorithm"] | algorithm})


def test_kl_estimator_k1_is_refused_in_the_loss() -> None:
    with pytest.raises(ValueError, match=r"expected gradient is 0\. Set kl_estimator=k3 or kl_in=reward"):
        AlgorithmConfig(kl_coef=0.1, kl_estimator="k1")
    assert AlgorithmConfig(kl_coef=0.1, kl_estimator="k1", kl_in="reward").kl_in == "reward"


def test_credit_without_required_critic_is_an_error() -> None:
    with pytest.raises(StateError, match="needs a critic's values"):
        credit.gae(earned(), options("ppo"))


# --- laws -------------------------------------------------------------------------------------------------------------------

REWARD = st.floats(-1e3, 1e3)
RELATIVE = [name for name, found in gradients().items() if found.needs_group]


def one_group(rewards: list[float], tokens: int = 2) -> TokenRewards:
    whole = torch.zeros(len(rewards), tokens, dtype=torch.float64)
    whole[:, -1] = torch.tensor(rewards)
    mask = torch.ones_like(whole, dtype=torch.bool)
    return TokenRewards(whole, mask, torch.zeros_like(mask, dtype=torch.long), torch.zeros(len(rewards)))


@pytest.mark.parametrize("name", RELATIVE)
@given(reward=REWARD, count=st.integers(2, 20))
def test_credit_is_exactly_zero_for_equal_rewards(name: str, reward: float, count: int) -> None:
    found: Algorithm = find("algorithms", name)
    compute: Callable[..., Any] = find("credits", found.credit)
    assert not compute(one_group([reward] * count), options(name)).advantages.any()


@given(REWARD, st.integers(1, 20))
def test_whitened_returns_are_exactly_zero_for_equal_returns(reward: float, count: int) -> None:
    assert not credit.returns_whitened(one_group([reward] * count), options("reinforce_plus_plus")).advantages.any()


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


def test_group_relative_advantage_of_one_is_its_reward() -> None:
    assert group_relative(torch.tensor([0.5])).tolist() == pytest.approx([0.5], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", gradients())
@given(order=st.permutations(range(4)), padding=st.integers(0, 3), garbage=st.sampled_from([50.0, -1e30]))
def test_credit_ignores_row_order_and_masked_tokens(name: str, order: list[int], padding: int, garbage: float) -> None:
    found: Algorithm = find("algorithms", name)
    compute: Credit = find("credits", found.credit)
    plain = earned(VALUES)
    assert plain.values is not None

    def filled(values: Tensor) -> Tensor:
        dirty = torch.where(plain.mask, values, garbage)[order]
        return torch.nn.functional.pad(dirty, (0, padding), value=garbage)

    mask = torch.nn.functional.pad(plain.mask[order], (0, padding))
    turns = torch.nn.functional.pad(plain.turns[order], (0, padding))
    moved = TokenRewards(filled(plain.rewards), mask, turns, plain.groups[order], filled(plain.values))
    expected, got = compute(plain, options(name)).advantages[order], compute(moved, options(name)).advantages
    assert torch.allclose(got[:, :6], expected, rtol=1e-9, atol=1e-12)
    assert not got[~mask].any()


@pytest.mark.parametrize("name", gradients())
@pytest.mark.parametrize("garbage", [50.0, 1e30, -1e30, math.inf, math.nan])
def test_loss_and_gradient_ignore_masked_tokens(name: str, garbage: float) -> None:
    found: Algorithm = find("algorithms", name)
    chosen = options(name, kl_coef=0.1, entropy_coef=0.1)
    surrogate = find("surrogates", found.surrogate)
    advantages = torch.where(MASK, credited("grpo"), 0.0)

    def loss_and_gradient(batch: TokenBatch) -> tuple[float, Tensor]:
        logprobs = batch.logprobs.clone().requires_grad_()
        loss = policy_loss(surrogate, replace(batch, logprobs=logprobs), chosen, WHOLE).loss
        loss.backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        return loss.item(), logprobs.grad

    batch = replace(batch_of(advantages, REFERENCE), entropy=-OLD)
    clean, clean_gradient = loss_and_gradient(batch)
    dirty = replace(
        batch,
        logprobs=NEW.masked_fill(~MASK, garbage),
        old=OLD.masked_fill(~MASK, -garbage),
        reference=REFERENCE.masked_fill(~MASK, garbage),
        entropy=(-OLD).masked_fill(~MASK, garbage),
    )
    loss, gradient = loss_and_gradient(dirty)
    assert loss == clean
    assert torch.equal(gradient, clean_gradient)
    assert not gradient[~MASK].any()


@pytest.mark.parametrize("name", AGGREGATIONS)
@given(order=st.permutations(range(4)), cut=st.integers(0, 4), padding=st.integers(0, 3))
def test_aggregation_ignores_order_padding_and_split(name: str, order: list[int], cut: int, padding: int) -> None:
    per_token = torch.nn.functional.pad(NEW[order], (0, padding), value=7.0)
    mask = torch.nn.functional.pad(MASK[order], (0, padding))
    parts = [aggregate(per_token[part], mask[part], name, WHOLE) for part in (slice(0, cut), slice(cut, 4))]
    assert float(sum(parts)) == pytest.approx(float(aggregate(NEW, MASK, name, WHOLE)), abs=1e-12)


@pytest.mark.parametrize("name", gradients())
@given(cut=st.integers(1, 3))
def test_loss_ignores_split_of_rows(name: str, cut: int) -> None:
    found: Algorithm = find("algorithms", name)
    surrogate, chosen = find("surrogates", found.surrogate), options(name)
    batch = batch_of(credited("grpo"))

    def share(part: slice) -> float:
        some = TokenBatch(batch.logprobs[part], batch.old[part], batch.advantages[part], batch.mask[part])
        return float(policy_loss(surrogate, some, chosen, WHOLE).loss)

    assert share(slice(0, cut)) + share(slice(cut, 4)) == pytest.approx(share(slice(0, 4)), abs=1e-12)


@pytest.mark.parametrize("name", gradients())
def test_policy_loss_on_policy_has_ratio_one_and_plain_gradient(name: str) -> None:
    logprobs = NEW.clone().requires_grad_()
    batch = replace(batch_of(credited("grpo")), logprobs=logprobs, old=logprobs.detach())
    found: Algorithm = find("algorithms", name)
    terms = policy_loss(find("surrogates", found.surrogate), batch, options(name, aggregation="token-mean"), WHOLE)
    terms.loss.backward()  # type: ignore[no-untyped-call]
    assert (float(terms.sums["ratio"]), float(terms.sums["clip_fraction"])) == (17.0, 0.0)
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, torch.where(MASK, -batch.advantages, 0.0) / 17)


@pytest.mark.parametrize("difference", [-90.0, 90.0])
@pytest.mark.parametrize("name", gradients())
def test_policy_loss_has_a_finite_gradient_at_any_log_ratio(name: str, difference: float) -> None:
    logprobs = NEW.float().clone()
    logprobs[0, LAST[0]] += difference
    logprobs.requires_grad_()
    batch = TokenBatch(logprobs, NEW.float(), torch.full_like(NEW, -1.0, dtype=torch.float32), MASK, NEW.float())
    for estimator in ("k2", "k3", "k3-corrected"):
        found: Algorithm = find("algorithms", name)
        chosen = options(name, kl_coef=0.1, kl_estimator=estimator)
        terms = policy_loss(find("surrogates", found.surrogate_of(chosen)), batch, chosen, WHOLE)
        (gradient,) = torch.autograd.grad(terms.loss, logprobs)
        assert torch.isfinite(gradient).all()
        assert torch.isfinite(torch.stack([terms.loss, *terms.sums.values()])).all()
        assert int(terms.sums["log_ratio_clamped"]) == 1


def test_dual_clip_bounds_loss_of_likely_bad_token() -> None:
    loss, _ = clipped_surrogate(torch.tensor([5.0]), torch.tensor([-1.0]), 0.2, 0.2, 3.0)
    assert float(loss) == 3.0


@given(st.floats(-20, 0), st.floats(-20, 0))
def test_kl_estimate_k3_is_never_negative(logprob: float, reference: float) -> None:
    value = float(k3(torch.tensor(logprob, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)))
    assert value >= -1e-12
    assert value > 0 or abs(logprob - reference) < 1e-6


def test_importance_weight_of_row_is_product_of_tokens() -> None:
    behavior = OLD - 0.1
    rows, cut = importance_weights(OLD, behavior, MASK, 1.5, "sequence")
    expected = torch.exp(0.1 * MASK.sum(-1).double())
    assert per_row(rows) == pytest.approx(expected.clamp(max=1.5).tolist())
    assert cut.any(-1).tolist() == (expected > 1.5).tolist()
    masked, _ = importance_weights(OLD, behavior, MASK, 1.5, "sequence", "mask")
    assert per_row(masked) == pytest.approx([float(e) if e <= 1.5 else 0.0 for e in expected])
    assert (rows[~MASK] == 1).all()


def test_epsilons_equal_verl_and_trl() -> None:
    assert (VERL_EPSILON, TRL_EPSILON) == (1e-6, 1e-4)
