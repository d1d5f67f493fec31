"""Rows that stand on one line: each is read as if it were alone, and less is read in all."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.models.logprobs import keeps_apart
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training import training_rows
from agentrl.workflow.training.offline_training import accumulate, backoff_over_rows, row_logprob_sums
from agentrl.workflow.training.packing import assign_lines, pack_rows, packed_size
from agentrl.workflow.training.supervised import likelihood_objective
from agentrl.workflow.training.training_rows import Row
from tests.support.small_models import tiny_random


def row(length: int, seed: int = 0) -> Row:
    """A row of so many tokens, of which the later half trains; its first one too where it is short."""
    rng = random.Random(seed)
    ids = tuple(rng.randrange(3, 60) for _ in range(length))
    mask = tuple(at >= length // 2 for at in range(length))
    return Row(seed, 0, ids, mask, mask, (0.0,) * length)


UNEQUAL = [(row(length, seed),) for seed, length in enumerate((40, 3, 9, 31, 12, 1, 22, 5, 17, 2))]


def alone(module: Any, rows: tuple[Row, ...]) -> float:
    """The summed logprob of a row that is read by itself, and not by our code."""
    (one,) = rows
    ids = torch.tensor([one.input_ids])
    said = module(input_ids=ids).logits[0].log_softmax(-1)
    return float(sum(said[at - 1, ids[0, at]] for at in range(1, len(one.input_ids)) if one.loss_mask[at]))


@pytest.mark.parametrize("seed", range(20))
def test_packing_places_each_row_within_longest_row(seed: int) -> None:
    rng = random.Random(seed)
    rows = [row(rng.randint(1, 50), n) for n in range(rng.randint(1, 40))]
    lines = assign_lines(rows)
    assert sorted(number for line in lines for number in line) == list(range(len(rows)))
    longest = max(len(one.input_ids) for one in rows)
    assert max(sum(len(rows[number].input_ids) for number in line) for line in lines) <= longest
    assert packed_size(rows) <= training_rows.size(rows)
    assert (pack_rows(rows) is None) == (len(lines) == len(rows))


@pytest.mark.parametrize("lora_r", [0, 4])
def test_packed_row_is_read_as_if_alone(lora_r: int, tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "base")
    policy = Policy.load(ModelConfig(path=str(base), lora_r=lora_r), str(base), device="cpu")
    with policy.training() as module, torch.no_grad():
        assert keeps_apart(module)
        assert module.training
        found = row_logprob_sums(module, UNEQUAL, likelihood_objective())
        wanted = [alone(module.eval(), rows) for rows in UNEQUAL]
    assert [float(one.sum()) for one in found] == pytest.approx(wanted, abs=1e-4, rel=1e-5)


def test_packed_batch_has_same_loss_and_gradient(tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "base")
    objective, losses, gradients = likelihood_objective(), [], []
    for tokens in (10**6, 1):
        policy = Policy.load(ModelConfig(path=str(base), lora_r=0), str(base), device="cpu")
        with policy.training() as module:
            losses.append(accumulate(module, UNEQUAL, objective, backoff_over_rows(objective.rows, tokens, apart=True))["loss"])
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trainable().values() if p.grad is not None]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_packing_fills_lines_with_unequal_rows() -> None:
    rows = [one for (one,) in UNEQUAL]
    tokens = sum(len(one.input_ids) for one in rows)
    assert tokens / training_rows.size(rows) < 0.4
    assert tokens / packed_size(rows) > 0.85
    objective = likelihood_objective()
    plain, apart = (backoff_over_rows(objective.rows, 100, apart=apart) for apart in (False, True))
    with next(apart.attempts(UNEQUAL)) as fewer, next(plain.attempts(UNEQUAL)) as more:
        assert len(fewer) < len(more)


class Blurred(Qwen2ForCausalLM):
    """A model that takes no notice of where rows begin."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        whole = self.model.forward
        self.model.forward = lambda *given, position_ids=None, **more: whole(*given, **more)  # type: ignore[method-assign]


def test_packing_is_off_for_model_that_mixes_rows(tmp_path: Path) -> None:
    module = Blurred.from_pretrained(tiny_random(tmp_path / "base")).eval()
    assert not keeps_apart(module)
    with torch.no_grad():
        found = [float(one.sum()) for one in row_logprob_sums(module, UNEQUAL, likelihood_objective())]
        assert found == pytest.approx([alone(module, rows) for rows in UNEQUAL], abs=1e-4, rel=1e-5)
