"""Packed weights: the same model, and always the newest weights; on a processor that cannot pack them, plain ones."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import ModelConfig, build
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.errors import ConfigError, ModelError
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.packed_weights import Product, can_pack, pack_weight, why_not_packed
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.trajectory import PolicyRef
from tests.support.numerics import DEVICE
from tests.support.sampler_roads import road as road
from tests.support.small_models import plain_slots, tiny_random


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float64, 1e-12)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("worth", [0, 10**9])
@pytest.mark.usefixtures("road")
def test_packed_product_equals_plain_product(
    dtype: torch.dtype, tolerance: float, bias: bool, worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.workflow.models.packed_weights.WORTH_PRODUCTS", worth)
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias).to(dtype)
    with torch.no_grad():
        product = pack_weight(plain.weight, plain.bias)
        for shape in ((1, 48), (7, 48), (2, 5, 48)):
            inputs = torch.randn(shape, dtype=dtype)
            assert torch.allclose(product(inputs), plain(inputs), atol=tolerance)


@pytest.fixture
def tried_anew() -> Iterator[None]:
    """What this process has found out about its processor is forgotten, before the test and after it."""
    why_not_packed.cache_clear()
    yield
    why_not_packed.cache_clear()


def raises(weight: Tensor, bias: Tensor | None) -> Product:
    """As the operation does on a processor without what it needs."""
    raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx_ne_convert or avx512bw\nframe #0")


def is_missing(weight: Tensor, bias: Tensor | None) -> Product:
    """As a torch that has no such operation."""
    made: Product = torch.ops.mkldnn.nothing_of_this_name(weight, bias)
    return made


def raises_when_it_multiplies(weight: Tensor, bias: Tensor | None) -> Product:
    """The weight is packed, but there is no product with it."""
    return lambda inputs: is_missing(inputs, bias)(inputs)


def forgets_the_bias(weight: Tensor, bias: Tensor | None) -> Product:
    """Wrong numbers."""
    return lambda inputs: functional.linear(inputs, weight)


def gives_no_numbers(weight: Tensor, bias: Tensor | None) -> Product:
    """Not a number at all."""
    return lambda inputs: functional.linear(inputs, weight, bias) * torch.nan


def gives_another_shape(weight: Tensor, bias: Tensor | None) -> Product:
    """Some of the outputs."""
    return lambda inputs: functional.linear(inputs, weight, bias)[:, 1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (raises, "bf16 path needs the cpu support avx_ne_convert or avx512bw"),
        (is_missing, "'mkldnn' object has no attribute 'nothing_of_this_name'"),
        (raises_when_it_multiplies, "'mkldnn' object has no attribute 'nothing_of_this_name'"),
        (forgets_the_bias, "a packed product is off by"),
        (gives_no_numbers, "a packed product is off by nan"),
        (gives_another_shape, "must match the size"),
    ],
)
def test_packed_product_that_fails_falls_back_to_plain_once(
    dtype: torch.dtype,
    kernel: Callable[..., Product],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    tried_anew: None,
) -> None:
    tries = []

    def counted(weight: Tensor, bias: Tensor | None) -> Product:
        tries.append(weight)
        return kernel(weight, bias)

    monkeypatch.setattr("agentrl.workflow.models.packed_weights.pack_with_onednn", counted)
    monkeypatch.setattr("agentrl.workflow.models.packed_weights.WORTH_PRODUCTS", 0)
    layer = nn.Linear(48, 80).to(dtype)
    inputs = torch.randn(7, 48, dtype=dtype)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(pack_weight(layer.weight, layer.bias)(inputs), layer(inputs))
    assert len(tries) == 1
    assert why in why_not_packed(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_product_that_works_is_used_for_each_weight(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tried_anew: None
) -> None:
    """The packed road, on a processor that has none too."""
    given: list[tuple[Tensor, Tensor | None]] = []

    def kernel(weight: Tensor, bias: Tensor | None) -> Product:
        given.append((weight, bias))
        return lambda inputs: functional.linear(inputs, weight, bias)

    monkeypatch.setattr("agentrl.workflow.models.packed_weights.pack_with_onednn", kernel)
    monkeypatch.setattr("agentrl.workflow.models.packed_weights.WORTH_PRODUCTS", 0)
    assert can_pack(torch.device("cpu"), dtype)
    given.clear()
    layer = nn.Linear(48, 80).to(dtype)
    inputs = torch.randn(7, 48, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(pack_weight(layer.weight, layer.bias)(inputs), layer(inputs))
    assert [weight is layer.weight and bias is layer.bias for weight, bias in given] == [True]


def test_packed_weights_skip_float64_and_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.workflow.models.packed_weights.why_not_packed", lambda dtype: "")
    assert can_pack(torch.device("cpu"), torch.float32)
    assert not can_pack(torch.device("cpu"), torch.float64)
    assert not can_pack(torch.device("cuda"), torch.float32)


def test_packed_weights_trial_leaves_random_state(tried_anew: None) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    why_not_packed(torch.float32)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.usefixtures("road")
def test_packed_sampler_uses_newly_published_weights(tmp_path: Path) -> None:
    policy = Policy.load(ModelConfig(), str(tiny_random(tmp_path / "base")), "cpu")
    ids = torch.tensor([[5, 6, 7]])
    for version in (1, 2):
        with torch.no_grad():
            for parameter in policy.trainable().values():
                parameter.mul_(1.1)
        folder = tmp_path / f"v{version}"
        sha256 = sealed_folder.write(folder, lambda beside: policy.save_weights(beside / sealed_folder.WEIGHTS))
        policy.publish(PolicyRef(str(policy.folder), policy.base_hash, str(folder), sha256, version))
        with torch.no_grad(), policy.decoding() as forward:
            slots = plain_slots(2)
            slots.prefill(0, 1, 3)
            said = forward(ids, torch.arange(3)[None], None, slots)
        with torch.no_grad(), policy.training() as trained:
            assert torch.allclose(said, trained.eval()(ids).logits[:, -1], atol=1e-4)


@pytest.mark.usefixtures("road")
def test_sampler_dtype_may_be_bfloat16_with_float32_trainer(tmp_path: Path) -> None:
    policy = Policy.load(ModelConfig(sampler_dtype="bfloat16"), str(tiny_random(tmp_path / "base")), DEVICE)
    request = GenerateRequest((5, 6, 7), PolicyRef(str(policy.folder), policy.base_hash), 3, 0, 24)
    engine = RollingEngine(policy, slots=2)
    completion = engine.submit(request).result(60)
    engine.close()
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]], device=policy.device)
    with torch.no_grad(), policy.training() as model:
        ours, _ = token_logprobs(model.eval(), ids, torch.ones_like(ids))
    assert {parameter.dtype for parameter in policy.trainable().values()} == {torch.float32}
    difference = (ours[0, 2:].cpu() - torch.tensor(completion.logprobs)).abs().max()
    assert 0 < difference < 0.1


@pytest.mark.parametrize("options", [{"lora_r": 4}, {"load_in_4bit": True}, {"numerics": "exact"}])
def test_sampler_dtype_needs_own_copy_of_weights(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"sampler_dtype|numerics: exact"):
        build({f"model.{name}": value for name, value in {"sampler_dtype": "bfloat16", **options}.items()})


def test_model_that_became_large_enough_for_lora_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.workflow.models.lookup.SMALL", 1)
    with pytest.raises(ModelError, match="shares the trainer's base"):
        Policy.load(ModelConfig(sampler_dtype="bfloat16"), str(tiny_random(tmp_path / "base")))
