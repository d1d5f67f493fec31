"""Tokens that the sampler scored otherwise than the trainer are weighed by the ratio of the two, up to a cap."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.losses import importance_weights
from agentrl.workflow.trajectory import Episode, Group
from tests.support.grpo_formula import grpo_credits
from tests.training.test_trainer import config, gradient, groups_of, saved, trainer_of
from tests.training.test_trainer import folder as folder

CAP = 1.5


def run_of(max_staleness: int = 1, **values: Any) -> RunConfig:
    wanted = {"update__max_grad_norm": 1e9, "algorithm__importance_cap": CAP, "rollout__max_staleness": max_staleness}
    return config(0, True, **wanted | values)


def logprobs_of(policy: Policy, episode: Episode) -> Tensor:
    """Of the sampled tokens, with a gradient."""
    ids = torch.tensor([episode.context_ids])
    with policy.training() as model:
        logprobs, _ = token_logprobs(model, ids, torch.ones_like(ids), 1.0)
    sampled = [flag for s in episode.steps for flag in (*[False] * len(s.prompt_ids), *[True] * len(s.sampled_ids))]
    return logprobs[0][torch.tensor(sampled[1:])]


def sampled_by_older_weights(policy: Policy, groups: list[Group]) -> list[Group]:
    """With sampler's logprobs that the present ones exceed by -0.5, 0, 0.5 and 1, token after token."""

    def older(episode: Episode) -> Episode:
        now = logprobs_of(policy, episode).tolist()
        steps, used = [], 0
        for step in episode.steps:
            mine = now[used : used + len(step.sampled_ids)]
            steps.append(replace(step, behavior_logprobs=tuple(lp + 0.5 - i % 4 / 2 for i, lp in enumerate(mine, start=used))))
            used += len(mine)
        return replace(episode, steps=tuple(steps))

    return [Group(group.task, tuple(map(older, group.episodes)), group.slot) for group in groups]


# the weights


def test_importance_weight_is_capped_ratio_without_gradient() -> None:
    proximal = torch.tensor([[-1.0, -1.0, -1.0, -50.0]], requires_grad=True)
    behavior = torch.tensor([[-1.5, -1.0, -3.0, 0.0]])
    mask = torch.tensor([[True, True, True, False]])
    weights, cut = importance_weights(proximal, behavior, mask, CAP)
    assert weights.tolist() == [pytest.approx([CAP, 1.0, CAP, 1.0])]
    assert cut.tolist() == [[True, False, True, False]]
    assert not weights.requires_grad
    below, _ = importance_weights(behavior, proximal, mask, CAP)
    assert below.tolist() == [pytest.approx([math.exp(-0.5), 1.0, math.exp(-2.0), 1.0])]


def test_importance_weight_overflow_is_the_cap() -> None:
    weights, cut = importance_weights(torch.zeros(1, 1), torch.full((1, 1), -1e4), torch.ones(1, 1, dtype=torch.bool), 2.0)
    assert (weights.item(), cut.item()) == (2.0, True)


@given(st.lists(st.floats(-60, 0), min_size=1, max_size=8), st.floats(1, 10))
def test_importance_weight_of_equal_logprobs_is_exactly_one(logprobs: list[float], cap: float) -> None:
    tokens = torch.tensor([logprobs])
    weights, cut = importance_weights(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), cap)
    assert bool((weights == 1).all())
    assert not bool(cut.any())


SAMPLER = torch.tensor([[-1.3, -1.0, -0.45, -4.5], [-0.2, -1.9, -3.2, -9.0]])
TRAINER = torch.tensor([[-1.0, -2.0, -0.5, -3.0], [-0.2, -1.5, -4.0, -0.7]])
TRAINED = torch.tensor([[True, True, True, True], [True, True, True, False]])
OF_TOKENS = [1.3498588, 0.3678795, 0.9512294, 2.0, 1.0, 1.4918246, 0.449329]


@pytest.mark.parametrize(
    ("level", "method", "expected"),
    [
        ("token", "truncate", OF_TOKENS),
        ("token", "mask", [0.0 if weight == 2 else weight for weight in OF_TOKENS]),
        ("sequence", "truncate", [2.0] * 4 + [0.67032] * 3),
        ("sequence", "mask", [0.0] * 4 + [0.67032] * 3),
    ],
)
def test_importance_weights_equal_trl_and_verl(level: str, method: str, expected: list[float]) -> None:
    """TRL 1.16.0, `vllm_importance_sampling_mode`, all four; verl b178a3c, `compute_rollout_correction_weights`, truncated."""
    weights, cut = importance_weights(TRAINER, SAMPLER, TRAINED, 2.0, level, method)
    assert weights[TRAINED].tolist() == pytest.approx(expected, rel=1e-6)
    assert cut[TRAINED].tolist() == [weight in (0.0, 2.0) for weight in expected]


