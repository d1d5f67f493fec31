"""The update: the same gradient however it is cut, all or nothing, repeatable to the bit, and it learns."""

import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.workflow import trainers
from agentrl.workflow.algorithms.grpo import grpo
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.checkpoints.sealed_folder import sha256_file
from agentrl.workflow.config import AlgorithmConfig, RunConfig, build
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.errors import CheckpointError, ConfigError, InfraError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.models.logprobs import token_logprobs
from agentrl.workflow.models.memory import return_freed_memory
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.losses import TokenBatch, clipped
from agentrl.workflow.training.prepared_update import select_groups
from agentrl.workflow.training.reports import Update
from agentrl.workflow.training.trainer import NotFinite, Trainer
from agentrl.workflow.trajectory import Episode, Group, Message, PolicyRef, Step, Task
from tests.support.grpo_formula import grpo_credits
from tests.support.numerics import DEVICE, PRECISION, asked, cpu_alone, nearly, same_gradient, tolerance
from tests.support.small_models import quantised, tiny_random

TURN = Message("assistant", "")
KINDS = pytest.mark.parametrize("lora_r", [0, 4], ids=["all weights", "LoRA"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("base"))


@pytest.fixture(autouse=True)
def free_choice_of_algorithms() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def config(lora_r: int = 0, exact: bool = False, **values: Any) -> RunConfig:
    named = {key.replace("__", "."): value for key, value in values.items()}
    numerics = "exact" if exact else "fast"
    fields = asked({"model.lora_r": lora_r, "model.numerics": numerics}, "model.")
    return build(fields | {"update.learning_rate": 1e-3} | named)


def trainer_of(folder: Path, run: RunConfig) -> tuple[Policy, Trainer]:
    """A policy somewhat away from its base, so that LoRA's second matrix is not 0, and its trainer."""
    policy = Policy.load(run.model, str(folder), DEVICE)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            noise = 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.device))
    return policy, Trainer(policy, run)


def groups_of(count: int = 4, size: int = 4, seed: int = 0, equal: bool = False) -> list[Group]:
    """Two-turn episodes of many lengths, each with a reward of its own."""
    generator = torch.Generator().manual_seed(seed)

    def ids(most: int) -> tuple[int, ...]:
        length = int(torch.randint(1, most + 1, (1,), generator=generator))
        return tuple(torch.randint(3, 60, (length,), generator=generator).tolist())

    def step(index: int) -> Step:
        sampled = ids(6)
        return Step(index, (), ids(8), sampled, (-4.0,) * len(sampled), "stop", TURN, 0)

    def episode(task: Task, number: int) -> Episode:
        reward = 1.0 if equal else float(torch.rand(1, generator=generator))
        return Episode(task, steps=(step(0), step(1)), status="done", reward=reward, id=number)

    tasks = [Task(f"train/{number}", (), "") for number in range(count)]
    return [Group(task, tuple(episode(task, size * number + i) for i in range(size))) for number, task in enumerate(tasks)]


