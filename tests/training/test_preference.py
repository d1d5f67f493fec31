"""dpo: the paper's loss to the digit, on sampled tokens only, and a model that really comes to prefer the better episode."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.workflow.checkpoints.sealed_folder import RECORD
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.errors import ConfigError, ConflictError, InfraError, StateError
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training import offline_training
from agentrl.workflow.training.offline_training import Recipe, accumulate, backoff_over_rows, rows_by_episode
from agentrl.workflow.training.preference import (
    EMPTY,
    PreferencePair,
    dpo,
    dpo_loss,
    model_differences,
    preference_objective,
    sampler_differences,
)
from agentrl.workflow.trajectory import ROOT, Episode
from tests.support.learned_episodes import PROMPT, LearnedEpisode, episode, logprobs_of, start_of, step, two_turns
from tests.support.small_models import tiny_random

RECIPE = Recipe(steps=8, batch_size=4, learning_rate=3e-3)
PAIRS = [(two_turns(2 * n + 1, seed=2 * n), two_turns(2 * n + 2, seed=2 * n + 1, reward=0.0)) for n in range(6)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("base"))


def policy_of(folder: Path) -> Policy:
    return Policy.load(ModelConfig(path=str(folder), lora_r=0), str(folder), device="cpu")


def pair_of(better: Episode, worse: Episode, reference: float = 0.0) -> PreferencePair:
    chosen, rejected = rows_by_episode([better, worse])
    return PreferencePair(chosen, rejected, reference)


def test_dpo_loss_equals_paper() -> None:
    # margins 0.1 x (2 - 0.5) and 0.1 x (-1 - 0.5); ln(1 + exp(-0.15)), ln(1 + exp(0.15))
    loss, margin = dpo_loss(torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.5]), beta=0.1)
    assert margin.tolist() == pytest.approx([0.15, -0.15])
    assert loss.tolist() == pytest.approx([0.620957, 0.770957], abs=1e-6)
    (even,), _ = dpo_loss(torch.tensor([math.log(3)]), torch.tensor([0.0]), beta=1.0)
    assert float(even) == pytest.approx(math.log(4 / 3))


def test_dpo_pair_sums_rows_of_each_side() -> None:
    three_rows = replace(
        two_turns(1, 0), steps=(step(0, PROMPT, (3, 4)), replace(step(1, PROMPT, (5,)), new_row="edited", parent=ROOT))
    )
    pair = pair_of(three_rows, two_turns(2, 1), reference=0.5)
    assert (len(pair.chosen), len(pair.rejected)) == (2, 1)
    terms = preference_objective(beta=0.1).terms([pair], [torch.tensor([-1.0, -2.0, -5.0])])  # the difference is -3 - -5 = 2
    assert terms["loss"].item() == pytest.approx(0.620957, abs=1e-6)
    assert (terms["accuracy"].item(), terms["margin"].item()) == (1, pytest.approx(0.15))


def test_dpo_ignores_tokens_that_were_not_sampled(base: Path) -> None:
    better, worse = PAIRS[0]
    objective = preference_objective(0.1)

    def loss_of(one: Episode) -> float:
        policy = policy_of(base)
        with policy.training() as module:
            return accumulate(module, [pair_of(one, worse)], objective, backoff_over_rows(objective.rows))["loss"]

    told = [replace(better, steps=(*better.steps, step(2, tool, ()))) for tool in ((9, 10, 11), (40, 41, 42))]
    assert loss_of(told[0]) == loss_of(told[1]) == pytest.approx(loss_of(better), rel=1e-5)
    (row,) = rows_by_episode([better])[0]
    noise = tuple(value if own else 77.0 for value, own in zip(row.behavior_logprobs, row.loss_mask, strict=True))
    assert sampler_differences([PreferencePair((replace(row, behavior_logprobs=noise),), (row,))]) == [0.0]


def test_dpo_pair_excludes_prefix_shared_by_forks() -> None:
    shared = step(0, PROMPT, (3, 4, 5))
    forks = [episode(n, shared, step(1, (9,), (10 + n, 20)), fork_step=1) for n in range(2)]
    pair = pair_of(*forks)
    assert [sum(row.loss_mask) for row in pair.rows] == [2, 2]
    assert sampler_differences([pair]) == [0.0]  # 2 x -4 each; the shared three are not in it


def test_dpo_gradient_ignores_batch_split(base: Path) -> None:
    pairs = [pair_of(*each) for each in PAIRS]
    objective = preference_objective(0.1)
    found = []
    for tokens in (10**6, 30, 1):
        policy = policy_of(base)
        with policy.training() as module:
            metrics = accumulate(module, pairs, objective, backoff_over_rows(objective.rows, tokens))
        gradients = [p.grad.flatten() for p in policy.trainable().values() if p.grad is not None]
        found.append((metrics["loss"], torch.cat(gradients)))
    assert found[0][1].norm() > 1e-3
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-4, atol=1e-6)


def room_for(rows: int, refused: list[int]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Scores no more than so many rows at once; notes how many were too many."""

    def score(module: Any, ids: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        if len(ids) > rows:
            refused.append(len(ids))
            raise torch.OutOfMemoryError
        return token_logprobs(module, ids, *others)

    return score


def test_dpo_in_smaller_pieces_makes_same_model(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []
    made = []
    for rows in (12, 2):
        with monkeypatch.context() as patch:
            patch.setattr(offline_training, "token_logprobs", room_for(rows, refused))
            made.append(dpo(PAIRS, start_of(base), tmp_path / str(rows), recipe=RECIPE, device="cpu"))
    # Read by the reference, then learned: each is cut until it fits, and stays cut in all steps that follow.
    assert refused == [12, 6, 8, 4]
    assert made[1].metrics == pytest.approx(made[0].metrics, rel=1e-4)
    better = [better for better, _ in PAIRS]
    assert logprobs_of(made[1].folder, better) == pytest.approx(logprobs_of(made[0].folder, better), rel=1e-3)


def test_dpo_without_memory_for_one_pair_leaves_no_folder(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_training, "token_logprobs", room_for(1, []))
    with pytest.raises(InfraError, match=r"Memory does not suffice for one example of \d+ tokens. Take a smaller model"):
        dpo(PAIRS, start_of(base), tmp_path / "made", recipe=RECIPE, device="cpu")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lora_r", [0, 4], ids=["full weights", "LoRA"])
def test_dpo_raises_chosen_and_lowers_rejected(base: Path, tmp_path: Path, lora_r: int) -> None:
    told = LearnedEpisode()
    recipe = replace(RECIPE, learning_rate=3e-2 if lora_r else 3e-3)
    made = dpo(PAIRS, start_of(base, lora_r), tmp_path / "made", recipe=recipe, device="cpu", progress=told)
    seen = told.metrics
    assert seen[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)  # the reference is where it starts
    assert abs(seen[0]["margin"]) < 1e-3
    assert made.metrics == seen[-1]
    assert made.metrics["accuracy"] == 1.0
    assert made.metrics["margin"] > 0.1
    better, worse = ([pair[side] for pair in PAIRS] for side in (0, 1))
    now = [a - b for a, b in zip(logprobs_of(made.folder, better), logprobs_of(made.folder, worse), strict=True)]
    then = [a - b for a, b in zip(logprobs_of(base, better), logprobs_of(base, worse), strict=True)]
    assert all(after > before + 1 for after, before in zip(now, then, strict=True))
    assert [entry.name for entry in tmp_path.iterdir()] == ["made"]


def test_dpo_folder_has_provenance_and_count_of_empty_pairs(base: Path, tmp_path: Path) -> None:
    empty = (two_turns(90, 5), episode(91))
    made = dpo([*PAIRS[:2], empty], start_of(base), tmp_path / "made", recipe=replace(RECIPE, steps=1), device="cpu")
    assert (made.examples, made.left_out) == (2, {EMPTY: 1})
    record = json.loads((made.folder / RECORD).read_text())
    assert record["pairs"] == [[1, 2], [3, 4]]
    assert (record["stage"], record["beta"], record["reference"]) == ("dpo", 0.1, "start")


def test_dpo_reference_sampler_is_its_recorded_logprobs(base: Path) -> None:
    policy = policy_of(base)
    with policy.sampling() as module, torch.no_grad():
        recorded = []
        for pair in PAIRS[:3]:
            sides = []
            for one in pair:
                (row,) = rows_by_episode([one])[0]
                ids = torch.tensor([row.input_ids])
                logprobs = token_logprobs(module, ids, torch.ones_like(ids))[0][0].tolist()
                own = [value for value, sampled in zip(logprobs, row.loss_mask[1:], strict=True) if sampled]
                first, second = one.steps
                kept = replace(first, behavior_logprobs=tuple(own[:3])), replace(second, behavior_logprobs=tuple(own[3:]))
                sides.append(replace(one, steps=kept))
            recorded.append(pair_of(*sides))
        assert sampler_differences(recorded) == pytest.approx(
            model_differences(module, recorded, preference_objective(0.1)), abs=1e-4
        )
        assert max(map(abs, sampler_differences(recorded))) > 0.01


def test_dpo_refuses_unlearnable_pairs_and_leaves_no_folder(base: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="None of 1 pairs"):
        dpo([(episode(1), episode(2))], start_of(base), tmp_path / "made")
    with pytest.raises(StateError, match="None of 0 pairs"):
        dpo([], start_of(base), tmp_path / "made")
    for beta in (0.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="beta"):
            dpo(PAIRS, start_of(base), tmp_path / "made", beta=beta)
    with pytest.raises(ConflictError, match="already"):
        dpo(PAIRS, start_of(base), base)
    assert not list(tmp_path.iterdir())
