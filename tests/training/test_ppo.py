"""PPO whole, and what any algorithm may have beside its loss: a KL in the reward, an entropy bonus, passes, schedules."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.workflow.algorithms import gradients, resolve_run
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.errors import CheckpointError, ConfigError
from agentrl.workflow.models.critic import FILE
from agentrl.workflow.models.logprobs import token_scores
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find
from agentrl.workflow.training.optimizer import learning_rate_share, next_kl_coef
from agentrl.workflow.training.prepared_update import explained_variance
from agentrl.workflow.training.reports import Update
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.trajectory import Episode, Group, Step
from tests.training.test_trainer import (
    KINDS,
    assert_same_files,
    bandit,
    config,
    go_on,
    gradient,
    groups_of,
    saved,
    trainer_of,
    unchanged,
)
from tests.training.test_trainer import folder as folder


def ppo(lora_r: int = 0, exact: bool = False, **values: Any) -> RunConfig:
    return config(lora_r, exact, algorithm__name="ppo", **values)


def critic_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / FILE)


# --- the critic ---------------------------------------------------------------------------------------------------------------


@KINDS
def test_critic_learns_returns(folder: Path, lora_r: int) -> None:
    """The same episodes again and again: the values come near the returns."""
    _, trainer = trainer_of(folder, ppo(lora_r, update__learning_rate=1e-4, critic__learning_rate=3e-2, critic__clip=0.0))
    groups = groups_of()
    first = trainer.update(groups, 0).metrics
    for iteration in range(1, 40):
        last = trainer.update(groups, iteration).metrics
    assert first["explained_variance"] == pytest.approx(0, abs=1e-6), "it knows nothing at first"
    assert last["value_loss"] < first["value_loss"] / 3
    assert last["explained_variance"] > 0.2


@KINDS
def test_critic_values_and_gradient_ignore_microbatches(folder: Path, tmp_path: Path, lora_r: int) -> None:
    found = []
    for number, tokens in enumerate((10**6, 64, 1)):
        run = ppo(lora_r, True, update__microbatch_tokens=tokens, update__max_grad_norm=1e9, algorithm__gae_lambda=0.9)
        _, trainer = trainer_of(folder, run)
        trainer.update(groups_of(seed=2), 0)
        update = trainer.update(groups_of(), 1)
        found.append((gradient(trainer, tmp_path / str(number)), update.metrics))
    whole, metrics = found[0]
    for other, other_metrics in found[1:]:
        assert torch.allclose(other, whole, rtol=1e-8, atol=1e-12)
        assert {**other_metrics, "seconds": 0} == pytest.approx({**metrics, "seconds": 0}, rel=1e-8, abs=1e-12)


def test_critic_value_is_head_of_state_before_token(folder: Path) -> None:
    policy, _ = trainer_of(folder, config(0, True))
    head = torch.nn.Linear(policy_width(policy), 1, dtype=torch.float64)
    ids = torch.tensor([[3, 4, 5, 6]])
    with policy.training() as model, torch.no_grad():
        model.eval()
        values = token_scores(model, ids, torch.ones_like(ids), critic=head).values
        hidden = model.model(input_ids=ids).last_hidden_state  # type: ignore[operator,union-attr]
    assert values is not None
    assert torch.allclose(values[0], head(hidden[0, :-1])[:, 0])


def policy_width(policy: Policy) -> int:
    with policy.training() as model:
        return int(model.config.hidden_size)  # type: ignore[union-attr,arg-type]


@KINDS
def test_ppo_checkpoint_resumes_with_critic(folder: Path, tmp_path: Path, lora_r: int) -> None:
    run = ppo(
        lora_r,
        True,
        update__batch_size=8,
        update__epochs=2,
        algorithm__kl_coef=0.1,
        algorithm__kl_target=0.01,
        critic__warmup=1,
    )
    go_on(tmp_path, trainer_of(folder, run)[1], Trainer(Policy.load(run.model, str(folder), device="cpu"), run))
    assert_same_files(tmp_path)
    assert FILE in sealed_folder.verify(tmp_path / "v2")


def test_critic_lost_is_an_error_except_in_new_run(folder: Path, tmp_path: Path) -> None:
    _, trainer = trainer_of(folder, ppo())
    trainer.update(groups_of(), 0)
    sealed_folder.write(tmp_path / "v1", trainer.save)
    trainer.load(tmp_path / "v1", fresh=True)
    sealed_folder.write(tmp_path / "v2", trainer.save)
    assert not any(tensor.any() for tensor in critic_in(tmp_path / "v2").values())
    plain = Trainer(Policy.load(config().model, str(folder), device="cpu"), config())
    sealed_folder.write(tmp_path / "without", plain.save)
    with pytest.raises(CheckpointError, match=FILE):
        trainer.load(tmp_path / "without")


def test_critic_warmup_leaves_policy_unchanged(folder: Path, tmp_path: Path) -> None:
    policy, trainer = trainer_of(folder, ppo(critic__warmup=2))
    before = {name: parameter.detach().clone() for name, parameter in policy.trainable().items()}
    for iteration in range(2):
        trainer.update(groups_of(seed=iteration), iteration)
        assert all(torch.equal(before[name], parameter) for name, parameter in policy.trainable().items())
    sealed_folder.write(tmp_path / "v2", trainer.save)
    assert any(tensor.any() for tensor in critic_in(tmp_path / "v2").values())
    trainer.load(tmp_path / "v2")
    trainer.update(groups_of(), 2)
    assert any(not torch.equal(before[name], parameter) for name, parameter in policy.trainable().items())


def test_skipped_update_restores_critic(folder: Path, tmp_path: Path) -> None:
    """The critic's loss overflows in the second minibatch."""
    _, trainer = trainer_of(folder, ppo(update__batch_size=8))
    trainer.update(groups_of(), 0)
    before, critic = saved(trainer, tmp_path / "before"), critic_in(tmp_path / "before")
    groups = groups_of(seed=3)
    far = Group(groups[2].task, tuple(replace(e, reward=1e300) for e in groups[2].episodes))
    assert trainer.update([*groups[:2], far, groups[3]], 1).bad
    assert unchanged(trainer, tmp_path / "after", before)
    assert all(torch.equal(critic[name], tensor) for name, tensor in critic_in(tmp_path / "after").items())


