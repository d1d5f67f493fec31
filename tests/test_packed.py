"""Packed weights: the same model, and always the newest weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import tiny_random
from workflow import checkpoint
from workflow.config import ModelConfig, build
from workflow.engine import GenerateRequest
from workflow.errors import ConfigError, ModelError
from workflow.packed import packable, packed
from workflow.policy import Policy
from workflow.rolling import RollingEngine
from workflow.scoring import token_logprobs
from workflow.slots import Slots
from workflow.trajectory import PolicyRef


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float64, 1e-12)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("worth", [0, 10**9])
def test_a_product_with_a_packed_weight_is_that_with_the_plain_one(
    dtype: torch.dtype, tolerance: float, bias: bool, worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workflow.packed.WORTH", worth)
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias).to(dtype)
    with torch.no_grad():
        product = packed(plain.weight, plain.bias)
        for shape in ((1, 48), (7, 48), (2, 5, 48)):
            inputs = torch.randn(shape, dtype=dtype)
            assert torch.allclose(product(inputs), plain(inputs), atol=tolerance)


def test_float64_and_other_devices_are_not_packed() -> None:
    assert packable(torch.device("cpu"), torch.float32)
    assert not packable(torch.device("cpu"), torch.float64)
    assert not packable(torch.device("cuda"), torch.float32)


def test_the_sampler_says_what_newly_published_weights_say(tmp_path: Path) -> None:
    policy = Policy.load(ModelConfig(), str(tiny_random(tmp_path / "base")))
    ids = torch.tensor([[5, 6, 7]])
    for version in (1, 2):
        with torch.no_grad():
            for parameter in policy.trainable().values():
                parameter.mul_(1.1)
        folder = tmp_path / f"v{version}"
        sha256 = checkpoint.write(folder, lambda beside: policy.save_weights(beside / checkpoint.WEIGHTS))
        policy.publish(PolicyRef(str(policy.folder), policy.base_hash, str(folder), sha256, version))
        with torch.no_grad(), policy.decoding() as forward:
            slots = Slots(2)
            slots.prefill(0, 1, 3)
            said = forward(ids, torch.arange(3)[None], None, slots)
        with torch.no_grad(), policy.training() as trained:
            assert torch.allclose(said, trained.eval()(ids).logits[:, -1], atol=1e-4)


def test_a_sampler_may_compute_in_bfloat16_beside_a_trainer_in_float32(tmp_path: Path) -> None:
    policy = Policy.load(ModelConfig(sampler_dtype="bfloat16"), str(tiny_random(tmp_path / "base")))
    request = GenerateRequest((5, 6, 7), PolicyRef(str(policy.folder), policy.base_hash), 3, 0, 24)
    engine = RollingEngine(policy, slots=2)
    completion = engine.submit(request).result(60)
    engine.close()
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad(), policy.training() as model:
        ours, _ = token_logprobs(model.eval(), ids, torch.ones_like(ids))
    assert {parameter.dtype for parameter in policy.trainable().values()} == {torch.float32}
    difference = (ours[0, 2:] - torch.tensor(completion.logprobs)).abs().max()
    assert 0 < difference < 0.1


@pytest.mark.parametrize("options", [{"lora_r": 4}, {"load_in_4bit": True}, {"numerics": "exact"}])
def test_a_sampler_that_has_no_copy_of_its_own_has_no_dtype_of_its_own(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"sampler_dtype|numerics: exact"):
        build({f"model.{name}": value for name, value in {"sampler_dtype": "bfloat16", **options}.items()})


def test_a_model_that_is_large_enough_for_lora_says_so_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workflow.models.SMALL", 1)
    with pytest.raises(ModelError, match="shares the trainer's base"):
        Policy.load(ModelConfig(sampler_dtype="bfloat16"), str(tiny_random(tmp_path / "base")))
