"""sft: learns the assistant's tokens only, gives the same model for the same seed, and never leaves half a folder."""

from itertools import islice
from pathlib import Path

import pytest

from tests.models import chat, tiny_random
from workflow.config import ModelConfig
from workflow.datasets import Dataset
from workflow.datasets.arithmetic import arithmetic, load
from workflow.errors import ConfigError, ConflictError, DatasetError
from workflow.models import base_hash
from workflow.policy import Policy
from workflow.sft import Recipe, batches, conversations, schedule, sft

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SHORT = Recipe(steps=6, batch_size=8, learning_rate=3e-3)


def losses_of(model: str, target: Path, recipe: Recipe = SHORT, config: ModelConfig | None = None) -> list[float]:
    seen: list[float] = []
    sft(arithmetic, model, target, recipe=recipe, config=config, device="cpu", progress=lambda _, __, loss: seen.append(loss))
    return seen


def test_a_short_warm_up_lowers_the_loss_and_makes_a_loadable_model(tmp_path: Path) -> None:
    losses = losses_of("tiny", tmp_path / "tiny", Recipe(steps=30, batch_size=8, learning_rate=3e-3))
    assert losses[-1] < losses[0] - 2
    policy = Policy.load(ModelConfig(), str(tmp_path / "tiny"), device="cpu")
    assert policy.kind == "full"
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


def test_the_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    for name in ("a", "b"):
        losses_of("tiny", tmp_path / name)
    assert base_hash(tmp_path / "a") == base_hash(tmp_path / "b")


@pytest.mark.parametrize("rank", [0, 4])
def test_an_existing_model_learns_with_lora_or_with_all_weights(rank: int, tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "base")
    losses = losses_of(
        str(base), tmp_path / "made", Recipe(20, 8, 1e-2), ModelConfig.model_validate({"path": str(base), "lora_r": rank})
    )
    assert losses[-1] < losses[0]
    assert base_hash(tmp_path / "made") != base_hash(base)
    assert Policy.load(ModelConfig(), str(tmp_path / "made"), device="cpu").kind == "full"


def test_only_the_assistants_tokens_are_learned() -> None:
    tasks = list(islice(arithmetic.load("warmup"), 5))
    for segments in conversations(chat(), arithmetic, tasks, 0):
        said = [chat().decode(ids) for ids, spoken in segments if spoken]
        assert len(said) == 2
        assert all(text.endswith("<|im_end|>") for text in said)
        assert [spoken for _, spoken in segments] == [False, True, False, True]


def test_a_model_that_exists_is_not_overwritten_unasked(tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "tiny")
    with pytest.raises(ConflictError, match="already"):
        losses_of("tiny", base)


def test_a_failure_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no demonstrations"):
        sft(Dataset(load, "arithmetic"), "tiny", tmp_path / "tiny", recipe=SHORT)
    quantised = ModelConfig.model_validate({"load_in_4bit": True})
    with pytest.raises(ConfigError, match="quantised"):
        sft(arithmetic, "somewhere", tmp_path / "made", config=quantised)
    assert not list(tmp_path.iterdir())


def test_every_row_comes_once_each_time_round() -> None:
    order = batches(10, 4, seed=0)
    rounds = [[row for batch in islice(order, 3) for row in batch] for _ in range(2)]
    assert sorted(rounds[0]) == sorted(rounds[1]) == list(range(10))
    assert rounds[0] != rounds[1]


def test_the_learning_rate_goes_up_and_then_down_to_nothing() -> None:
    shares = [schedule(step, 100) for step in range(100)]
    assert 0 < shares[0] < 0.3
    assert max(shares) == max(shares[3:6])
    assert shares[-1] < 0.01
