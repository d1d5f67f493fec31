"""Scoring: what the head is asked in chunks is what all logits would say, gradients included, for every kind of model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.errors import ModelError
from agentrl.workflow.models import lm_head
from agentrl.workflow.models.logprobs import Prefixes, causal_model, checkpointing, shares_prefixes, token_logprobs
from agentrl.workflow.models.policy import Policy
from tests.support.numerics import DEVICE, asked, same_gradient
from tests.support.small_models import quantised, tiny_random

WORDS = 50
SMALL: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    **SMALL,
}
IDS = torch.arange(WORDS).repeat(2)[:84].view(4, 21) * 7 % WORDS
PRESENT = (torch.arange(21) < torch.tensor([21, 18, 21, 15])[:, None]).long()
WANTED = (torch.arange(84).view(4, 21) * 5 % 3 > 0) & (PRESENT > 0)
GRADIENT = torch.linspace(-1, 2, 80, dtype=torch.float64).view(4, 20)

PLAIN = {
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=True, **SIZES)),
    "untied": lambda: Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=False, **SIZES)),
    "with a bias": lambda: PhiForCausalLM(PhiConfig(**{**SIZES, "num_key_value_heads": 2})),
}
OTHERS = {
    "soft-capped": lambda: Gemma2ForCausalLM(Gemma2Config(head_dim=8, final_logit_softcapping=0.5, **SIZES)),
    "scaled": lambda: CohereForCausalLM(CohereConfig(**SIZES)),
}


@pytest.fixture(autouse=True)
def _chunks_of_seven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "HEAD_CHUNK", 7 * WORDS)


def made(model: Any) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = model().double().train()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def from_all_logits(model: nn.Module, temperature: float) -> tuple[Tensor, Tensor]:
    """The wanted logprobs and entropies, 0 elsewhere, as anyone would write it down."""
    everything = (model(input_ids=IDS, attention_mask=PRESENT).logits[:, :-1] / temperature).log_softmax(-1)
    logprobs = everything.gather(-1, IDS[:, 1:, None])[..., 0]
    entropy = -(everything.exp() * everything).sum(-1)
    return logprobs * WANTED[:, 1:], entropy * WANTED[:, 1:]


def gradients(model: nn.Module, logprobs: Tensor) -> dict[str, Tensor]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad((logprobs * GRADIENT.to(logprobs.dtype)).sum(), list(named.values()))
    return dict(zip(named, found, strict=True))


@pytest.mark.parametrize("frozen", [False, True], ids=["all weights", "head frozen"])
@pytest.mark.parametrize("kind", [*PLAIN, *OTHERS])
def test_logprobs_entropy_and_gradient_equal_full_logits(kind: str, frozen: bool) -> None:
    model = made((PLAIN | OTHERS)[kind])
    if frozen:
        model.requires_grad_(False)
        causal_model(model).base_model.layers.requires_grad_(True)  # type: ignore[union-attr]
    logprobs, entropy = token_logprobs(model, IDS, PRESENT, 0.7, WANTED)
    expected, its_entropy = from_all_logits(model, 0.7)
    assert torch.allclose(logprobs, expected, rtol=1e-10, atol=1e-12)
    assert torch.allclose(entropy, its_entropy, rtol=1e-10, atol=1e-12)
    assert not entropy.requires_grad
    theirs = gradients(model, expected)
    for name, ours in gradients(model, logprobs).items():
        # Norms of these bodies are computed in float32 whatever the model's type.
        assert torch.allclose(ours, theirs[name], rtol=1e-5, atol=1e-6 * float(theirs[name].abs().max() + 1)), name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_head_gradient_is_exact(frozen: bool, bias: bool, temperature: float) -> None:
    torch.manual_seed(1)
    head = nn.Linear(6, WORDS, bias=bias).double().requires_grad_(not frozen)
    hidden, targets = torch.randn(20, 6, dtype=torch.float64, requires_grad=True), torch.randint(WORDS, (20,))
    everything = (head(hidden) / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    logprobs, _ = lm_head.head_logprobs(head, hidden, targets, temperature)
    leaves = [hidden] if frozen else [hidden, *head.parameters()]
    weights = torch.randn(20, dtype=torch.float64)
    expected = torch.autograd.grad((everything * weights).sum(), leaves)
    for ours, theirs in zip(torch.autograd.grad((logprobs * weights).sum(), leaves), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("frozen", [True, False])
def test_head_in_16_bits_accumulates_in_32(frozen: bool) -> None:
    torch.manual_seed(1)
    head = nn.Linear(64, WORDS, bias=True).to(torch.bfloat16).requires_grad_(not frozen)
    hidden, targets = torch.randn(70, 64).to(torch.bfloat16).requires_grad_(), torch.randint(WORDS, (70,))
    wide = copy.deepcopy(head).float()
    wide_hidden = hidden.detach().float().requires_grad_()
    logprobs, entropy = lm_head.head_logprobs(head, hidden, targets, 0.7)
    expected, _ = lm_head.head_logprobs(wide, wide_hidden, targets, 0.7)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(logprobs, expected, atol=0.03)
    (logprobs.sum() + expected.sum()).backward()  # type: ignore[no-untyped-call]
    pairs = (
        [(hidden, wide_hidden)] if frozen else [(hidden, wide_hidden), *zip(head.parameters(), wide.parameters(), strict=True)]
    )
    for ours, theirs in pairs:
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == torch.bfloat16
        assert float((ours.grad.float() - theirs.grad).norm() / theirs.grad.norm()) < 0.02


@pytest.mark.parametrize("frozen", [True, False])
def test_head_in_16_bits_keeps_gradient_of_certain_token(frozen: bool) -> None:
    torch.manual_seed(1)
    head = nn.Linear(64, WORDS, bias=False).to(torch.bfloat16).requires_grad_(not frozen)
    with torch.no_grad():
        head.weight[:, 0] = torch.where(torch.arange(WORDS) == 7, 12.0, 0.5)  # the logits, which so are exact
    hidden = torch.zeros(9, 64, dtype=torch.bfloat16).index_fill_(1, torch.tensor([0]), 1).requires_grad_()
    logprobs, _ = lm_head.head_logprobs(head, hidden, torch.full((9,), 7), 1.0)
    assert 0.999 < float(logprobs.detach().exp().mean()) < 0.9999
    (ours,) = torch.autograd.grad(logprobs.sum(), hidden)
    weight = head.weight.detach().double()
    exact = weight[7] - weight[:, 0].softmax(0) @ weight
    assert float((ours.double() - exact)[:, 1:].norm(dim=1).max() / exact[1:].norm()) < 0.01


def test_logprobs_make_at_most_a_chunk_of_logits() -> None:
    model = made(PLAIN["tied"])
    heights: set[int] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dim() > 1 and out.shape[-1] == WORDS:
                heights.add(out.numel() // WORDS)
            return out

    with Watch():
        gradients(model, token_logprobs(model, IDS, PRESENT, 1.0, WANTED)[0])
    heights.discard(16)  # the weight, turned round
    assert 7 in heights
    assert max(heights) == 7 < int(WANTED.sum())


# --- what rows begin with -----------------------------------------------------------------------------------------------------


def shared_and_whole(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Six rows on three beginnings of unequal length, with these read once, and every row for itself."""
    torch.manual_seed(2)
    beginnings, lines = torch.randint(WORDS, (3, 9)), torch.randint(WORDS, (6, 7))
    lengths, of = torch.tensor([9, 5, 7]), torch.tensor([0, 1, 2, 1, 0, 1])
    there = (torch.arange(9) < lengths[:, None]).long()
    present = (torch.arange(7) < torch.tensor([7, 6, 7, 3, 7, 7])[:, None]).long()
    shared, _ = token_logprobs(model, lines, present, 0.9, present > 0, Prefixes(beginnings * there, there, of))
    whole = []
    for line, mask, which in zip(lines, present, of, strict=True):
        start = int(lengths[which])
        ids = torch.cat([beginnings[which, :start], line])[None]
        ones = torch.cat([torch.ones(start, dtype=torch.long), mask])[None]
        whole.append(token_logprobs(model, ids, ones, 0.9, ones > 0)[0][0, start:])
    return shared, torch.stack(whole)


