"""What a hook tells of an episode that is over, in either form."""

import logging
from typing import Any

import pytest

from agentrl.workflow.hooks import Hook, LoggingHook, load_hooks, parts_told
from agentrl.workflow.trajectory import Episode, Message, Rollout, Task
from tests.support.played_runs import step

EPISODE = Episode(Task("t/1", (Message("user", "2+2?"),), "4", {"reward": 9, "level": 1}), id=3, steps=(step(0),))


class Parts(Hook):
    """The first form."""

    def on_rollout_end(self, episode: Episode) -> dict[str, float]:
        """Names it."""
        return {"steps": float(len(episode.steps))}


class Sets(Hook):
    """The form that sets a reward on what it is given."""

    def __init__(self, reward: Any = 0.5) -> None:
        self.reward = reward

    def on_rollout_end(self, rollout: Rollout, task: Task) -> None:  # type: ignore[override]
        """Sets it."""
        assert (rollout.input, rollout.metadata, rollout.episode) == ("2+2?", {"level": 1}, EPISODE)
        assert rollout.output == EPISODE.final_answer
        if self.reward is not None:
            rollout.metadata["reward"] = self.reward * float(task.reference)


class Returns(Sets):
    """The form that returns another."""

    def on_rollout_end(self, rollout: Rollout, task: Task) -> Rollout:  # type: ignore[override]
        """Returns it."""
        return Rollout(metadata={"reward": 1})


held = Sets(2.0)


def test_hook_names_parts_or_sets_reward() -> None:
    assert parts_told(Parts(), EPISODE) == {"steps": 1.0}
    assert parts_told(Sets(), EPISODE) == {"reward": 2.0}
    assert parts_told(Returns(), EPISODE) == {"reward": 1}
    assert parts_told(Sets(None), EPISODE) == {}
    assert parts_told(Hook(), EPISODE) == {}


def test_load_hooks_makes_class_or_copies_object() -> None:
    made, copied = load_hooks([f"{__name__}:Parts", f"{__name__}:held"])
    assert type(made) is Parts
    assert isinstance(copied, Sets)
    assert copied is not held
    assert copied.reward == 2.0


def test_logging_hook_logs_events(caplog: pytest.LogCaptureFixture) -> None:
    hook = LoggingHook()
    with caplog.at_level(logging.INFO, "agentrl.hook"):
        assert parts_told(hook, EPISODE) == {}
        hook.on_update_start("run", 1)
        hook.on_update_end("run", 1, {"loss": 0.25})
        hook.on_eval_end("run-eval", 1, {"mean": 0.5})
        hook.on_run_end("run", "done")
    assert "episode 3 of t/1: reward 0" in caplog.messages[0]
    assert caplog.messages[2:] == ["run: update 1: loss 0.25", "run-eval: version 1 measured: mean 0.5", "run: done"]