def saved(trainer: Trainer, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    sealed_folder.write(folder, trainer.save)
    return load_file(sealed_folder.weights_of(folder)), load_file(folder / sealed_folder.OPTIMIZER)


def gradient(trainer: Trainer, folder: Path) -> Tensor:
    """The gradient of the only step so far: Adam's first moment is a tenth of it."""
    moments = saved(trainer, folder)[1]
    return torch.cat([moments[name].flatten() * 10 for name in sorted(moments) if name.endswith(":exp_avg")])


def same_state(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same weights and moments, up to the order of sums."""
    for name in (sealed_folder.weights_of(one).name, sealed_folder.OPTIMIZER):
        first, second = (load_file(folder / name) for folder in (one, other))
        if first.keys() != second.keys():
            return False
        if not all(same_gradient(first[key], second[key], 0.0, 0.0) for key in first):
            return False
    return True


def unchanged(trainer: Trainer, folder: Path, before: tuple[dict[str, Tensor], dict[str, Tensor]]) -> bool:
    now = saved(trainer, folder)
    return all(
        old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
        for old, new in zip(before, now, strict=True)
    )


# --- the same gradient --------------------------------------------------------------------------------------------------------


@KINDS
def test_gradient_ignores_split_into_microbatches(folder: Path, tmp_path: Path, lora_r: int) -> None:
    found = []
    splits = [(10**6, 1), (10**6, 3), (64, 1), (1, 1)]
    for number, (tokens, accumulation) in enumerate(splits):
        values = {"update.microbatch_tokens": tokens, "update.gradient_accumulation_steps": accumulation}
        _, trainer = trainer_of(folder, config(lora_r, True, update__max_grad_norm=1e9, algorithm__kl_coef=0.1, **values))
        update = trainer.update(groups_of(), 0)
        assert update.skipped is None
        found.append((gradient(trainer, tmp_path / str(number)), update.metrics))
    whole, metrics = found[0]
    assert whole.norm() > 0
    assert metrics["grad_norm"] == pytest.approx(float(whole.norm()), rel=nearly(1e-9))
    for other, other_metrics in found[1:]:
        assert same_gradient(other, whole)
        assert {**other_metrics, "seconds": 0} == pytest.approx({**metrics, "seconds": 0}, rel=nearly(1e-9), abs=nearly(1e-12))


@KINDS
def test_gradient_checkpointing_keeps_gradient(folder: Path, tmp_path: Path, lora_r: int) -> None:
    found = []
    for again in (False, True):
        run = config(lora_r, True, update__gradient_checkpointing=again, update__microbatch_tokens=100)
        _, trainer = trainer_of(folder, run)
        assert trainer.update(groups_of(), 0).skipped is None
        found.append(gradient(trainer, tmp_path / str(again)))
    assert same_gradient(found[0], found[1], 0.0, 0.0)


@KINDS
@pytest.mark.parametrize("tokens", [10**6, 400])
def test_gradient_with_shared_prompts_equals_separate_reads(folder: Path, tmp_path: Path, lora_r: int, tokens: int) -> None:
    """Shared, or not, as where layers are computed again; two optimizer steps and a KL, so that constants are aligned too."""
    found, metrics = [], []
    groups = [with_prompt(group, 150 + 10 * number) for number, group in enumerate(groups_of())]
    for again in (False, True):
        _, trainer = trainer_of(
            folder,
            config(
                lora_r,
                update__gradient_checkpointing=again,
                update__microbatch_tokens=tokens,
                update__batch_size=8,
                update__learning_rate=1e-5,
                algorithm__kl_coef=0.1,
            ),
        )
        update = trainer.update(groups, 0)
        assert update.skipped is None
        found.append(gradient(trainer, tmp_path / str(again)))
        metrics.append({**update.metrics, "seconds": 0})
    assert float((found[0] - found[1]).norm() / found[0].norm()) < nearly(1e-4)
    assert metrics[0] == pytest.approx(metrics[1], rel=nearly(1e-4), abs=nearly(1e-5))


def with_prompt(group: Group, length: int) -> Group:
    """The group after one long prompt that all of its episodes share."""
    prompt = tuple(3 + (place * length) % 57 for place in range(length))
    return replace(
        group,
        episodes=tuple(
            replace(episode, steps=(replace(episode.steps[0], prompt_ids=prompt), *episode.steps[1:]))
            for episode in group.episodes
        ),
    )


def test_gradient_of_batch_equals_accumulated_episodes(folder: Path, tmp_path: Path) -> None:
    weights, gradients = [], []
    for accumulation in (1, 8):
        _, trainer = trainer_of(folder, config(0, True, update__gradient_accumulation_steps=accumulation))
        trainer.update(groups_of(2, 4), 0)
        weights.append(saved(trainer, tmp_path / str(accumulation))[0])
        gradients.append(gradient(trainer, tmp_path / str(accumulation)))
    assert same_gradient(gradients[0], gradients[1])
    if not PRECISION:  # else the sign of a gradient of about 0 decides which way a weight goes
        assert all(torch.allclose(weights[0][name], weights[1][name], rtol=0, atol=1e-9) for name in weights[0])


def test_gradient_ignores_order_of_groups(folder: Path, tmp_path: Path) -> None:
    gradients = []
    for order in (1, -1):
        _, trainer = trainer_of(folder, config(0, True))
        trainer.update(groups_of()[::order], 0)
        gradients.append(gradient(trainer, tmp_path / str(order)))
    assert same_gradient(gradients[0], gradients[1])


def test_gradient_is_policy_gradient_of_sampled_tokens(folder: Path, tmp_path: Path) -> None:
    run = config(0, True, update__max_grad_norm=1e9, rollout__temperature=0.7, algorithm__importance="none")
    policy, trainer = trainer_of(folder, run)
    groups = [*groups_of(2, 3), *groups_of(1, 3, seed=9, equal=True)]
    total = torch.zeros((), dtype=torch.float64, device=policy.device)
    count = 0
    for group, credits in zip(groups, grpo_credits(groups), strict=True):
        for episode, advantage in zip(group.episodes, credits, strict=True):
            first, second = episode.steps
            ids = torch.tensor([episode.context_ids], device=policy.device)
            with policy.training() as model:
                logprobs, _ = token_logprobs(model, ids, torch.ones_like(ids), 0.7)
            sampled = [False] * len(first.prompt_ids) + [True] * len(first.sampled_ids)
            sampled += [False] * len(second.prompt_ids) + [True] * len(second.sampled_ids)
            total = total - advantage * logprobs[0][torch.tensor(sampled[1:])].sum()
            count += episode.sampled_count
    names = sorted(policy.trainable())
    expected = torch.autograd.grad(total / count, [policy.trainable()[name] for name in names])
    trainer.update(groups, 0)
    assert same_gradient(gradient(trainer, tmp_path / "v1"), torch.cat([tensor.flatten().cpu() for tensor in expected]))


def test_update_trains_only_sampled_tokens(folder: Path, tmp_path: Path) -> None:
    """What the sampler claimed of its tokens, and tokens after the last sampled one, change nothing."""
    groups = groups_of(2, 4)

    def with_tail(episode: Episode) -> Episode:
        steps = tuple(replace(step, behavior_logprobs=(-9.0,) * len(step.sampled_ids)) for step in episode.steps)
        tail = Step(2, (), (7, 8, 9), (), (), "length", TURN, 0)
        return replace(episode, steps=(*steps, tail))

    gradients = []
    for number, one in enumerate((groups, [Group(g.task, tuple(map(with_tail, g.episodes))) for g in groups])):
        _, trainer = trainer_of(folder, config(0, True, algorithm__importance="none"))
        trainer.update(one, 0)
        gradients.append(gradient(trainer, tmp_path / str(number)))
    assert same_gradient(gradients[0], gradients[1])


# --- what is reported ---------------------------------------------------------------------------------------------------------


def test_update_reports_its_metrics(folder: Path) -> None:
    _, trainer = trainer_of(folder, config(algorithm__kl_coef=0.05))
    groups = groups_of()
    update = trainer.update(groups, 0)
    assert update.skipped is None
    assert update.dropped == {}
    assert update.metrics["tokens"] == sum(episode.sampled_count for group in groups for episode in group.episodes)
    assert update.metrics["rows"] == 16
    assert update.metrics["ratio"] == pytest.approx(1, abs=1e-6)
    assert update.metrics["clip_fraction"] == 0
    assert all(update.metrics[name] > 0 for name in ("kl", "grad_norm", "seconds"))
    assert 0 < update.metrics["entropy"] < math.log(10**4)
    assert update.metrics["sampler_difference_max"] >= update.metrics["sampler_difference_mean"] > 0
    assert update.advantages == {
        episode.id: pytest.approx(value)
        for group, values in zip(groups, grpo_credits(groups), strict=True)
        for episode, value in zip(group.episodes, values, strict=True)
    }
    assert len(update.steps) == 1


def test_minibatches_are_steps_against_first_policy(folder: Path) -> None:
    _, trainer = trainer_of(folder, config(update__batch_size=4, update__learning_rate=1e-2))
    update = trainer.update([*groups_of(), *groups_of()], 0)
    assert len(update.steps) == 8
    assert update.steps[0]["ratio"] == pytest.approx(1, abs=1e-6)
    assert abs(update.steps[4]["ratio"] - 1) > 1e-4
    assert update.metrics["tokens"] == sum(step["tokens"] for step in update.steps)


def test_update_without_kl_coefficient_reports_no_kl(folder: Path) -> None:
    _, trainer = trainer_of(folder, config())
    assert "kl" not in trainer.update(groups_of(), 0).metrics


# --- all or nothing -----------------------------------------------------------------------------------------------------------


def test_update_drops_group_with_one_finished_episode() -> None:
    whole, broken = groups_of(2, 3)
    lost = tuple(replace(episode, status="infra_error") for episode in broken.episodes[:2])
    broken = Group(broken.task, (*lost, broken.episodes[2]), slot=1)
    assert select_groups([whole, broken], needs_group=True) == ([whole], {1: "1 of 3 episodes can train"})
    assert select_groups([broken], needs_group=False) == ([Group(broken.task, broken.episodes[2:], slot=1)], {})


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([], "no group has enough finished episodes"),
        (groups_of(2, 1), "no group has enough finished episodes"),
        (groups_of(equal=True), "no advantage differs from 0"),
    ],
    ids=["no groups", "groups of one", "equal rewards"],
)
def test_update_without_signal_keeps_weights(folder: Path, tmp_path: Path, groups: list[Group], reason: str) -> None:
    _, trainer = trainer_of(folder, config())
    trainer.update(groups_of(seed=3), 0)
    before = saved(trainer, tmp_path / "before")
    assert trainer.update(groups, 1).skipped == reason
    assert unchanged(trainer, tmp_path / "after", before)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"algorithm__name": "ppo"},
        {"algorithm__kl_coef": 0.1, "algorithm__kl_in": "reward"},
        {"update__max_sampler_difference": 0.1},
    ],
    ids=["grpo", "ppo", "kl in reward", "sampler difference"],
)
def test_update_skips_episodes_without_sampled_tokens(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Their prompts fill the context."""

    def unsampled(episode: Episode) -> Episode:
        return replace(episode, steps=(replace(episode.steps[0], sampled_ids=(), behavior_logprobs=()),))

    _, trainer = trainer_of(folder, config(**options))
    before = saved(trainer, tmp_path / "before")
    groups = [replace(group, episodes=tuple(map(unsampled, group.episodes))) for group in groups_of()]
    update = trainer.update(groups, 0)
    assert update.skipped == "no episode has a token that trains"
    assert set(update.advantages.values()) == {0.0}
    assert unchanged(trainer, tmp_path / "after", before)


def told_otherwise(group: Group, numbers: tuple[int, ...], logprob: float) -> Group:
    """The group where the sampler recorded another logprob for the tokens of these episodes."""

    def lie(step: Step) -> Step:
        return replace(step, behavior_logprobs=(logprob,) * len(step.sampled_ids))

    episodes = [
        replace(episode, steps=tuple(map(lie, episode.steps))) if number in numbers else episode
        for number, episode in enumerate(group.episodes)
    ]
    return replace(group, episodes=tuple(episodes))


def test_max_sampler_difference_excludes_episodes_from_training(folder: Path, tmp_path: Path) -> None:
    one, two = (replace(group, slot=slot) for slot, group in enumerate(groups_of(2, 4)))
    run = config(0, True, update__max_sampler_difference=40.0, update__max_grad_norm=1e9)
    _, trainer = trainer_of(folder, run)
    update = trainer.update([told_otherwise(one, (1, 2), -400.0), two], 0)
    assert update.metrics["sampler_dropped"] == 2
    assert update.metrics["rows"] == 6
    assert update.metrics["sampler_difference_max"] < 40
    assert update.dropped == {0: "2 of 4 episodes: sampler and trainer differ"}
    expected = grpo_credits([one, two])
    assert update.advantages == {
        episode.id: 0 if episode.id in (1, 2) else pytest.approx(value)
        for group, values in zip((one, two), expected, strict=True)
        for episode, value in zip(group.episodes, values, strict=True)
    }


def test_mask_truncated_excludes_episode_but_counts_reward(folder: Path) -> None:
    one, two = (replace(group, slot=slot) for slot, group in enumerate(groups_of(2, 4)))
    cut = tuple(replace(episode, stop_reason="max_tokens") if n < 2 else episode for n, episode in enumerate(one.episodes))
    groups = [replace(one, episodes=cut), two]
    _, trainer = trainer_of(folder, config(0, True, update__mask_truncated=True))
    update = trainer.update(groups, 0)
    assert (update.metrics["truncated_dropped"], update.metrics["rows"]) == (2, 6)
    assert update.dropped == {0: "2 of 4 episodes: cut off at a limit"}
    expected = grpo_credits(groups)
    assert update.advantages == {
        episode.id: 0 if episode in cut[:2] else pytest.approx(value)
        for group, values in zip(groups, expected, strict=True)
        for episode, value in zip(group.episodes, values, strict=True)
    }
    _, plain = trainer_of(folder, config(0, True))
    assert plain.update(groups, 0).metrics["rows"] == 8, "off by default"


def test_max_sampler_difference_of_all_episodes_keeps_weights(folder: Path, tmp_path: Path) -> None:
    _, trainer = trainer_of(folder, config(update__max_sampler_difference=40.0))
    before = saved(trainer, tmp_path / "before")
    update = trainer.update([told_otherwise(group, (0, 1, 2, 3), -400.0) for group in groups_of()], 0)
    assert update.skipped == "sampler and trainer differ"
    assert not update.bad
    assert unchanged(trainer, tmp_path / "after", before)


def test_max_sampler_difference_unset_drops_nothing(folder: Path) -> None:
    _, trainer = trainer_of(folder, config())
    update = trainer.update([told_otherwise(group, (0, 1), -400.0) for group in groups_of()], 0)
    assert "sampler_dropped" not in update.metrics
    assert update.metrics["rows"] == 16


def test_update_with_nan_in_model_is_skipped(folder: Path, tmp_path: Path) -> None:
    policy, trainer = trainer_of(folder, config())
    trainer.update(groups_of(), 0)
    weight = list(policy.trainable().values())[3]
    healthy = weight.detach().clone()
    before = saved(trainer, tmp_path / "before")
    with torch.no_grad():
        weight.fill_(math.nan)
    assert trainer.update(groups_of(), 1).skipped == "the loss is nan and the gradient's norm is nan"
    with torch.no_grad():
        weight.copy_(healthy)
    assert unchanged(trainer, tmp_path / "after", before)
    assert trainer.update(groups_of(), 1).skipped is None


def _nan_on_long_rows(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    per_token, cut = clipped(batch, options)
    return per_token * (math.nan if batch.mask.shape[1] > 40 else 1.0), cut


def _two_rows_at_most(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    if len(batch.mask) > 2:
        raise torch.OutOfMemoryError("as if")
    return clipped(batch, options)


def _nothing_fits(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    raise torch.OutOfMemoryError("as if")


attempts: list[int] = []


def _long_rows_never_fit(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    attempts.append(len(batch.mask))
    assert len(attempts) < 50, "it tries for ever"
    if batch.mask.shape[1] > 100:
        raise torch.OutOfMemoryError("as if")
    return clipped(batch, options)


def _broken_on_long_rows(batch: TokenBatch, options: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    if batch.mask.shape[1] > 40:
        raise RuntimeError("a bug")
    return clipped(batch, options)


nan_later = replace(grpo, name="nan_later", surrogate=f"{__name__}:_nan_on_long_rows")
hungry = replace(grpo, name="hungry", surrogate=f"{__name__}:_two_rows_at_most")
starving = replace(grpo, name="starving", surrogate=f"{__name__}:_nothing_fits")
too_long = replace(grpo, name="too_long", surrogate=f"{__name__}:_long_rows_never_fit")
broken_later = replace(grpo, name="broken_later", surrogate=f"{__name__}:_broken_on_long_rows")


def then_a_long_group(tokens: int = 50) -> list[Group]:
    short, long = groups_of(2)
    step = replace(long.episodes[0].steps[0], prompt_ids=(5,) * tokens)
    longer = replace(long.episodes[0], steps=(step, *long.episodes[0].steps[1:]))
    return [short, Group(long.task, (longer, *long.episodes[1:]))]


def test_update_undoes_minibatches_before_a_nan(folder: Path, tmp_path: Path) -> None:
    _, trainer = trainer_of(folder, config(update__batch_size=4, algorithm__name="tests.training.test_trainer:nan_later"))
    trainer.update(groups_of(), 0)
    before = saved(trainer, tmp_path / "before")
    assert "the loss is nan" in str(trainer.update(then_a_long_group(), 1).skipped)
    assert unchanged(trainer, tmp_path / "after", before)


def test_update_undoes_minibatches_before_an_error_and_raises(folder: Path, tmp_path: Path) -> None:
    _, trainer = trainer_of(folder, config(update__batch_size=4, algorithm__name="tests.training.test_trainer:broken_later"))
    before = saved(trainer, tmp_path / "before")
    with pytest.raises(RuntimeError, match="a bug"):
        trainer.update(then_a_long_group(), 0)
    assert unchanged(trainer, tmp_path / "after", before)


def test_update_in_smaller_microbatches_has_same_gradient(folder: Path, tmp_path: Path) -> None:
    gradients: list[Tensor] = []
    for name in ("grpo", "tests.training.test_trainer:hungry"):
        _, trainer = trainer_of(folder, config(0, True, algorithm__name=name))
        assert trainer.update(groups_of(), 0).skipped is None
        gradients.append(gradient(trainer, tmp_path / str(len(gradients))))
    assert same_gradient(gradients[0], gradients[1])


def test_update_without_memory_for_one_row_is_an_error(folder: Path, tmp_path: Path) -> None:
    _, trainer = trainer_of(folder, config(algorithm__name="tests.training.test_trainer:starving"))
    before = saved(trainer, tmp_path / "before")
    with pytest.raises(InfraError, match=r"Memory does not suffice for one row of \d+ tokens. Set update.gradient_check"):
        trainer.update(groups_of(), 0)
    assert unchanged(trainer, tmp_path / "after", before)


def test_update_with_one_row_too_long_is_an_error(folder: Path, tmp_path: Path) -> None:
    _, trainer = trainer_of(folder, config(algorithm__name="tests.training.test_trainer:too_long"))
    before = saved(trainer, tmp_path / "before")
    attempts.clear()
    with pytest.raises(InfraError, match=r"Memory does not suffice for one row of 2\d\d tokens."):
        trainer.update(then_a_long_group(200), 0)
    assert unchanged(trainer, tmp_path / "after", before)


# --- checkpoints --------------------------------------------------------------------------------------------------------------


@KINDS
def test_trainer_resumes_from_checkpoint_exactly(folder: Path, tmp_path: Path, lora_r: int) -> None:
    run = config(lora_r, update__batch_size=8, algorithm__kl_coef=0.1, update__weight_decay=0.01)
    go_on(tmp_path, trainer_of(folder, run)[1], Trainer(Policy.load(run.model, str(folder), DEVICE), run))
    assert same_state(tmp_path / "again", tmp_path / "v2")
    assert_same_files(tmp_path)


def go_on(folder: Path, through: Trainer, again: Trainer) -> None:
    """Two updates, after which `v1` and `v2` are written, and the second once more from `v1` on, which makes `again`."""
    for version in (1, 2):
        through.update(groups_of(seed=version), version - 1)
        sealed_folder.write(folder / f"v{version}", through.save)
    again.load(folder / "v1")
    again.update(groups_of(seed=2), 1)
    sealed_folder.write(folder / "again", again.save)


def assert_same_files(folder: Path) -> None:
    """`again` is `v2` bit for bit, where sums have an order."""
    assert DEVICE != "cpu" or sealed_folder.verify(folder / "again") == sealed_folder.verify(folder / "v2")


@quantised
@KINDS
def test_adamw_8bit_learns_and_resumes_from_checkpoint(folder: Path, tmp_path: Path, lora_r: int) -> None:
    run = config(lora_r, update__optimizer="adamw_8bit", update__weight_decay=0.01)
    go_on(tmp_path, trainer_of(folder, run)[1], Trainer(Policy.load(run.model, str(folder), DEVICE), run))
    assert_same_files(tmp_path)
    state = load_file(tmp_path / "v1" / sealed_folder.OPTIMIZER)
    assert any(tensor.dtype == torch.uint8 for tensor in state.values()) == (lora_r == 0)  # what is small stays as it is
    before, after = (sha256_file(sealed_folder.weights_of(tmp_path / version)) for version in ("v1", "v2"))
    assert before != after
    plain = Trainer(Policy.load(run.model, str(folder), DEVICE), config(lora_r))
    with pytest.raises(CheckpointError, match="belongs to another model or optimizer"):
        plain.load(tmp_path / "v1")


@KINDS
def test_dropout_derives_from_iteration(folder: Path, tmp_path: Path, lora_r: int) -> None:
    run = config(lora_r, model__lora_dropout=0.3)
    hashes: list[str] = []
    for _ in range(2):
        _, trainer = trainer_of(folder, run)
        torch.rand(len(hashes) + 1)
        trainer.update(groups_of(), 4)
        hashes.append(sealed_folder.write(tmp_path / str(len(hashes)), trainer.save))
    assert same_state(tmp_path / "0", tmp_path / "1")
    assert hashes[0] == hashes[1] or DEVICE != "cpu"


@KINDS
def test_trainer_without_checkpoint_starts_from_base(folder: Path, tmp_path: Path, lora_r: int) -> None:
    run = config(lora_r)
    untouched = sealed_folder.write(tmp_path / "v0", Trainer(Policy.load(run.model, str(folder), DEVICE), run).save)
    _, trainer = trainer_of(folder, run)
    trainer.update(groups_of(), 0)
    trainer.load(None)
    assert sealed_folder.write(tmp_path / "fresh", trainer.save) == untouched
    assert sealed_folder.verify(tmp_path / "fresh") == sealed_folder.verify(tmp_path / "v0")
    assert trainer.updates == 0


def test_trainer_loads_no_altered_checkpoint(folder: Path, tmp_path: Path) -> None:
    _, trainer = trainer_of(folder, config())
    sealed_folder.write(tmp_path / "v1", trainer.save)
    (tmp_path / "v1" / sealed_folder.STATE).write_text('{"iteration": 7}')
    with pytest.raises(CheckpointError, match=r"state.json has \d+ bytes instead of"):
        trainer.load(tmp_path / "v1")


def test_trainer_refuses_optimizer_of_other_model(folder: Path, tmp_path: Path) -> None:
    _, other = trainer_of(folder, config(lora_r=4))
    other.update(groups_of(), 0)
    sealed_folder.write(tmp_path / "lora", other.save)
    _, trainer = trainer_of(folder, config())
    with pytest.raises(CheckpointError):
        trainer.load(tmp_path / "lora")


# --- it learns ----------------------------------------------------------------------------------------------------------------


@KINDS
def test_trainer_makes_rewarded_tokens_likely(tmp_path: Path, lora_r: int) -> None:
    means = bandit(tmp_path, config(lora_r, update__learning_rate=1e-2))
    assert means[0] < 0.7, means
    assert sum(means[-5:]) / 5 > 0.85, means


def bandit(folder: Path, run: RunConfig) -> list[float]:
    """Sampler and trainer together: sample one token, reward the even ones, update, publish, again. Each time's mean reward."""
    policy = Policy.load(run.model, str(sharp_base(folder / "base")), DEVICE)
    trainer, engine = Trainer(policy, run), RollingEngine(policy)
    ref = PolicyRef(str(policy.folder), policy.base_hash)
    means = []
    for iteration in range(20):
        groups = [_bandit_group(engine, ref, iteration, number) for number in range(4)]
        means.append(sum(e.reward or 0 for group in groups for e in group.episodes) / 64)
        update: Update = trainer.update(groups, iteration)
        if not update.skipped:
            assert update.metrics["sampler_difference_max"] < tolerance(1e-5)
        path = folder / f"v{iteration + 1}"
        ref = replace(ref, path=str(path), sha256=sealed_folder.write(path, trainer.save), version=iteration + 1)
    engine.close()
    return means


def sharp_base(folder: Path) -> Path:
    """A base whose embeddings are so large that an adapter alone can make a token likely."""
    file = tiny_random(folder) / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"] *= 0.3 / weights["model.embed_tokens.weight"].std()
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def _bandit_group(engine: RollingEngine, ref: PolicyRef, iteration: int, number: int) -> Group:
    prompt = (5 + number, 6, 7)
    keys = [iteration * 1000 + number * 100 + sample for sample in range(16)]
    futures = [engine.submit(GenerateRequest(prompt, ref, key, 0, 1)) for key in keys]
    task = Task(f"train/{number}", (), "")
    episodes = []
    for key, completion in zip(keys, [future.result(60) for future in futures], strict=True):
        step = Step(0, (), prompt, completion.token_ids, completion.logprobs, completion.finish_reason, TURN, ref.version)
        reward = float(completion.token_ids[0] % 2 == 0)
        episodes.append(Episode(task, steps=(step,), status="done", reward=reward, id=key))
    return Group(task, tuple(episodes))


@pytest.mark.slow
@cpu_alone("it is the CPU's memory that is spared")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's heap that is spared")
def test_sparing_memory_returns_freed_heap_to_system() -> None:
    """In a process of its own: a tensor that lies in a hole which an older one has left in the heap stays there."""
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, check=True, env=alone).stdout
    spared, not_spared = map(float, said.split())
    assert spared > 70
    assert not_spared < 40


GIVEN_BACK = """
import torch
from bench.performance.processes import resident
from agentrl.workflow.models.memory import return_freed_memory

def given_back():
    '''MiB, of 80 that are freed between others that are not.'''
    kept, freed = zip(*[(torch.ones(2**20), torch.ones(2**20)) for _ in range(20)], strict=True)
    before = resident("VmRSS")
    del freed
    return before - resident("VmRSS")

with return_freed_memory(torch.device("cpu"), True):
    print(given_back())
print(given_back())
"""


def test_trainer_checks_finite_weights_with_one_device_sync(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, trainer = trainer_of(folder, config(4))
    reads: list[torch.Size] = []
    read = Tensor.__bool__
    monkeypatch.setattr(Tensor, "__bool__", lambda tensor: (reads.append(tensor.shape), read(tensor))[1])
    trainer._require_finite_weights()
    assert len(reads) == 1 < len(trainer._parameters)
    with torch.no_grad():
        list(trainer._parameters.values())[-1].view(-1)[0] = float("nan")
    with pytest.raises(NotFinite):
        trainer._require_finite_weights()


def test_sparing_memory_leaves_other_c_libraries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr("agentrl.workflow.models.memory.ctypes", None)
    with return_freed_memory(torch.device("cpu"), True):
        pass


@pytest.mark.parametrize(
    ("options", "lean"),
    [
        ({}, False),
        ({"model.load_in_4bit": True}, True),
        ({"model.load_in_8bit": True}, True),
        ({"update.gradient_checkpointing": True}, True),
    ],
)
def test_sparing_memory_follows_option(options: dict[str, Any], lean: bool) -> None:
    assert build(options).lean is lean


def test_trainer_option_names_file_with_own_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_trainer.py").write_text(
        "from agentrl.workflow.errors import ConfigError\n"
        "from agentrl.workflow.trainers import TrainerBackend\n"
        "from agentrl.workflow.training.trainer import Trainer\n\n"
        "class Idle(Trainer):\n    def update(self, groups, iteration): return super().update([], iteration)\n\n"
        "def check(config):\n    if config.algorithm.name != 'grpo': raise ConfigError('Idle does nothing but grpo.')\n\n"
        "idle = TrainerBackend('idle', 'own_trainer:Idle', 'own_trainer:check')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = build({"update.trainer": "own_trainer:idle"})
    trainers.check(run)
    policy = Policy.load(run.model, str(tiny_random(tmp_path / "model")), DEVICE)
    assert type(trainers.start(Experiment(run).trainer, policy, run, 1)).__name__ == "Idle"
    with pytest.raises(ConfigError, match="nothing but grpo"):
        trainers.check(build({"update.trainer": "own_trainer:idle", "algorithm.name": "rloo"}))
    with pytest.raises(ConfigError, match="No trainer is called 'nobody'"):
        trainers.check(build({"update.trainer": "nobody"}))
