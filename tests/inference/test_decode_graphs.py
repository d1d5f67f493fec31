"""Decoding steps as CUDA graphs. On a CPU the same steps run without graphs: padded rows, masked keys."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.inference.sampling import draw
from agentrl.workflow.inference.slot_rows import DecodeGraphs, SlotRows
from agentrl.workflow.models.cache_layout import read_layout
from agentrl.workflow.models.logprobs import causal_model
from agentrl.workflow.models.policy import Policy
from tests.support.numerics import DEVICE, asked, tolerance
from tests.support.small_models import tiny_random

GPU = DEVICE == "cuda"
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12), tuple(range(20, 31))]
STEPS = 2 * DecodeGraphs.EAGER_STEPS


def open_policy(folder: Path, **fields: object) -> Policy:
    tiny_random(folder)
    return Policy.load(ModelConfig.model_validate(asked({"numerics": "exact", **fields})), str(folder), DEVICE)


@torch.no_grad()
def open_pair(policy: Policy) -> tuple[SlotRows, SlotRows]:
    """Return the rows with graphs, and the rows without."""
    with policy.sampling() as model:
        config = causal_model(model).config
    layout = read_layout(config, policy.max_context)
    assert layout is not None
    ours, plain = (SlotRows(policy, config, layout) for _ in range(2))
    ours.graphs = DecodeGraphs(policy, ours._slots, capture=GPU)
    for rows in (ours, plain):
        rows.read(0, PROMPTS)
    return ours, plain


def assert_same(ours: SlotRows, plain: SlotRows, read: list[int], steps: int) -> Tensor:
    """Read `steps` tokens of each row both ways, compare the logits of each step, and return the last."""
    assert ours.graphs is not None
    temperature = torch.tensor([0.7, 1.0, 1.3, 1.0, 1.0], dtype=torch.float64)[: len(read)]
    for step in range(steps):
        newest = torch.tensor([(3 * step + 5 * row) % 40 for row in range(len(read))])
        at = torch.tensor([length + step for length in read])
        draws = torch.rand(len(read), dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        actual, drawn = ours.graphs.next_tokens(torch.stack([newest, at, draws, temperature]))
        expected = plain.next_logits(newest, at)
        assert (actual - expected).abs().max() <= tolerance(1e-9) * max(1.0, float(expected.abs().max()))
        assert torch.equal(drawn, draw(actual, draws.to(actual.device), temperature.to(actual.device)))
    return expected


@pytest.mark.parametrize("rank", [0, 4])
@torch.no_grad()
def test_decode_graphs_give_logits_of_plain_steps(tmp_path: Path, rank: int) -> None:
    policy = open_policy(tmp_path, lora_r=rank)
    ours, plain = open_pair(policy)
    assert_same(ours, plain, [3, 5, 11], STEPS)
    assert ours.graphs is not None
    assert list(ours.graphs._graphs) == ([(4, 256)] if GPU else [])
    for rows in (ours, plain):  # the last row takes the place of the first
        rows.drop([0], [], {2: 0}, 11 + STEPS)
    assert_same(ours, plain, [11 + STEPS, 5 + STEPS], STEPS)


@pytest.mark.parametrize("rank", [0, 4])
@torch.no_grad()
def test_decode_graphs_follow_new_weights(tmp_path: Path, rank: int) -> None:
    policy = open_policy(tmp_path, lora_r=rank)
    ours, plain = open_pair(policy)
    before = assert_same(ours, plain, [3, 5, 11], STEPS)
    assert ours.graphs is not None
    graphs = dict(ours.graphs._graphs)
    draw = torch.Generator().manual_seed(1)
    changed = {name: torch.randn(tensor.shape, generator=draw) for name, tensor in policy._slot("sampler").items()}
    policy._fill("sampler", changed)
    assert not torch.allclose(before, assert_same(ours, plain, [3, 5, 11], STEPS))
    assert ours.graphs._graphs == graphs


@torch.no_grad()
def test_decode_graphs_end_when_slots_get_other_memory(tmp_path: Path) -> None:
    policy = open_policy(tmp_path, lora_r=0)
    ours, plain = open_pair(policy)
    assert_same(ours, plain, [3, 5, 11], STEPS)
    stream = ours.graphs._stream if ours.graphs else None
    for rows in (ours, plain):
        rows.copy(2, 3, 2, 11 + STEPS)  # five rows need eight slots
    assert_same(ours, plain, [length + STEPS for length in (3, 5, 11, 11, 11)], STEPS)
    assert ours.graphs is not None
    assert list(ours.graphs._graphs) == ([(8, 256)] if GPU else [])
    assert ours.graphs._stream is stream  # cuBLAS keeps memory for each stream
    ours.clear()
    assert not ours.graphs._graphs