def test_importance_options_without_effect_are_refused() -> None:
    for named in (
        {"algorithm.importance_cap": 0.5},
        {"algorithm.importance_cap": None},
        {"algorithm.importance": "none", "algorithm.importance_cap": 3.0},
        {"algorithm.importance": "none", "algorithm.importance_level": "sequence"},
        {"algorithm.importance": "mask", "source.runs": ("first",)},
        {"algorithm.importance": "truncate", "source.runs": ("first",)},
    ):
        with pytest.raises(ConfigError, match="importance"):
            build(named)


@pytest.mark.parametrize(
    ("named", "same", "method"),
    [
        ({}, True, None),
        ({}, False, "truncate"),
        ({"rollout.max_staleness": 1}, True, "truncate"),
        ({"algorithm.importance": "mask"}, True, "mask"),
        ({"algorithm.importance": "none", "rollout.max_staleness": 1}, False, None),
        ({"source.runs": ("first",)}, False, None),
        ({"update.trainer": "trl"}, False, None),
    ],
)
def test_importance_is_on_if_sampler_and_trainer_may_differ(named: dict[str, Any], same: bool, method: str | None) -> None:
    assert build(named).importance_method(same) == method


@pytest.mark.parametrize(
    ("older", "method", "cap"),
    [
        ({"importance_cap": 3.0, "importance_level": "token", "importance_beyond": "mask"}, "mask", 3.0),
        ({"importance_cap": None, "importance_level": "token", "importance_beyond": "truncate"}, "none", 2.0),
    ],
)
def test_stored_config_of_format_4_is_readable(older: dict[str, Any], method: str, cap: float) -> None:
    tree = RunConfig().model_dump(mode="json")
    tree["algorithm"] = {k: v for k, v in tree["algorithm"].items() if not k.startswith("importance")} | older
    found = RunConfig.model_validate(tree, context={"stored": True}).algorithm
    assert (found.importance, found.importance_cap, found.importance_level) == (method, cap, "token")


# the update


def test_gradient_is_weighted_policy_gradient_by_token(folder: Path, tmp_path: Path) -> None:
    policy, trainer = trainer_of(folder, run_of())
    groups = sampled_by_older_weights(policy, groups_of(2, 3))
    total, weights = torch.zeros((), dtype=torch.float64), []
    for group, credits in zip(groups, grpo_credits(groups), strict=True):
        for episode, advantage in zip(group.episodes, credits, strict=True):
            logprobs = logprobs_of(policy, episode)
            behavior = torch.tensor([lp for step in episode.steps for lp in step.behavior_logprobs], dtype=torch.float32)
            weight = torch.tensor([min(math.exp(d), CAP) for d in (logprobs.detach() - behavior).tolist()], dtype=torch.float64)
            total = total - (advantage * weight * logprobs).sum()
            weights += weight.tolist()
    names = sorted(policy.trainable())
    expected = torch.autograd.grad(total / len(weights), [policy.trainable()[name] for name in names])
    update = trainer.update(groups, 3)
    found = gradient(trainer, tmp_path / "v1")
    assert torch.allclose(found, torch.cat([tensor.flatten() for tensor in expected]), rtol=1e-9, atol=1e-13)
    assert update.metrics["importance_weight"] == pytest.approx(sum(weights) / len(weights), rel=1e-6)
    assert update.metrics["importance_truncated"] == pytest.approx(sum(w == max(weights) for w in weights) / len(weights))
    assert 0 < update.metrics["importance_truncated"] < 1
    assert update.metrics["ratio"] == pytest.approx(1, abs=1e-12), "the clip is around the weights of the update's start"
    assert update.metrics["staleness"] == 1
    assert [step["importance_weight"] for step in update.steps] == [update.metrics["importance_weight"]]


def test_importance_weights_are_fixed_at_start_of_update(folder: Path, tmp_path: Path) -> None:
    """A second optimizer step moves the clipped ratio, not the weight of what older weights sampled."""
    policy, trainer = trainer_of(folder, run_of(update__batch_size=3, update__learning_rate=1e-2))
    groups = sampled_by_older_weights(policy, groups_of(2, 3))
    expected = []
    for group in groups:
        pairs = [(logprobs_of(policy, e).detach(), [lp for s in e.steps for lp in s.behavior_logprobs]) for e in group.episodes]
        weights = [min(math.exp(a - b), CAP) for now, then in pairs for a, b in zip(now.tolist(), then, strict=True)]
        expected.append(sum(weights) / len(weights))
    update = trainer.update(groups, 1)
    assert [step["importance_weight"] for step in update.steps] == pytest.approx(expected, rel=1e-6)
    assert abs(update.steps[1]["ratio"] - 1) > 1e-4


