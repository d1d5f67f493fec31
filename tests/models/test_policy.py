"""policy: what trains, what samples, what is published, and that nothing altered is ever loaded."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from peft import get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.workflow.checkpoints.sealed_folder import WEIGHTS, sha256_file
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.errors import CheckpointError, ModelError
from agentrl.workflow.models import loading
from agentrl.workflow.models.loading import find_lora_layers, lora_config
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.lookup import base_hash, model_folder, resolve_model, sft_model_name
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import settings
from agentrl.workflow.trajectory import PolicyRef
from bench.performance.models import HALF_BILLION
from tests.support.numerics import DEVICE, asked
from tests.support.small_models import quantised, tiny_random

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.arange(10, 30).view(2, 10)
KINDS: dict[str, dict[str, Any]] = {
    "full": asked({"lora_r": 0}),
    "lora": asked({"lora_r": 4}),
    "exact": {"numerics": "exact"},
}


def config(**fields: Any) -> ModelConfig:
    return ModelConfig.model_validate(fields)


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    ids = IDS.to(next(model.parameters()).device)
    return token_logprobs(model, ids, torch.ones_like(ids))[0]


def sampled(policy: Policy) -> torch.Tensor:
    with policy.sampling() as model, torch.no_grad():
        return logprobs(model)


def trained(policy: Policy) -> torch.Tensor:
    with policy.training() as model, torch.no_grad():
        return logprobs(model)


def anchor(policy: Policy) -> torch.Tensor:
    with policy.reference() as model, torch.no_grad():
        return logprobs(model)


@torch.no_grad()
def disturb(policy: Policy) -> None:
    for parameter in policy.trainable().values():
        parameter.add_(0.02)


def checkpoint(policy: Policy, folder: Path, version: int = 1) -> PolicyRef:
    folder.mkdir()
    policy.save_weights(folder / WEIGHTS)
    return PolicyRef("tiny", policy.base_hash, str(folder), sha256_file(folder / WEIGHTS), version)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("models") / "tiny")


def where(kind: str) -> str:
    """`numerics: exact` computes on the CPU, whatever the device."""
    return "cpu" if kind == "exact" else DEVICE


@pytest.fixture(params=KINDS)
def policy(request: pytest.FixtureRequest, folder: Path) -> Any:
    yield Policy.load(config(**KINDS[request.param]), str(folder), where(request.param))
    torch.use_deterministic_algorithms(False)


def test_lora_share_of_half_billion_qwen2_is_right() -> None:
    with torch.device("meta"):
        base, asked = Qwen2ForCausalLM(HALF_BILLION), config(lora_dropout=0.05)
        model = get_peft_model(base, lora_config(asked, 8, find_lora_layers(asked, base)))
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    assert sum(size for size, trains in sizes if trains) == 4_399_104
    assert sum(size for size, _ in sizes) == 498_431_872


def test_policy_sampler_and_reference_start_as_base(policy: Policy) -> None:
    assert torch.equal(sampled(policy), trained(policy))
    assert torch.equal(sampled(policy), anchor(policy))


def test_policy_sampler_ignores_optimizer_writes(policy: Policy) -> None:
    before, reference = sampled(policy), anchor(policy)
    disturb(policy)
    assert not torch.allclose(trained(policy), before)
    assert torch.equal(sampled(policy), before)
    assert torch.equal(anchor(policy), reference)


def test_policy_gradients_reach_exactly_trainable_part(policy: Policy) -> None:
    sampled(policy)
    with policy.training() as model:
        logprobs(model).sum().backward()
        trains = {id(p) for p in model.parameters() if p.requires_grad}
    assert trains == {id(p) for p in policy.trainable().values()}
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in policy.trainable().values())


def test_policy_publish_is_exact_and_returns_to_base(policy: Policy, tmp_path: Path) -> None:
    base = sampled(policy)
    disturb(policy)
    ref = checkpoint(policy, tmp_path / "v1")
    policy.publish(ref)
    assert torch.equal(sampled(policy), trained(policy))
    policy.publish(PolicyRef("tiny", policy.base_hash))
    assert torch.equal(sampled(policy), base)
    policy.load_weights(None)
    assert torch.equal(trained(policy), base)
    policy.load_weights(tmp_path / "v1" / WEIGHTS)
    assert not torch.allclose(trained(policy), base)


def test_policy_loads_same_weights_in_another_process(policy: Policy, folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    other = Policy.load(policy.config, str(folder), policy.device.type)
    assert checkpoint(policy, tmp_path / "a").sha256 == checkpoint(other, tmp_path / "b").sha256


def test_policy_refuses_flipped_bit_missing_file_and_other_base(policy: Policy, tmp_path: Path) -> None:
    before = sampled(policy)
    disturb(policy)
    ref = checkpoint(policy, tmp_path / "v1")
    file = tmp_path / "v1" / WEIGHTS
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="altered"):
        policy.publish(ref)
    file.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        policy.publish(ref)
    with pytest.raises(CheckpointError, match="another base"):
        policy.publish(PolicyRef("tiny", "0" * 64, str(tmp_path / "v1"), ref.sha256, 1))
    assert torch.equal(sampled(policy), before)


def test_policy_load_detects_base_changed_during_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_random(tmp_path / "m")
    before, tokenizer = base_hash(folder), loading.load_tokenizer

    def changing(where: Path, code: bool) -> Any:
        tiny_random(folder, seed=1)
        return tokenizer(where, code)

    monkeypatch.setattr(loading, "load_tokenizer", changing)
    assert Policy.load(config(lora_r=0), str(folder), device=DEVICE).base_hash == base_hash(folder) != before


def test_policy_loads_concurrently(folder: Path) -> None:
    alone = Policy.load(config(lora_r=0), str(folder), device=DEVICE).trainable().keys()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: Policy.load(config(lora_r=0), str(folder), device=DEVICE).trainable().keys(), range(8)))
    assert all(names == alone for names in found)


def test_policy_detects_base_rewritten_in_its_folder(tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "m")
    policy = Policy.load(config(lora_r=0), str(folder), device=DEVICE)
    before = trained(policy)
    disturb(policy)
    ref = checkpoint(policy, tmp_path / "v1")
    policy.publish(ref)
    tiny_random(folder, seed=1)
    with pytest.raises(CheckpointError, match="has changed"):
        policy.load_weights(None)
    with pytest.raises(CheckpointError, match="has changed"):
        policy.publish(PolicyRef("tiny", policy.base_hash))
    with pytest.raises(CheckpointError, match="has changed"):
        anchor(policy)
    tiny_random(folder)
    policy.load_weights(None)
    assert torch.equal(trained(policy), before)


def test_policy_refuses_broken_weights_and_other_shapes(policy: Policy, tmp_path: Path) -> None:
    wider = Policy.load(config(lora_r=5), str(tiny_random(tmp_path / "m", layers=1)), device=DEVICE)
    ref = checkpoint(wider, tmp_path / "v1")
    with pytest.raises(CheckpointError, match="do not fit"):
        policy.load_weights(Path(ref.path) / WEIGHTS)
    (tmp_path / "broken").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="Cannot read"):
        policy.load_weights(tmp_path / "broken")


@quantised
@pytest.mark.parametrize("newest", [True, False])
@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_policy_of_quantised_base_takes_lora_step(
    bits: str, newest: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where bitsandbytes would repack 4 bits for a processor with AVX-512 and bfloat16, and where it would not."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: newest)
    policy = Policy.load(config(**asked({bits: True})), str(folder), DEVICE)
    assert policy.kind == "lora"
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-2)
    losses = []
    for _ in range(3):
        sampled(policy)  # sampling in between leaves the base trainable
        with policy.training() as model:
            loss = -logprobs(model).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}


def test_policy_with_exact_numerics_keeps_float64(folder: Path) -> None:
    policy = Policy.load(config(numerics="exact"), str(folder))
    torch.use_deterministic_algorithms(False)
    assert sampled(policy).dtype == torch.float64
    assert policy.device.type == "cpu"


def test_policy_of_small_model_trains_all_weights_by_default(folder: Path) -> None:
    assert Policy.load(config(), str(folder), device=DEVICE).kind == "full"


@hypothesis_settings(max_examples=30)
@given(st.integers(0, 6), st.floats(0.5, 2.0))
def test_policy_logprobs_ignore_padding_and_use_temperature(padding: int, temperature: float) -> None:
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    model = Qwen2ForCausalLM(shape).eval()
    wide = torch.cat([IDS, torch.zeros(2, padding, dtype=torch.long)], 1)
    with torch.no_grad():
        padded, entropy = token_logprobs(model, wide, (wide > 0).long(), temperature)
        alone = model(IDS).logits[:, :-1] / temperature
    everything = alone.log_softmax(-1)
    assert torch.allclose(padded[:, :9], everything.gather(-1, IDS[:, 1:, None])[..., 0], atol=1e-5)
    assert torch.allclose(entropy[:, :9], torch.distributions.Categorical(logits=alone).entropy(), atol=1e-5)


def test_base_hash_covers_weights_and_tokenizer(folder: Path, tmp_path: Path) -> None:
    assert base_hash(folder) == base_hash(tiny_random(tmp_path / "same"))
    assert base_hash(folder) != base_hash(tiny_random(tmp_path / "other", seed=1))
    tokenizer_config = tmp_path / "same" / "tokenizer_config.json"
    tokenizer_config.write_text(json.dumps({**json.loads(tokenizer_config.read_text()), "padding_side": "left"}))
    assert base_hash(folder) != base_hash(tmp_path / "same")


def test_model_not_found_says_what_to_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    settings.cache_clear()
    with pytest.raises(ModelError, match="agentrl sft --dataset arithmetic --model tiny"):
        resolve_model("tiny", "arithmetic")
    for name in ("./nowhere", str(tmp_path)):
        with pytest.raises(ModelError, match="Pass a local model folder"):
            model_folder(name)
    made = tiny_random(settings().models_dir / sft_model_name("tiny", "arithmetic"))
    assert resolve_model("tiny", "arithmetic") == resolve_model("tiny-arithmetic", "gsm8k") == str(made)
    assert resolve_model(str(made), "gsm8k") == str(made)
    assert resolve_model("Qwen/Qwen2.5-0.5B-Instruct", "gsm8k") == "Qwen/Qwen2.5-0.5B-Instruct"
    settings.cache_clear()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": 5}, "have other shapes than its config.json says"),
        ({"model_type": "nosuch", "architectures": ["NoSuch"]}, "does not recognize this architecture"),
        ({"model_type": "t5"}, "not a causal language model that transformers can run: it cannot be sampled or trained here"),
        ({"hidden_size": "wide"}, "expected int, got str"),
        ({"hidden_act": "nosuch"}, "it names an unknown 'nosuch'"),
    ],
)
def test_model_files_that_disagree_are_one_sentence(tmp_path: Path, change: dict[str, object], said: str) -> None:
    folder = tiny_random(tmp_path / "model")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ModelError, match=said) as raised:
        Policy.load(config(), str(folder), device=DEVICE)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_model_in_hub_cache_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--someone--something"
    snapshot = tiny_random(cached / "snapshots" / ("a" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    assert model_folder("someone/something") == snapshot
    assert Policy.load(config(), "someone/something", device=DEVICE).kind == "full"


def test_model_on_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"Cannot reach the hub for 'someone/something'\. Pass a local model folder"):
        model_folder("someone/something")
    with pytest.raises(ModelError, match="There is no model 'a/b/c'"):
        model_folder("a/b/c")


def test_policy_trains_padding_token_that_ends_turns(folder: Path, tmp_path: Path) -> None:
    same = tmp_path / "same"
    shutil.copytree(folder, same)
    padding = int(IDS[0, 3])
    values = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(values | {"pad_token_id": padding, "eos_token_id": padding}))
    policy = Policy.load(config(lora_r=0, dtype="float32"), str(same), "cpu")
    with policy.training() as model:
        embedding = model.get_input_embeddings()
        (gradient,) = torch.autograd.grad(model.model(input_ids=IDS).last_hidden_state.sum(), embedding.weight)
    assert gradient[IDS.flatten()].abs().amax(-1).gt(0).all()


@pytest.mark.parametrize(
    ("dataset", "advice"), [("missing.jsonl", "Train another's"), ("OWNER/NAME", "Train it on its answers")]
)
def test_missing_tiny_model_advises_what_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dataset: str, advice: str
) -> None:
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    settings.cache_clear()
    with pytest.raises(ModelError) as refused:
        resolve_model("tiny", dataset)
    assert refused.value.hint.startswith(advice)
