"""All weights of a model train in bfloat16 products with float32 masters, as on a GPU; forced here on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.workflow.config import ModelConfig, build
from agentrl.workflow.models import devices
from agentrl.workflow.models import policy as policies
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.trainer import Trainer
from bench.performance.memory_ours import groups_of
from tests.support.small_models import tiny_random

IDS = torch.arange(3 * 40).reshape(3, 40) % 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("model"), width=64)


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "mixed_dtype", lambda device, kind: torch.bfloat16 if kind == "full" else None)


def load(folder: Path, **options: Any) -> Policy:
    return Policy.load(ModelConfig(lora_r=0, **options), str(folder), "cpu")


def gradients(policy: Policy) -> dict[str, Tensor]:
    with policy.training() as model:
        logprobs, _ = token_logprobs(model, IDS, torch.ones_like(IDS))
        (logprobs * torch.linspace(-1, 1, logprobs.numel()).reshape(logprobs.shape)).mean().backward()
    return {name: parameter.grad for name, parameter in policy.trainable().items() if parameter.grad is not None}


def test_mixed_gradients_are_float32_and_close_to_float32s(folder: Path, mixed: None) -> None:
    exact, found = gradients(load(folder, dtype="float32")), gradients(load(folder))
    assert found.keys() == exact.keys() == load(folder).trainable().keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert 0 < float((gradient - exact[name]).norm()) < 0.05 * float(exact[name].norm()), name


def test_mixed_update_keeps_float32_masters_and_bfloat16_sampler(folder: Path, mixed: None) -> None:
    policy = load(folder)
    before = {name: parameter.detach().clone() for name, parameter in policy.trainable().items()}
    rows = [([20 + (7 * row + place) % 250 for place in range(12)], [-5.0] * 12) for row in range(16)]
    options = {"model.lora_r": 0, "update.learning_rate": 1e-6, "algorithm.importance": "none"}
    update = Trainer(policy, build(options)).update(groups_of(rows), 0)
    assert update.skipped is None
    moved = [name for name, parameter in policy.trainable().items() if not torch.equal(parameter, before[name])]
    assert len(moved) == len(before)  # steps of 1e-6 are below bfloat16's resolution, not float32's
    with policy.sampling() as sampler:
        assert {parameter.dtype for parameter in sampler.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in policy.trainable().values()} == {torch.float32}
    assert policy.precision == "coarse"


def test_mixed_precision_is_off_for_lora_exact_or_chosen_dtype(folder: Path, mixed: None) -> None:
    assert load(folder).mixed_dtype == torch.bfloat16
    assert load(folder, dtype="float32").mixed_dtype is None
    assert Policy.load(ModelConfig(lora_r=4), str(folder), "cpu").mixed_dtype is None
    config = ModelConfig(lora_r=0, numerics="exact")
    assert Policy.load(config, str(folder), "cpu").mixed_dtype is None
    torch.use_deterministic_algorithms(False)


def test_mixed_precision_leaves_other_models_in_float32(folder: Path, mixed: None) -> None:
    policy, other = load(folder), load(folder, dtype="float32")
    before = torch.get_float32_matmul_precision()
    with policy.training():
        assert torch.get_float32_matmul_precision() == "high"
    with other.training():
        assert torch.get_float32_matmul_precision() == before == "highest"


def test_mixed_dtype_follows_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.mixed_dtype(torch.device("cpu"), "full") is None
    for dtype, expected in ((torch.bfloat16, torch.bfloat16), (torch.float16, None)):
        monkeypatch.setattr(devices, "auto_dtype", lambda device, kind, dtype=dtype: dtype)
        assert devices.mixed_dtype(torch.device("cuda"), "full") == expected
        assert devices.mixed_dtype(torch.device("cuda"), "lora") is None