def test_explained_variance_is_one_if_exact_none_if_constant() -> None:
    returns, mask = torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert explained_variance(returns + 5, returns, mask) == 1
    assert explained_variance(torch.full_like(returns, 2.0), returns, mask) == 0
    assert explained_variance(returns, torch.ones_like(returns), mask) == 0


def test_critic_options_without_critic_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"critic.\* has no effect with grpo: it has no critic"):
        resolve_run(build({"critic.warmup": 2}))
    assert resolve_run(build({"critic.warmup": 2, "algorithm.name": "ppo"})).critic.warmup == 2


# --- every algorithm learns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in gradients() if name != "pass_at_k"])
@pytest.mark.slow
def test_algorithms_learn_rewarded_tokens(tmp_path: Path, name: str) -> None:
    means = bandit(tmp_path, quick(name))
    assert means[0] < 0.7, means
    assert sum(means[-5:]) / 5 > 0.85, means


def test_pass_at_k_learns_until_one_of_group_is_right(tmp_path: Path) -> None:
    means = bandit(tmp_path, quick("pass_at_k"))
    assert means[0] < 0.4, means
    assert max(means) > 0.8, means


def quick(name: str) -> RunConfig:
    """So that twenty updates show it."""
    return config(algorithm__name=name, update__learning_rate=1e-2, critic__learning_rate=1e-2)


# --- KL, entropy --------------------------------------------------------------------------------------------------------------