def test_shared_prefix_keeps_logprobs_and_gradient() -> None:
    torch.manual_seed(0)
    shape = GPT2Config(n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **SMALL)
    model = GPT2LMHeadModel(shape).double()  # its norms are float64 too
    assert shares_prefixes(model)
    shared, whole = shared_and_whole(model)
    assert torch.allclose(shared, whole, rtol=1e-12, atol=1e-13)
    weights = torch.linspace(-1, 2, 36, dtype=torch.float64).view(6, 6)
    named = dict(model.named_parameters())
    ours, theirs = (torch.autograd.grad((values * weights).sum(), list(named.values())) for values in (shared, whole))
    for name, one, other in zip(named, ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12), name


def test_shared_prefix_works_with_rotary_and_grouped_heads() -> None:
    shared, whole = shared_and_whole(made(PLAIN["tied"]))
    assert torch.allclose(shared, whole, rtol=1e-5, atol=1e-6)


def test_shared_prefix_is_off_for_models_without_full_attention() -> None:
    sliding = Cohere2ForCausalLM(Cohere2Config(sliding_window=4, head_dim=8, **SIZES))
    assert not shares_prefixes(sliding)
    window = Qwen2Config(use_sliding_window=True, sliding_window=4, max_window_layers=0, **SIZES)
    assert not shares_prefixes(Qwen2ForCausalLM(window))
    assert not shares_prefixes(made(OTHERS["soft-capped"]))


