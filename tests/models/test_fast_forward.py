"""The engine's forward pass says what transformers' own says: each architecture, each kind of call, adapters, four bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPTJConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.models.fast_forward import Pass, is_supported, scaled_attention, transformers_pass, wants_copies
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.models.tiny import save_tiny
from tests.support.numerics import DEVICE
from tests.support.sampler_roads import road as road
from tests.support.small_models import plain_slots, quantised, tokenizer

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
CONFIGS: dict[str, PreTrainedConfig] = {
    "Qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2),
    "Qwen2 with a head for each key": Qwen2Config(**SHAPE, num_key_value_heads=4, tie_word_embeddings=True),
    "Qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16),
    "Llama": LlamaConfig(**SHAPE, num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    "Llama with stretched positions": LlamaConfig(
        **SHAPE,
        num_key_value_heads=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "Mistral": MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=None),
}
PROMPT, ROWS = 9, 3
TOLERANCES = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 0.06}


def random_model(config: PreTrainedConfig, dtype: str = "float64") -> PreTrainedModel:
    """Random weights, biases and norms too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    made: PreTrainedModel = model.eval().requires_grad_(False)
    return made


def policy_of(folder: Path, config: PreTrainedConfig, **options: Any) -> Policy:
    """A policy whose base is that model; the sampler's adapter, if it has one, is random."""
    save_tiny(folder, random_model(config, "float32"), tokenizer())  # type: ignore[arg-type]
    policy = Policy.load(ModelConfig.model_validate(options), str(folder), "cpu" if "numerics" in options else DEVICE)
    if policy.kind == "lora":
        adapter = {name: torch.randn_like(tensor) * 0.1 for name, tensor in policy.trainable().items()}
        policy._fill("sampler", adapter)
    return policy


@torch.no_grad()
def said(forward: Pass, device: torch.device) -> list[torch.Tensor]:
    """What it says after prompts, after a token of each row at one length and at unequal ones, and after several at once."""
    draw = torch.Generator().manual_seed(1)
    slots = plain_slots(2)
    slots.prefill(0, ROWS, PROMPT)

    def read(positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        ids = torch.randint(300, positions.shape, generator=draw)
        return forward(ids.to(device), positions.to(device), mask if mask is None else mask.to(device), slots)

    logits = [read(torch.arange(PROMPT).expand(ROWS, -1), None)]
    for positions, even in (([9, 9, 9], True), ([10, 4, 7], False), ([[11, 12, 13], [5, 6, 7], [8, 9, 10]], False)):
        at = torch.tensor(positions).view(ROWS, -1)
        length = int(at.max()) + 1
        slots.extend(0, at.to(device), length)
        logits.append(read(at, None if even else (torch.arange(length) <= at[:, :, None])[:, None]))
    return logits


def differences(policy: Policy) -> list[float]:
    """How far the policy's pass is from the model's own."""
    with policy.decoding() as ours, policy.sampling() as model:
        pairs = zip(said(ours, policy.device), said(transformers_pass(model), policy.device), strict=True)
        return [(one - other).abs().max().item() for one, other in pairs]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.usefixtures("road")
def test_fast_forward_equals_transformers_with_all_weights(tmp_path: Path, name: str, dtype: str) -> None:
    numerics = {"numerics": "exact"} if dtype == "float64" else {"dtype": dtype}
    policy = policy_of(tmp_path, CONFIGS[name], lora_r=0, **numerics)
    with policy.sampling() as model:
        assert is_supported(model)
        scale = said(transformers_pass(model), policy.device)[0].abs().max().item()
    assert max(differences(policy)) < TOLERANCES[dtype] * scale


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fast_forward_equals_transformers_with_adapter(tmp_path: Path, name: str, dtype: str) -> None:
    policy = policy_of(tmp_path, CONFIGS[name], lora_r=4, dtype=dtype)
    with policy.sampling() as model:
        scale = said(transformers_pass(model), policy.device)[0].abs().max().item()
    assert max(differences(policy)) < TOLERANCES[dtype] * scale


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("up_proj",), ("self_attn.k_proj", "down_proj")])
def test_fast_forward_equals_transformers_with_partial_adapter(tmp_path: Path, targets: tuple[str, ...]) -> None:
    policy = policy_of(tmp_path, CONFIGS["Qwen2"], lora_r=4, dtype="float32", lora_targets=targets)
    with policy.sampling() as model:
        scale = said(transformers_pass(model), policy.device)[0].abs().max().item()
    assert max(differences(policy)) < TOLERANCES["float32"] * scale


@quantised
def test_fast_forward_equals_transformers_with_4_bits(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, CONFIGS["Qwen2"], load_in_4bit=True, dtype="float32")
    assert max(differences(policy)) < 1e-3


def test_fast_forward_does_not_copy_large_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.workflow.models.policy.COPY_LIMIT", 1)
    policy = policy_of(tmp_path, CONFIGS["Qwen2"], lora_r=0, dtype="float32")
    with policy.decoding() as forward, policy.sampling() as model:
        before = said(forward, policy.device)
        model.get_input_embeddings().weight.mul_(2)  # type: ignore[operator]
        assert (
            max((one - other).abs().max().item() for one, other in zip(said(forward, policy.device), before, strict=True)) > 0.1
        )
    assert max(differences(policy)) < 1e-4


def test_fast_forward_leaves_other_architectures_alone() -> None:
    assert is_supported(random_model(CONFIGS["Qwen2"]))
    assert not is_supported(random_model(GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=96)))
    eager = random_model(CONFIGS["Qwen2"])
    eager.set_attn_implementation("eager")
    assert not is_supported(eager)


@pytest.mark.parametrize("masked", [False, True])
def test_fast_forward_copied_shared_keys_attend_alike(masked: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 6, 5, 8, generator=draw, dtype=torch.float64)
    keys, values = torch.randn(2, 2, 2, 5, 8, generator=draw, dtype=torch.float64)
    bias = torch.randn(2, 1, 5, 5, generator=draw, dtype=torch.float64) if masked else None
    shared, copied = (scaled_attention(queries, keys, values, bias, copies) for copies in (False, True))
    assert torch.allclose(shared, copied, rtol=0, atol=1e-12)


def test_fast_forward_copies_shared_keys_on_gpu_without_kernel() -> None:
    assert not any(wants_copies("cpu", dtype, bias) for dtype in (torch.float32, torch.bfloat16) for bias in (False, True))
    assert not wants_copies("cuda", torch.bfloat16, False)
    assert wants_copies("cuda", torch.bfloat16, True)
    assert wants_copies("cuda", torch.float32, False)


def test_fast_forward_step_is_one_graph_for_all_positions(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, CONFIGS["Qwen2"], lora_r=0, numerics="exact")
    with policy.decoding() as forward:
        slots = plain_slots(2)
        slots.prefill(0, ROWS, PROMPT)
        graphs = []

        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        def step(ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return forward(ids, positions, mask, slots)

        with torch.no_grad():
            forward(torch.ones(ROWS, PROMPT, dtype=torch.long), torch.arange(PROMPT).expand(ROWS, -1), None, slots)
            compiled = torch.compile(step, backend=keep, fullgraph=True, dynamic=False)
            for at in (9, 11, 14):
                positions = torch.tensor([[at], [at - 2], [at - 4]])
                slots.extend(0, positions, 32)
                mask = (torch.arange(32) <= positions[:, :, None])[:, None]
                ids = torch.tensor([[5], [6], [7]])
                assert torch.equal(compiled(ids, positions, mask), step(ids, positions, mask))
    assert len(graphs) == 1
