"""The memory that is computed from a model's files is what a loaded model holds and what autograd saves."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Params4bit
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.workflow.config import ModelConfig, build
from agentrl.workflow.inference.model_rows import open_rows
from agentrl.workflow.inference.slot_rows import SlotRows
from agentrl.workflow.models import policy as policies
from agentrl.workflow.models.headers import read_model_files
from agentrl.workflow.models.loading import DTYPES
from agentrl.workflow.models.logprobs import checkpointing, token_logprobs
from agentrl.workflow.models.memory_estimate import (
    FLOAT,
    FREE_SHARE,
    MICROBATCH_TOKENS,
    Shape,
    always,
    estimate_memory,
    microbatch_that_fits,
    shape_of,
    while_sampling,
    while_updating,
)
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.row_scorer import RowScorer
from tests.support.families import FAMILIES, save_random
from tests.support.fits import table
from tests.support.small_models import tiny_random


@pytest.fixture(params=["float32", "bfloat16"])
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], tuple[Policy, Shape]]:
    """A small 4-bit model of so many layers, with its shape."""

    def load(layers: int) -> tuple[Policy, Shape]:
        path = tiny_random(tmp_path / str(layers), layers=layers, width=128)
        policy = Policy.load(ModelConfig(load_in_4bit=True, lora_r=4, dtype=request.param), str(path), "cpu")
        files = read_model_files(path)
        return policy, Shape(files.config, files.shapes, 4, DTYPES[request.param].itemsize, bits=4)

    return load


def test_estimate_always_is_what_a_loaded_model_holds(
    quantised: Callable[[int], tuple[Policy, Shape]],
) -> None:
    policy, shape = quantised(2)
    with policy.sampling() as model:
        weights = list(model.parameters())
    scales = [weight.quant_state for weight in weights if isinstance(weight, Params4bit)]
    held = sum(tensor.nbytes for tensor in [*weights, *(s.absmax for s in scales), *(s.state2.absmax for s in scales)])
    assert len(scales) == 2 * 7
    assert held + 4 * shape.lora == sum(always(shape).values())  # the initial adapter is in no module


@pytest.mark.parametrize("on", [False, True])
def test_estimate_activations_are_what_autograd_saves(quantised: Callable[[int], tuple[Policy, Shape]], on: bool) -> None:
    rows, tokens = 3, 40
    fewer, more = (_saved(*quantised(layers), (rows, tokens), on) for layers in (2, 5))
    # The rest of the model keeps something too, whatever the layers are.
    assert more[0] - fewer[0] == pytest.approx(more[1] - fewer[1], rel=0.01)


@pytest.mark.parametrize("on", [False, True])
def test_estimate_of_mixed_precision_is_what_autograd_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    monkeypatch.setattr(policies, "mixed_dtype", lambda device, kind: torch.bfloat16)

    def load(layers: int) -> tuple[Policy, Shape]:
        files = read_model_files(path := tiny_random(tmp_path / str(layers), layers=layers, width=128))
        policy = Policy.load(ModelConfig(lora_r=0), str(path), "cpu")
        return policy, Shape(files.config, files.shapes, 0, FLOAT // 2, mixed=True)

    fewer, more = (_saved(*load(layers), (3, 40), on) for layers in (2, 5))
    assert more[0] - fewer[0] == pytest.approx(more[1] - fewer[1], rel=0.01)


def test_estimate_of_full_weights_on_gpu_is_mixed_precision(tmp_path: Path) -> None:
    files = read_model_files(tiny_random(tmp_path))
    mixed, asked = (shape_of(build({"model.lora_r": 0, "model.dtype": d}), files, 0, on_gpu=True) for d in ("auto", "float32"))
    assert (mixed.mixed, mixed.element) == (True, 2)
    assert (asked.mixed, asked.element) == (False, FLOAT)


def _saved(policy: Policy, shape: Shape, size: tuple[int, int], on: bool) -> tuple[int, int]:
    """Bytes that autograd saves beside the weights, and that are computed."""
    ids = torch.arange(size[0] * size[1]).reshape(size) % 300
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        return found.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with policy.training() as model, checkpointing(model, on), saved_tensors_hooks(pack, lambda tensor: tensor):
        token_logprobs(model, ids, torch.ones_like(ids))
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = sum(tensor.untyped_storage().nbytes() for place, tensor in found.items() if place not in weights)
    return saved, shape.activations(size[0] * size[1], on)


def test_estimate_full_weights_are_what_a_loaded_model_holds(tmp_path: Path) -> None:
    files = read_model_files(folder := tiny_random(tmp_path / "model"))
    policy = Policy.load(ModelConfig(lora_r=0), str(folder), "cpu")
    with policy.decoding(), policy.sampling() as sampler, policy.training() as trained:
        held = sum(weight.nbytes for model in (sampler, trained) for weight in model.parameters())
    packed = sum(weight.nbytes for weight in trained.parameters())  # `FastForward` keeps each weight once more
    assert held + packed == sum(always(Shape(files.config, files.shapes, 0, FLOAT)).values())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_dim", [8, 24])
def test_estimate_reads_heads_and_embeddings_of_other_families(tmp_path: Path, tied: bool, head_dim: int) -> None:
    """Qwen3's heads have a width of their own; a head that is tied is in no file or counts once."""
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = Qwen3Config(**sizes, num_key_value_heads=2, head_dim=head_dim, tie_word_embeddings=tied)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    files = read_model_files(tmp_path)
    shape = Shape(files.config, files.shapes, 4, FLOAT)
    assert shape.all == model.num_parameters()
    assert (shape.keys, shape.base) == (2 * head_dim, sum(p.numel() for n, p in model.named_parameters() if "proj" in n))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt-oss"])
