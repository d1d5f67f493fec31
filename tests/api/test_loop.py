"""The loop by hand: episodes with an open policy, updates on them, in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import agentrl
from agentrl.api.loop import grouped, task_of
from agentrl.workflow.errors import ConfigError, ConflictError, DatasetError, RewardError
from tests.support.small_models import tiny_calling

TASKS = [{"question": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(4)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[agentrl.OpenPolicy]:
    """A small model that makes calls now and then."""
    folder = tiny_calling(tmp_path_factory.mktemp("model") / "calling")
    with agentrl.open_policy(str(folder), max_new_tokens=12, max_steps=3) as opened:
        yield opened


def low(episode: agentrl.Episode) -> float:
    """The share of its sampled ids that are below 100."""
    ids = [token for step in episode.steps for token in step.sampled_ids]
    return sum(token < 100 for token in ids) / len(ids)


def test_rollout_worker_plays_episode_with_tools_and_rewards(policy: agentrl.OpenPolicy) -> None:
    worker = agentrl.RolloutWorker(policy, "arithmetic")
    episodes = worker.run_episodes(TASKS, group_size=8)
    assert [episode.task.reference for episode in episodes[::8]] == ["1", "2", "3", "4"]
    assert len({episode.id for episode in episodes}) == 32
    assert len({episode.steps[0].sampled_ids for episode in episodes[:8]}) > 1, "each draws anew"
    for episode in episodes:
        assert episode.trainable
        assert episode.rewards.keys() == {"numeric_answer"}
        assert episode.stop_reason in ("answered", "max_tokens", "max_steps", "parse_error")
        for step in episode.steps[:-1]:
            assert len(step.results or ()) == len(step.message.tool_calls)
    assert any(step.results for episode in episodes for step in episode.steps), "some call the calculator"


def test_rollout_worker_answers_bare_question_without_score(policy: agentrl.OpenPolicy) -> None:
    said = agentrl.RolloutWorker(policy, "arithmetic", max_new_tokens=3).run_episode("What is 2 plus 3?")
    assert (said.reward, said.trainable) == (None, False)
    assert len(said.steps[0].sampled_ids) <= 3
    scored = agentrl.RolloutWorker(policy, "plain", rewards={"low": low}).run_episode("Say something.")
    assert scored.reward == scored.rewards["low"] == low(scored)


def test_updates_by_hand_improve_policy_that_samples_and_saves(tmp_path: Path) -> None:
    folder = tiny_calling(tmp_path / "calling")
    with agentrl.open_policy(str(folder), max_new_tokens=8, max_steps=1) as policy:
        worker = agentrl.RolloutWorker(policy, "plain", rewards={"low": low})
        trainer = agentrl.GRPOTrainer(policy, learning_rate=0.003)
        told = [trainer.update(worker.run_episodes(TASKS, group_size=16)) for _ in range(7)]
        assert policy.ref.version == 7
        before = sum(each["reward"] for each in told[:2]) / 2
        after = sum(each["reward"] for each in told[-2:]) / 2
        assert after > before + 0.15
        assert max(each["sampler_difference_mean"] for each in told) < 1e-3, "what samples is what was trained"
        same = trainer.update([*worker.run_episodes(TASKS[:1])])
        assert same["skipped"]
        assert policy.ref.version == 7
        told = policy.forward([list(range(12))]).logprobs
        saved = trainer.save(tmp_path / "saved")
        with pytest.raises(ConflictError, match="Pass overwrite=True"):
            trainer.save(saved)
        assert trainer.save(str(saved), overwrite=True) == saved
    with agentrl.open_policy(str(saved), max_new_tokens=8) as loaded, agentrl.open_policy(str(folder)) as untrained:
        assert torch.allclose(loaded.forward([list(range(12))]).logprobs, told, atol=1e-4)
        assert not torch.allclose(untrained.forward([list(range(12))]).logprobs, told, atol=0.05)


def test_updates_by_hand_refuse_in_a_sentence(policy: agentrl.OpenPolicy) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora_r cannot change: the model is already open"):
        agentrl.GRPOTrainer(policy, lora_r=8)
    with pytest.raises(ConfigError, match="no option 'learning_rat'"):
        agentrl.GRPOTrainer(policy, learning_rat=1.0)
    with pytest.raises(ConfigError, match=r"No algorithm is called 'grop'\. Did you mean 'grpo'"):
        agentrl.GRPOTrainer(policy, "grop")
    with pytest.raises(ConfigError, match="No env is called"):
        agentrl.RolloutWorker(policy, "arithmetics")
    with pytest.raises(DatasetError, match="is not a valid task: must have one of"):
        agentrl.RolloutWorker(policy).run_episode({"text": "?"})
    with pytest.raises(RewardError, match="nan"):
        agentrl.RolloutWorker(policy, "plain", rewards={"bad": lambda episode: float("nan")}).run_episode("Say.")


def test_updates_by_hand_compare_episodes_of_one_task() -> None:
    one, other = task_of(TASKS[0]), task_of(dict(reversed(TASKS[0].items())))
    assert one == other
    assert task_of("What?").key != one.key
    episodes = [agentrl.Episode(task, id=number) for number, task in enumerate([one, task_of("What?"), other])]
    assert [[each.id for each in group.episodes] for group in grouped(episodes)] == [[0, 2], [1]]
