"""LoRA adapters compute in their base's precision and train in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.models import loading
from agentrl.workflow.models.adapter_precision import cast_adapters_down
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.policy import Policy
from tests.support.small_models import quantised, tiny_random

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.arange(3 * 40).reshape(3, 40) % 300


def adapted(folder: Path, dtype: str, cast_down: bool, **options: Any) -> Any:
    """A model under PEFT with adapters that change its logits."""
    config = ModelConfig(lora_r=4, dtype=dtype, **options)
    base = loading.load(config, folder, torch.device("cpu"), "lora")
    torch.manual_seed(0)
    model = get_peft_model(base, loading.lora_config(config, 4, loading.find_lora_layers(config, base)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.05)
    if cast_down:
        cast_adapters_down(model)
    return model


def gradients(model: Any) -> Tensor:
    """The gradient of a loss with respect to all adapters, flat."""
    logprobs, _ = token_logprobs(model, IDS, torch.ones_like(IDS))
    (logprobs * torch.linspace(-1, 1, logprobs.numel()).reshape(logprobs.shape)).mean().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert {gradient.dtype for gradient in found} == {torch.float32}
    return torch.cat([gradient.flatten() for gradient in found])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("model"), width=64)


def test_adapters_in_float32_compute_same_bits_as_peft(folder: Path) -> None:
    assert torch.equal(*(gradients(adapted(folder, "float32", cast_down)) for cast_down in (False, True)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("four_bits", [False, pytest.param(True, marks=quantised)])
def test_adapters_cast_down_have_gradients_as_close_as_peft(folder: Path, dtype: str, four_bits: bool) -> None:
    def off(cast_down: bool) -> float:
        found = gradients(adapted(folder, dtype, cast_down, load_in_4bit=four_bits))
        return float((found - exact).norm() / exact.norm())

    exact = gradients(adapted(folder, "float32", cast_down=False, load_in_4bit=four_bits))
    theirs, ours = off(cast_down=False), off(cast_down=True)
    assert 0 < ours < 1.2 * theirs < 0.1


def test_adapters_of_16_bit_policy_are_cast_with_float32_weights(folder: Path) -> None:
    policy = Policy.load(ModelConfig(lora_r=4, dtype="bfloat16"), str(folder), "cpu")
    with policy.training() as model:
        adapters = [
            module for name, module in model.named_modules() if ".lora_" in name and isinstance(module, torch.nn.Linear)
        ]
    assert len(adapters) == 2 * 2 * 2 * 7  # A and B, policy and sampler, layers, projections
    assert {parameter.dtype for parameter in policy.trainable().values()} == {torch.float32}
