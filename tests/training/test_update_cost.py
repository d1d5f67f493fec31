"""What an update costs. The operations are compared with those that torch counts; what CUDA says of a card is the edge."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.training.training_rows import Row
from agentrl.workflow.training.update_cost import UpdateCost, find_peak
from tests.support.small_models import tiny_random
from tests.training.test_trainer import config, groups_of, trainer_of

TOKENS, SCORED, ROWS = 24, 12, 4
ATTENTION = 4 * 64 * ROWS * TOKENS * (TOKENS + 1) // 2
"""Operations of the tiny model's two layers of 32 channels in a forward pass, which torch does not count on a CPU."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("base"))


def rows_of_one_length() -> list[Row]:
    """Rows without padding that begin alike."""
    mask = (False,) * (TOKENS - SCORED) + (True,) * SCORED
    start = tuple(range(3, 3 + TOKENS - SCORED))
    rows = [start + tuple(range(20 + i, 20 + i + SCORED)) for i in range(ROWS)]
    return [Row(i, 0, ids, mask, mask, (-1.0,) * TOKENS) for i, ids in enumerate(rows)]


def count(trainer: Trainer, learns: bool) -> tuple[float, float]:
    """The operations that are counted for a pass over the rows, without attention, and those that torch counts."""
    scorer, cost = trainer._scorer, trainer._scorer.cost
    scorer._share = False
    cost.begin()
    with trainer._policy.training() as model, torch.set_grad_enabled(learns), FlopCounterMode(display=False) as counter:
        _, scores = scorer.score(model, rows_of_one_length(), None, trains=learns)
        if learns:
            scores.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return cost._flops - ATTENTION * (3 if learns else 1), counter.get_total_flops()


@pytest.mark.parametrize("lora_r", [0, 4])
def test_update_cost_operations_equal_torch_count(folder: Path, lora_r: int) -> None:
    trainer = trainer_of(folder, config(lora_r))[1]
    forward, theirs = count(trainer, learns=False)
    assert forward == theirs
    both, theirs = count(trainer, learns=True)
    # LoRA's first layer passes no gradient to the embedding, which is a large part of two layers.
    assert both == (theirs if lora_r == 0 else pytest.approx(theirs, rel=0.06))


def test_update_cost_counts_shared_prefix_once(folder: Path) -> None:
    trainer = trainer_of(folder, config())[1]
    rows, cost = rows_of_one_length(), trainer._scorer.cost
    found = []
    for shares in (False, True):
        cost.begin()
        cost.add(rows, shares, learns=False)
        found.append(cost._flops)
    again = (ROWS - 1) * rows[0].prefix
    body = cost._trained + cost._frozen
    attended = (ROWS - 1) * rows[0].prefix * (rows[0].prefix + 1) // 2
    assert found[0] - found[1] == 2 * body * again + 4 * cost._attention * attended


def test_update_cost_on_cpu_is_speed_only(folder: Path) -> None:
    update = trainer_of(folder, config(4))[1].update(groups_of(), 0)
    assert set(update.costs) == {"tflops"}
    assert update.costs["tflops"] > 0


def test_update_cost_on_gpu_has_memory_and_share_of_peak(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    with trainer_of(folder, config(4))[0].training() as model:
        found = {}
        for dtype in (torch.float32, torch.bfloat16):
            cost = UpdateCost(model.to(dtype), torch.device("cuda", 0))
            cost.begin()
            cost.add(rows_of_one_length(), shares=False, learns=True)
            found[dtype] = cost.metrics(2.0)
            assert found[dtype]["peak_memory_bytes"] == 3 * 2**30
            assert found[dtype]["tflops"] == cost._flops / 2e12
    assert resets == [torch.device("cuda", 0)] * 2
    assert "mfu" not in found[torch.float32]  # its peak is another
    assert found[torch.bfloat16]["mfu"] == found[torch.bfloat16]["tflops"] / 312


def test_update_cost_of_experts_is_unknown(folder: Path) -> None:
    with trainer_of(folder, config())[0].training() as model:
        model.experts = nn.Parameter(torch.zeros(2, 3, 4))
        cost = UpdateCost(model, torch.device("cpu"))
    cost.add(rows_of_one_length(), shares=False, learns=True)
    assert cost.metrics(1.0) == {}


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA A100 80GB PCIe", 312.0), ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H100 PCIe", 756.5), ("NVIDIA H200", 989.5), ("NVIDIA H200 NVL", None),
        ("NVIDIA L4", 121.0), ("NVIDIA L40S", 362.0), ("NVIDIA L40", None), ("Tesla T4", 65.0), ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None), ("Tesla V100-SXM2-16GB", 125.0), ("NVIDIA GeForce GTX 1650", None),
    ],
)  # fmt: skip
def test_update_cost_peak_is_known_by_full_card_name(card: str, peak: float | None) -> None:
    assert find_peak(card) == peak