# --- checkpointing, adapters, quantised bases ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"lora_r": 0}, {"lora_r": 4}, {"lora_r": 4, "lora_dropout": 0.3}, pytest.param({"load_in_4bit": True}, marks=quantised)],
)
def test_gradient_checkpointing_gives_same_gradient(options: dict[str, Any], tmp_path: Path) -> None:
    policy = Policy.load(ModelConfig.model_validate(asked(options)), str(tiny_random(tmp_path / "base")), DEVICE)
    ids, present, wanted = (tensor.to(policy.device) for tensor in (IDS, PRESENT, WANTED))
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.01)
    found = []
    for on in (False, True):
        torch.manual_seed(5)
        with policy.training() as model, checkpointing(model, on):
            logprobs, _ = token_logprobs(model, ids, present, 1.0, wanted)
            found.append(torch.autograd.grad(logprobs.sum(), list(policy.trainable().values())))
    assert all(same_gradient(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(*found, strict=True))
    assert any(one.abs().sum() > 0 for one in found[0])


def test_gradient_checkpointing_works_with_older_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(PLAIN["tied"])
    if hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        for verb in ("enable", "disable"):
            does = getattr(PreTrainedModel, f"_activation_checkpointing_{verb}")
            monkeypatch.setattr(PreTrainedModel, f"gradient_checkpointing_{verb}", does)
            monkeypatch.delattr(PreTrainedModel, f"activation_checkpointing_{verb}")
    layers = causal_model(model).base_model.layers
    with checkpointing(model, True):
        assert all(layer.gradient_checkpointing for layer in layers)
    assert not any(layer.gradient_checkpointing for layer in layers)


def test_gradient_checkpointing_unsupported_is_reported() -> None:
    model = made(PLAIN["tied"])
    causal_model(model).supports_gradient_checkpointing = False
    with (
        pytest.raises(ModelError, match="Qwen2ForCausalLM does not support gradient checkpointing"),
        checkpointing(model, True),
    ):
        pass


@quantised
@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_quantised_base_keeps_plain_head(bits: str, tmp_path: Path) -> None:
    policy = Policy.load(ModelConfig.model_validate({bits: True}), str(tiny_random(tmp_path / "base")), device="cpu")
    with policy.sampling() as model, torch.no_grad():
        assert shares_prefixes(model)
        ours, _ = token_logprobs(model, IDS, PRESENT, 0.7, WANTED)
        expected, _ = from_all_logits(model, 0.7)
    assert torch.allclose(ours, expected.float(), atol=1e-5)
