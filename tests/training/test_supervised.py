"""sft: learns sampled tokens only, gives the same model for the same seed, and never leaves half a folder."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.checkpoints.sealed_folder import RECORD
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.datasets import Dataset
from agentrl.workflow.datasets.arithmetic import arithmetic, load
from agentrl.workflow.errors import CheckpointError, ConflictError, DatasetError, ModelError, StateError
from agentrl.workflow.models.lookup import base_hash
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.merging import merge_weights
from agentrl.workflow.training.offline_training import Recipe, accumulate, backoff_over_rows, batches, rows_by_episode, schedule
from agentrl.workflow.training.supervised import (
    EMPTY,
    TOO_LONG,
    UNSOLVED,
    demonstrations,
    likelihood_objective,
    segments_of,
    sft,
    sft_on_episodes,
)
from agentrl.workflow.trajectory import Message, PolicyRef, Task
from tests.chat.test_templates import TROUBLES
from tests.support.learned_episodes import PROMPT, LearnedEpisode, episode, logprobs_of, start_of, step, two_turns
from tests.support.small_models import chat, quantised, tiny_random

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SHORT = Recipe(steps=6, batch_size=8, learning_rate=3e-3)


def losses_of(model: str, target: Path, recipe: Recipe = SHORT, config: ModelConfig | None = None) -> list[float]:
    told = LearnedEpisode()
    sft(arithmetic, model, target, recipe=recipe, config=config, device="cpu", progress=told)
    return [metrics["loss"] for metrics in told.metrics]


@pytest.mark.slow
def test_sft_lowers_loss_and_makes_loadable_model(tmp_path: Path) -> None:
    losses = losses_of("tiny", tmp_path / "tiny", Recipe(steps=30, batch_size=8, learning_rate=3e-3))
    assert losses[-1] < losses[0] - 2
    policy = Policy.load(ModelConfig(), str(tmp_path / "tiny"), device="cpu")
    assert policy.kind == "full"
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.slow
def test_sft_is_repeatable_by_seed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        losses_of("tiny", tmp_path / name)
    assert base_hash(tmp_path / "a") == base_hash(tmp_path / "b")


@pytest.mark.parametrize("rank", [0, 4])
def test_sft_trains_lora_or_all_weights(rank: int, tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "base")
    losses = losses_of(
        str(base), tmp_path / "made", Recipe(20, 8, 1e-2), ModelConfig.model_validate({"path": str(base), "lora_r": rank})
    )
    assert losses[-1] < losses[0]
    assert base_hash(tmp_path / "made") != base_hash(base)
    assert Policy.load(ModelConfig(), str(tmp_path / "made"), device="cpu").kind == "full"


@quantised
@pytest.mark.parametrize("bits", [4, 8])
def test_sft_on_quantised_base_reports_trained_weights(bits: int, tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "base")
    config = ModelConfig.model_validate({"path": str(base), "lora_r": 4, f"load_in_{bits}bit": True, "dtype": "float32"})
    policy = Policy.load(config, str(base), device="cpu")
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.normal_(std=0.1)
        ids = torch.arange(3, 40)[None]
        with policy.training() as module:
            trained = module.eval()(ids).logits
        made = merge_weights(policy)
        assert not [name for name, _ in made.named_parameters() if "lora" in name]
        assert {p.dtype for p in made.parameters()} == {torch.float32}
        whole = made.eval()(ids).logits
    assert (whole - trained).abs().max() < (1e-4 if bits == 4 else 0.3)  # of 8 bits the products are rounded too
    made.save_pretrained(tmp_path / "made")
    assert "quantization_config" not in json.loads((tmp_path / "made" / "config.json").read_text())


def test_sft_reports_parameters_then_samples_then_held_out_loss(tmp_path: Path) -> None:
    base, told = tiny_random(tmp_path / "base"), LearnedEpisode()
    config = ModelConfig.model_validate({"path": str(base), "lora_r": 4})
    recipe = replace(SHORT, held_out=0.25)
    made = sft(arithmetic, str(base), tmp_path / "made", recipe=recipe, config=config, device="cpu", progress=told)
    policy = Policy.load(config, str(base), device="cpu")
    lora = sum(p.numel() for p in policy.trainable().values())
    whole = sum(p.numel() for p in Policy.load(ModelConfig(lora_r=0), str(base), device="cpu").trainable().values()) + lora
    assert str(told.parameters) == (
        f"trainable params: {lora:,} || all params: {whole:,} || trainable%: {100 * lora / whole:.4f}"
    )
    assert made.examples == 36
    assert told.tokens[4] == min(told.tokens) > 0  # the last four of the first pass
    measured = [metrics["held_out"] for metrics in told.metrics]
    assert 0 < measured[-1] < measured[0]


def test_sft_epochs_pass_over_all_samples(tmp_path: Path) -> None:
    told = LearnedEpisode()
    made = sft(arithmetic, "tiny", tmp_path / "a", recipe=SHORT, epochs=3, max_tasks=20, device="cpu", progress=told)
    assert (made.recipe.steps, len(told.metrics), made.examples) == (9, 9, 20)  # 20 in batches of 8: 3 steps a pass


@pytest.mark.slow
def test_sft_gradient_accumulation_changes_nothing(tmp_path: Path) -> None:
    losses = [losses_of("tiny", tmp_path / str(n), replace(SHORT, gradient_accumulation_steps=n)) for n in (1, 3)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_sft_learns_only_assistant_tokens() -> None:
    for shown in demonstrations(arithmetic, 5, 0):
        assert shown is not None
        segments = segments_of(chat(), shown)
        said = [chat().decode(ids) for ids, spoken in segments if spoken]
        assert len(said) == 2
        assert all(text.endswith("<|im_end|>") for text in said)
        assert [spoken for _, spoken in segments] == [False, True, False, True]


def test_sft_refuses_template_that_drops_demonstration_parts(tmp_path: Path) -> None:
    base = str(tiny_random(tmp_path / "base"))
    for template, dropped in ((TROUBLES["result"][0], "tool results"), (TROUBLES["arguments"][0], "a call's arguments")):
        config = ModelConfig(path=base, chat_template=template)
        with pytest.raises(ModelError, match=dropped) as refused:
            sft(arithmetic, config.path, tmp_path / "made", recipe=SHORT, max_tasks=4, config=config, device="cpu")
        assert "--chat-template" in refused.value.hint
    assert not (tmp_path / "made").exists()


def test_sft_overwrites_no_existing_model_by_default(tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "tiny")
    with pytest.raises(ConflictError, match="already"):
        losses_of("tiny", base)


def test_sft_failure_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no demonstrations"):
        sft(Dataset(load, "arithmetic"), "tiny", tmp_path / "tiny", recipe=SHORT)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="are not a valid"):
        sft(arithmetic, str(tmp_path / "base"), tmp_path / "made")
    assert [entry.name for entry in tmp_path.iterdir()] == ["base"]


def test_batches_hold_each_row_once_a_round() -> None:
    order = batches(10, 4, seed=0)
    rounds = [[row for batch in islice(order, 3) for row in batch] for _ in range(2)]
    assert sorted(rounds[0]) == sorted(rounds[1]) == list(range(10))
    assert rounds[0] != rounds[1]


def test_learning_rate_schedule_rises_then_falls_to_zero() -> None:
    shares = [schedule(step, 100) for step in range(100)]
    assert 0 < shares[0] < 0.3
    assert max(shares) == max(shares[3:6])
    assert shares[-1] < 0.01


# what has no demonstration


def some_unsolved(tasks: Sequence[Task], seed: int) -> Iterator[tuple[Message, ...] | None]:
    assert arithmetic.demonstrations is not None
    for number, messages in enumerate(arithmetic.demonstrations(tasks, seed)):
        assert messages is not None
        long = replace(messages[-1], content="7" * 2000)
        yield [messages, None, (*messages[:-1], long)][number % 3]


def test_sft_counts_tasks_without_demonstration_or_too_long(tmp_path: Path) -> None:
    dataset = replace(arithmetic, demonstrations=some_unsolved)
    made = sft(dataset, "tiny", tmp_path / "tiny", recipe=Recipe(1, 9, 1e-3), device="cpu")
    assert (made.examples, made.left_out) == (3, {UNSOLVED: 3, TOO_LONG: 3})
    assert json.loads((tmp_path / "tiny" / RECORD).read_text())["left_out"] == made.left_out


def test_sft_refuses_dataset_without_demonstrations(tmp_path: Path) -> None:
    dataset = replace(arithmetic, demonstrations=lambda tasks, seed: iter([None] * len(tasks)))
    with pytest.raises(DatasetError, match="None of 8 tasks"):
        sft(dataset, str(tiny_random(tmp_path / "base")), tmp_path / "made", recipe=Recipe(1, 8, 1e-3), device="cpu")
    assert not (tmp_path / "made").exists()


# stored episodes

EPISODES = [two_turns(number + 1, seed=number) for number in range(6)]


@pytest.mark.parametrize("lora_r", [0, 4], ids=["full weights", "LoRA"])
def test_sft_on_episodes_raises_only_their_tokens(lora_r: int, tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "base")
    recipe = Recipe(20, 4, 3e-2 if lora_r else 3e-3)
    made = sft_on_episodes(EPISODES, start_of(base, lora_r), tmp_path / "made", recipe=recipe, device="cpu")
    others = [two_turns(number, seed=100 + number) for number in range(6)]
    gained = [new - old for new, old in zip(logprobs_of(made.folder, EPISODES), logprobs_of(base, EPISODES), strict=True)]
    others_gained = sum(logprobs_of(made.folder, others)) - sum(logprobs_of(base, others))
    assert min(gained) > 1
    assert sum(gained) > others_gained + 6
    record = json.loads((made.folder / RECORD).read_text())
    assert (record["stage"], record["episodes"], record["recipe"]["steps"]) == ("sft", [1, 2, 3, 4, 5, 6], 20)


def test_sft_episode_loss_is_of_own_tokens_at_its_temperature(tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "base")
    inherited = replace(EPISODES[0], fork_step=1)
    for one, tokens in ((EPISODES[0], 5), (inherited, 2)):
        policy = Policy.load(ModelConfig(path=str(base), lora_r=0), str(base), device="cpu")
        with policy.training() as module:
            objective = likelihood_objective(temperature=0.7)
            metrics = accumulate(module, rows_by_episode([one]), objective, backoff_over_rows(objective.rows))
            with torch.no_grad():
                ids = torch.tensor([rows_by_episode([one])[0][0].input_ids])
                by_hand = (module(input_ids=ids).logits[0].float() / 0.7).log_softmax(-1)
        places = [4, 5, 6, 9, 10][-tokens:]  # four tokens of the prompt, three sampled, two of a tool, two sampled
        expected = -sum(float(by_hand[place - 1, ids[0, place]]) for place in places) / tokens
        assert metrics["loss"] == pytest.approx(expected, rel=1e-4)


def test_sft_batch_in_pieces_has_same_gradient(tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "base")
    uneven = [*rows_by_episode(EPISODES), *rows_by_episode([episode(9, step(0, PROMPT * 5, (3, 4, 5, 6)))])]
    objective = likelihood_objective()
    found = []
    for tokens in (10**6, 30, 1):
        policy = Policy.load(ModelConfig(path=str(base), lora_r=0), str(base), device="cpu")
        with policy.training() as module:
            accumulate(module, uneven, objective, backoff_over_rows(objective.rows, tokens))
        found.append(torch.cat([p.grad.flatten() for p in policy.trainable().values() if p.grad is not None]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lora_r", [0, 4], ids=["full weights", "LoRA"])
def test_sft_starts_from_named_policy(lora_r: int, tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "base")
    config = ModelConfig(path=str(base), lora_r=lora_r)
    policy = Policy.load(config, str(base), device="cpu")
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.05)
    sha256 = sealed_folder.write(tmp_path / "v3", lambda folder: policy.save_weights(folder / sealed_folder.WEIGHTS))
    start = replace(start_of(base, lora_r), policy=PolicyRef(str(base), "", str(tmp_path / "v3"), sha256, 3))
    hardly = Recipe(1, 4, 1e-12)
    made = sft_on_episodes(EPISODES, start, tmp_path / "made", recipe=hardly, device="cpu")
    with policy.training() as module, torch.no_grad():
        ids = torch.tensor([EPISODES[0].context_ids])
        wanted = module.eval()(input_ids=ids).logits
        got = Policy.load(ModelConfig(), str(made.folder), device="cpu")
        with got.sampling() as merged:
            torch.testing.assert_close(merged(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)
    assert max(abs(a - b) for a, b in zip(logprobs_of(made.folder, EPISODES), logprobs_of(base, EPISODES), strict=True)) > 0.1
    (tmp_path / "v3" / sealed_folder.WEIGHTS).write_bytes(b"other")
    with pytest.raises(CheckpointError, match="altered"):
        sft_on_episodes(EPISODES, start, tmp_path / "again", recipe=hardly, device="cpu")


def test_sft_refuses_unlearnable_episodes_and_leaves_no_folder(tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "base")
    with pytest.raises(StateError, match="None of 1 episodes"):
        sft_on_episodes([episode(1)], start_of(base), tmp_path / "made")
    other = replace(start_of(base), policy=PolicyRef(str(base), "0" * 64))
    with pytest.raises(ModelError, match="base 000000000000"):
        sft_on_episodes(EPISODES, other, tmp_path / "made", device="cpu")
    with pytest.raises(ModelError, match="lower --learning-rate"):
        sft_on_episodes(EPISODES, start_of(base), tmp_path / "made", recipe=Recipe(20, 4, 1e20), device="cpu")
    assert [entry.name for entry in tmp_path.iterdir()] == ["base"]


def test_sft_counts_episodes_without_sampled_tokens(tmp_path: Path) -> None:
    base = tiny_random(tmp_path / "base")
    some = [EPISODES[0], episode(8)]
    made = sft_on_episodes(some, start_of(base), tmp_path / "made", recipe=Recipe(1, 4, 1e-3), device="cpu")
    assert (made.examples, made.left_out) == (1, {EMPTY: 1})