def test_kl_in_reward_is_per_token_and_not_in_loss(folder: Path, tmp_path: Path) -> None:
    found = []
    for kl_in in ("reward", "loss"):
        run = config(0, True, algorithm__name="reinforce", algorithm__kl_coef=0.5, algorithm__kl_in=kl_in)
        _, trainer = trainer_of(folder, run)
        groups = groups_of()
        update = trainer.update(groups, 0)
        assert update.metrics["kl"] > 0
        assert update.metrics["kl_coef"] == 0.5
        found.append(update)
    rewards = {e.id: e.reward or 0.0 for group in groups for e in group.episodes}
    in_reward, in_loss = (update.advantages for update in found)
    assert in_loss == pytest.approx(rewards)
    assert all(in_reward[number] < reward for number, reward in rewards.items())
    assert found[0].metrics["kl"] == pytest.approx(found[1].metrics["kl"])


def test_kl_without_finite_advantage_skips_step(folder: Path) -> None:
    _, trainer = trainer_of(folder, config(algorithm__name="ppo", algorithm__kl_coef=1e308, algorithm__kl_in="reward"))
    update = trainer.update(groups_of(), 0)
    assert (update.skipped, update.bad, update.advantages) == ("an advantage is not a finite number", True, {})


def test_entropy_bonus_makes_policy_less_certain(folder: Path) -> None:
    def after(coef: float) -> float:
        _, trainer = trainer_of(folder, config(0, algorithm__entropy_coef=coef))
        for iteration in range(10):
            update = trainer.update(groups_of(seed=iteration), iteration)
        return update.metrics["entropy"]

    assert after(0.5) > after(0.0)


@pytest.mark.parametrize("lora_r", [0, 4], ids=["trained head", "frozen head"])
def test_entropy_gradient_equals_full_softmax(folder: Path, lora_r: int) -> None:
    policy, _ = trainer_of(folder, config(lora_r, True))
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    trained = list(policy.trainable().values())
    with policy.training() as model:
        model.eval()
        scores = token_scores(model, ids, torch.ones_like(ids), 0.7, entropy_trains=True)
        ours = torch.autograd.grad((scores.entropy * 2 + scores.logprobs).sum(), trained)
        shares = torch.log_softmax(model(input_ids=ids).logits[:, :-1] / 0.7, -1)
        entropy = -(shares.exp() * shares).sum(-1)
        chosen = shares.gather(-1, ids[:, 1:, None])[..., 0]
        expected = torch.autograd.grad((entropy * 2 + chosen).sum(), trained)
    assert torch.allclose(scores.entropy, entropy)
    for mine, other in zip(ours, expected, strict=True):
        assert torch.allclose(mine, other, rtol=1e-8, atol=1e-12)


def test_kl_weight_follows_target() -> None:
    options = build({"algorithm.kl_coef": 0.2, "algorithm.kl_target": 0.1, "algorithm.kl_horizon": 1000}).algorithm
    assert next_kl_coef(0.2, 0.3, 100, options) == pytest.approx(0.2 * 1.02)
    assert next_kl_coef(0.2, 0.11, 100, options) == pytest.approx(0.2 * 1.01)
    assert next_kl_coef(0.2, 0.0, 100, options) == pytest.approx(0.2 * 0.98)
    assert next_kl_coef(0.2, 9.0, 100, build({"algorithm.kl_coef": 0.2}).algorithm) == 0.2


def test_kl_in_reward_of_stored_episodes_uses_current_policy(folder: Path) -> None:
    """A policy that is its reference has no KL, whatever weights sampled the episodes."""

    def update(**values: Any) -> Update:
        run = config(algorithm__name="rloo", source__runs=["other"], **values)
        return Trainer(Policy.load(run.model, str(folder), device="cpu"), run).update(groups_of(), 0)

    found = update(algorithm__kl_coef=0.5, algorithm__kl_in="reward")
    assert found.metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert found.advantages == pytest.approx(update().advantages, abs=1e-6)
    assert found.metrics["policy_kl"] == 0
    assert found.metrics["ratio"] != pytest.approx(1, abs=0.01), "against the sampler's"