NO_CORRECTION = {"algorithm__importance": "none", "algorithm__importance_cap": 2.0}


@pytest.mark.parametrize("values", [{"max_staleness": 0}, NO_CORRECTION])
def test_sampler_difference_is_only_measured_without_correction(folder: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    gradients = []
    for number in range(2):
        policy, trainer = trainer_of(folder, run_of(**values))
        groups = groups_of(2, 3)
        update = trainer.update(sampled_by_older_weights(policy, groups) if number else groups, 0)
        gradients.append(gradient(trainer, tmp_path / str(number)))
    assert torch.equal(gradients[0], gradients[1])
    assert update.metrics["importance_outside"] == pytest.approx(0.75, abs=0.06), "log ratios -0.5, 0, 0.5 and 1 in turn"
    assert update.metrics["effective_sample_size"] < 0.9


def test_importance_is_on_for_bfloat16_and_off_for_float32(folder: Path, tmp_path: Path) -> None:
    gradients = {}
    for dtype in ("bfloat16", "float32"):
        for importance in ("auto", "none", "truncate"):
            run = config(8, False, model__dtype=dtype, algorithm__importance=importance, update__max_grad_norm=1e9)
            policy, trainer = trainer_of(folder, run)
            update = trainer.update(sampled_by_older_weights(policy, groups_of(2, 3)), 0)
            assert not update.skipped
            gradients[dtype, importance] = gradient(trainer, tmp_path / f"{dtype}-{importance}")
    assert torch.equal(gradients["bfloat16", "auto"], gradients["bfloat16", "truncate"])
    assert not torch.equal(gradients["bfloat16", "auto"], gradients["bfloat16", "none"])
    assert torch.equal(gradients["float32", "auto"], gradients["float32", "none"])


def test_update_with_tiny_weights_is_skipped(folder: Path, tmp_path: Path) -> None:
    """By the trainer all tokens but one are a million times less likely than by the sampler."""

    def unlikely(episode: Episode, now: Iterator[float], sampled: Iterator[int]) -> Episode:
        told = [tuple(next(now) + 14.0 * (next(sampled) > 0) for _ in step.sampled_ids) for step in episode.steps]
        steps = [replace(step, behavior_logprobs=lps) for step, lps in zip(episode.steps, told, strict=True)]
        return replace(episode, steps=tuple(steps))

    for batch_size in (None, 3):
        policy, trainer = trainer_of(folder, run_of(update__batch_size=batch_size))
        sampled = itertools.count()
        before = {name: parameter.detach().clone() for name, parameter in policy.trainable().items()}
        groups = [
            Group(g.task, tuple(unlikely(e, iter(logprobs_of(policy, e).tolist()), sampled) for e in g.episodes), g.slot)
            for g in groups_of(2, 3)
        ]
        update = trainer.update(groups, 0)
        assert update.skipped is not None
        assert "leave an effective sample size of" in update.skipped
        assert not update.bad
        assert all(torch.equal(before[name], parameter) for name, parameter in policy.trainable().items())
        assert not trainer.update(sampled_by_older_weights(policy, groups_of(2, 3)), 1).skipped


def test_importance_of_equal_weights_changes_only_rounding(folder: Path, tmp_path: Path) -> None:
    gradients = []
    for number in range(2):
        policy, trainer = trainer_of(folder, run_of(max_staleness=number))
        groups = groups_of(2, 3)

        def exact(episode: Episode, policy: Policy = policy) -> Episode:
            now = iter(logprobs_of(policy, episode).tolist())
            told = [replace(s, behavior_logprobs=tuple(next(now) for _ in s.sampled_ids)) for s in episode.steps]
            return replace(episode, steps=tuple(told))

        trainer.update([Group(group.task, tuple(map(exact, group.episodes)), group.slot) for group in groups], 0)
        gradients.append(gradient(trainer, tmp_path / str(number)))
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


def test_importance_weights_ignore_microbatches_and_dropout(folder: Path, tmp_path: Path) -> None:
    told = []
    for tokens, dropout in ((10**6, 0.0), (1, 0.0), (10**6, 0.5)):
        run = config(4, True, rollout__max_staleness=1, update__microbatch_tokens=tokens, model__lora_dropout=dropout)
        _, trainer = trainer_of(folder, run)
        update = trainer.update(groups_of(2, 3), 1)
        told.append((update.metrics["importance_weight"], update.metrics["importance_truncated"]))
        saved(trainer, tmp_path / str(len(told)))
    assert told[1] == pytest.approx(told[0], rel=1e-9)
    assert told[2] == pytest.approx(told[0], rel=1e-9)