def test_estimate_of_cache_is_what_slots_of_family_hold(family: str, dtype: str, tmp_path: Path) -> None:
    policy = Policy.load(ModelConfig(lora_r=4, dtype=dtype), str(save_random(tmp_path, FAMILIES[family]())), "cpu")
    rows, tokens = 3, 70
    slots = open_rows(policy)
    assert isinstance(slots, SlotRows)
    ids = tuple(3 + number % 50 for number in range(tokens - 1))
    with torch.no_grad():
        slots.read(0, [ids] * rows)
        slots.next_logits(torch.tensor([5] * rows), torch.tensor([tokens - 1] * rows))
    kept = [
        tensor
        for layer in slots._slots.layers
        for tensor in (*(getattr(layer, "_store", None) or ()), *getattr(layer, "_states", {}).values())
    ]
    files = read_model_files(tmp_path)
    parts = while_sampling(Shape(files.config, files.shapes, 4, DTYPES[dtype].itemsize), rows, tokens, on_gpu=False)
    assert sum(tensor.nbytes for tensor in kept) == sum(size for name, size in parts.items() if "logits" not in name)


def test_estimate_adds_the_reference_of_fully_trained_weights(tmp_path: Path) -> None:
    files = read_model_files(tiny_random(tmp_path / "model"))
    plain, with_kl = build({"model.lora_r": 0}), build({"model.lora_r": 0, "algorithm.kl_coef": 0.1})
    one, other = (estimate_memory(config, files, 0, 128, on_gpu=False) for config in (plain, with_kl))
    assert one is not None
    assert other is not None
    assert other.peak - one.peak == FLOAT * Shape(files.config, files.shapes, 0, FLOAT).all


def test_estimate_is_none_for_incomplete_config(tmp_path: Path) -> None:
    folder = tiny_random(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    wrong = {"hidden_size": None, "num_attention_heads": 0, "num_hidden_layers": "x", "vocab_size": [], "head_dim": 10**400}
    for key, value in {**wrong, "intermediate_size": -(10**9)}.items():
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        assert estimate_memory(build({}), read_model_files(folder), 8, 128, on_gpu=True) is None


def test_estimate_microbatch_fills_its_share_of_free_memory(tmp_path: Path) -> None:
    files = read_model_files(tiny_random(tmp_path, layers=4, width=128))
    shape = Shape(files.config, files.shapes, 8, 2)
    for again in (False, True):
        for free in (2**27, 2**28):
            tokens = microbatch_that_fits(shape, free, again)
            taken, with_more = (sum(while_updating(shape, number, again).values()) for number in (tokens, tokens + 64))
            assert 256 <= tokens < 16_384
            assert taken <= FREE_SHARE * free < with_more
    assert microbatch_that_fits(shape, 0, checkpointing=False) == 256
    assert microbatch_that_fits(shape, 2**50, checkpointing=False) == 16_384
    assert microbatch_that_fits(Shape({}, files.shapes, 8, 2), 2**30, checkpointing=False) == MICROBATCH_TOKENS


def test_gpu_memory_sets_microbatch_unless_config_or_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.load(ModelConfig(lora_r=4), str(tiny_random(tmp_path, layers=4, width=128)), "cpu")

    def tokens(**values: object) -> int:
        return RowScorer(policy, build(values)).oom_backoff.tokens

    assert tokens() == MICROBATCH_TOKENS
    policy.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**27, 2**32))
    assert 256 < tokens() < MICROBATCH_TOKENS
    assert tokens(**{"update.microbatch_tokens": 99}) == 99
    assert tokens(**{"model.numerics": "exact"}) == MICROBATCH_TOKENS


def test_estimate_table_of_document_is_computed() -> None:
    shown = (
        (Path(__file__).parents[2] / "docs/models.md")
        .read_text()
        .partition("<!-- fits -->\n")[2]
        .partition("<!-- /fits -->")[0]
    )
    assert shown.splitlines() == list(table())