@pytest.mark.parametrize("values", [{}, {"algorithm__kl_coef": 0.1, "algorithm__kl_in": "reward"}])
def test_single_step_ratio_includes_dropout(folder: Path, values: dict[str, Any]) -> None:
    _, trainer = trainer_of(folder, ppo(4, model__lora_dropout=0.5, **values))
    assert trainer.update(groups_of(), 0).metrics["ratio"] == pytest.approx(1, abs=1e-6)


# --- passes, rates ------------------------------------------------------------------------------------------------------------


def test_update_epochs_are_steps_that_end_at_max_kl(folder: Path) -> None:
    def steps(**values: Any) -> int:
        _, trainer = trainer_of(folder, config(**{"update__learning_rate": 1e-2, "update__batch_size": 8} | values))
        return len(trainer.update(groups_of(), 0).steps)

    assert steps() == 2
    assert steps(update__epochs=4) == 8
    assert steps(update__epochs=4, update__max_kl=1e-9) == 2
    assert steps(update__epochs=4, update__max_kl=1e-9, update__batch_size=None) == 1, "measured after the step"
    assert steps(update__epochs=4, update__max_kl=1e9) == 8


def test_update_epochs_keep_ratio_to_first_policy(folder: Path) -> None:
    _, trainer = trainer_of(folder, config(update__learning_rate=1e-2, update__epochs=3))
    first, *later = trainer.update(groups_of(), 0).steps
    assert first["policy_kl"] == pytest.approx(0, abs=1e-9)
    assert all(step["policy_kl"] > 1e-4 for step in later)


def test_max_kl_without_second_epoch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_kl has no effect if update\.epochs is 1"):
        build({"update.max_kl": 0.1})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [1.0] * 6),
        ({"update.warmup": 2}, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ({"update.decay": "linear"}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ({"update.warmup": 2, "update.decay": "linear"}, [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
        ({"update.warmup": 2, "update.decay": "cosine"}, [1 / 3, 2 / 3, 1, 0.5 + 2**-1.5, 0.5, 0.5 - 2**-1.5]),
    ],
)
def test_learning_rate_follows_iterations(values: dict[str, Any], expected: list[float]) -> None:
    options = build(values).update
    assert [learning_rate_share(options, number, 6) for number in range(6)] == pytest.approx(expected)


def test_learning_rate_depends_on_iteration_alone(folder: Path) -> None:
    run = ppo(update__decay="linear", update__learning_rate=1e-3, critic__learning_rate=1e-2)
    trainer = Trainer(Policy.load(run.model, str(folder), device="cpu"), run, iterations=4)
    trainer.update(groups_of(), 2)
    assert trainer.learning_rate == pytest.approx(5e-4)


def test_episode_advantage_is_mean_of_its_tokens(folder: Path) -> None:
    _, trainer = trainer_of(folder, config(algorithm__name="reinforce", algorithm__discount=0.5))
    task = groups_of()[0].task
    one = Step(0, (), (5, 6), (7, 8, 9), (-1.0,) * 3, "stop", groups_of()[0].episodes[0].steps[0].message, 0)
    update = trainer.update([Group(task, (Episode(task, steps=(one,), status="done", reward=1.0, id=9),))], 0)
    assert update.advantages == {9: pytest.approx((1 + 0.5 + 0.25) / 3)}


def test_algorithms_all_load_and_update(folder: Path) -> None:
    for name in gradients():
        assert find("algorithms", name).name == name
        _, trainer = trainer_of(folder, config(algorithm__name=name, update__batch_size=8, update__epochs=2))
        update = trainer.update(groups_of(), 0)
        assert update.skipped is None, name
        assert update.metrics["clip_fraction"] >= 0
