"""Training in float16: the loss is scaled, so that no token's gradient becomes 0, and a gradient that overflows is repeated."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training import optimizer
from agentrl.workflow.training.offline_checkpoint import Resumable, read_progress
from agentrl.workflow.training.offline_training import Recipe, make_learner, train
from agentrl.workflow.training.optimizer import GROWTH_STEPS, INITIAL_FACTOR, LossScale
from agentrl.workflow.training.supervised import likelihood_objective
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.training.training_rows import rows_of
from tests.support.small_models import tiny_random
from tests.training.test_trainer import config, groups_of, saved

SMALL = 2.0**-16
"""The weight of the loss in these tests: as if each token were one of 65,000."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("base"))


@pytest.fixture
def faint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of each token is very small."""
    backward = Trainer._backward

    def fainter(trainer: Trainer, *rest: Any) -> dict[str, float]:
        factor = trainer._loss_scale.factor
        trainer._loss_scale.factor = factor * SMALL
        try:
            return backward(trainer, *rest)
        finally:
            trainer._loss_scale.factor = factor

    monkeypatch.setattr(Trainer, "_backward", fainter)


def half(module: nn.Module) -> LossScale:
    made = LossScale(module)
    assert made.is_used
    return made


def frozen_half() -> nn.Module:
    return nn.Linear(2, 2).half().requires_grad_(False)


def made(folder: Path, dtype: str, **values: Any) -> Trainer:
    run = config(4, model__dtype=dtype, **values)
    policy = Policy.load(run.model, str(folder), "cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            assert parameter.dtype == torch.float32  # the adapter's own weights
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return Trainer(policy, run)


def gradient(trainer: Trainer, folder: Path) -> Tensor:
    """The gradient of the only step so far: Adam's first moment is a tenth of it."""
    moments = saved(trainer, folder)[1]
    return torch.cat([moments[name].flatten() * 10 for name in sorted(moments) if name.endswith(":exp_avg")])


@pytest.mark.usefixtures("faint")
def test_float16_gradient_with_scale_equals_float32(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, found = groups_of(), dict[str, Tensor]()
    for name, dtype, initial in (
        ("float32", "float32", 1.0),
        ("scaled", "float16", INITIAL_FACTOR),
        ("unscaled", "float16", 1.0),
    ):
        monkeypatch.setattr(optimizer, "INITIAL_FACTOR", initial)
        trainer = made(folder, dtype, update__max_grad_norm=1e9, algorithm__importance="none")
        assert trainer.update(groups, 0).skipped is None
        found[name] = gradient(trainer, tmp_path / name)
    whole = found["float32"]
    assert nn.functional.cosine_similarity(found["scaled"], whole, 0) > 0.999
    assert (found["scaled"] == 0).sum() == (whole == 0).sum()
    assert (found["unscaled"] == 0).sum() > (whole == 0).sum() + whole.numel() / 4


def test_loss_scale_halves_and_repeats_after_gradient_overflow(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, found = groups_of(), list[Tensor]()
    for initial in (2.0**40, INITIAL_FACTOR):
        monkeypatch.setattr(optimizer, "INITIAL_FACTOR", initial)
        trainer = made(folder, "float16")
        update = trainer.update(groups, 0)
        assert update.skipped is None
        assert update.metrics["grad_norm"] > 0
        found.append(gradient(trainer, tmp_path / str(initial)))
        if initial > INITIAL_FACTOR:
            assert 1 < trainer._loss_scale.factor < 2.0**36
    assert nn.functional.cosine_similarity(*found, 0) > 0.999


def test_loss_scale_is_part_of_checkpoint(folder: Path, tmp_path: Path) -> None:
    whole = made(folder, "float16")
    whole._loss_scale.state = (2.0**12, GROWTH_STEPS - 2)  # grows with the second of these updates
    whole.update(groups_of(seed=1), 0)
    saved(whole, tmp_path / "first")
    assert json.loads((tmp_path / "first" / sealed_folder.STATE).read_text())["loss_scale"] == [2.0**12, GROWTH_STEPS - 1]
    resumed = made(folder, "float16")
    resumed.load(tmp_path / "first")
    for trainer in (whole, resumed):
        trainer.update(groups_of(seed=2), 1)
        trainer.update(groups_of(seed=3), 2)
    assert whole._loss_scale.state == resumed._loss_scale.state == (2.0**13, 1)
    for one, other in zip(saved(whole, tmp_path / "whole"), saved(resumed, tmp_path / "resumed"), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_loss_scale_is_unchanged_by_preview(folder: Path) -> None:
    trainer = made(folder, "float16")
    trainer._loss_scale.state = (2.0**12, 5)
    trainer.preview(groups_of(), 0)
    assert trainer._loss_scale.state == (2.0**12, 5)


def test_loss_scale_is_off_in_float32(folder: Path, tmp_path: Path) -> None:
    trainer = made(folder, "float32")
    trainer.update(groups_of(), 0)
    saved(trainer, tmp_path / "state")
    assert trainer._loss_scale.factor == 1
    assert "loss_scale" not in json.loads((tmp_path / "state" / sealed_folder.STATE).read_text())


def test_loss_scale_halves_at_overflow_and_doubles_later() -> None:
    scale = half(frozen_half())
    assert scale.must_repeat(1.0, float("inf"))
    assert scale.factor == INITIAL_FACTOR / 2
    for step in range(GROWTH_STEPS):
        assert scale.factor == INITIAL_FACTOR / 2, step
        assert not scale.must_repeat(1.0, 1.0)
    assert scale.factor == INITIAL_FACTOR


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_loss_scale_repairs_no_infinite_loss(loss: float) -> None:
    scale = half(frozen_half())
    assert not scale.must_repeat(loss, float("nan"))
    assert scale.factor == INITIAL_FACTOR


def test_loss_scale_off_repeats_no_overflow() -> None:
    scale = half(frozen_half())
    repeats = 0
    while scale.must_repeat(1.0, float("inf")):
        repeats += 1
    assert (repeats, scale.factor) == (16, 1)


def test_offline_float16_training_resumes_with_its_scale(folder: Path, tmp_path: Path) -> None:
    examples = [(row,) for row in rows_of([episode for group in groups_of() for episode in group.episodes])]
    found = []
    for _ in range(2):  # the second goes on from the checkpoint that the first wrote after two of its four steps
        policy = Policy.load(ModelConfig(lora_r=4, dtype="float16"), str(folder), "cpu")
        kept = Resumable(tmp_path / "last", "key", 2)
        before = read_progress(tmp_path / "last")[1] if found else 0
        assert before == (2 if found else 0)
        train(make_learner(policy).module, examples, Recipe(4, 4, 1e-3), likelihood_objective(), resumable=kept)
        found.append({name: parameter.detach().clone() for name, parameter in policy.trainable().items()})
    state = json.loads((tmp_path / "last" / sealed_folder.STATE).read_text())
    assert state["loss_scale"] == [INITIAL_FACTOR, 2]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_loss_scale_cannot_train_float16_weights(folder: Path) -> None:
    policy = Policy.load(ModelConfig(lora_r=0, dtype="float16"), str(folder), "cpu")
    with pytest.raises(ConfigError, match="float16 has too few bits"):
        Trainer(policy, config(0, model__dtype="float16"))
