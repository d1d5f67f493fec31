"""Trying an agent in this process: called as it is, on a real endpoint and a real small model, everything printed."""

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.workflow.emitters import EMIT_KEY
from agentrl.workflow.errors import ConfigError, RewardError
from tests.support.small_models import tiny_calling

ROWS = [{"question": f"What is {a} plus 1?", "answer": str(a + 1)} for a in range(2, 4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_calling(tmp_path_factory.mktemp("model") / "calling"))


@pytest.fixture(autouse=True)
def nothing_left(home: Path) -> Iterator[None]:
    """Neither a variable nor the endpoint's thread stays, and no database."""
    before = dict(os.environ)
    yield
    assert {name for name in os.environ if before.get(name) != os.environ[name]} <= {"PYTEST_CURRENT_TEST"}
    assert not [thread.name for thread in threading.enumerate() if thread.name in ("endpoint", "episodes")]
    assert not (home / "agentrl.db").exists()


def ask(llm: Any, messages: Any) -> str:
    body = json.dumps({"model": llm.model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {llm.api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{llm.base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def trainer(model: str, **more: Any) -> agentrl.Trainer:
    return agentrl.Trainer(model=model, max_new_tokens=12, **more)


def long(episode: agentrl.Episode) -> float:
    """How much was sampled."""
    return float(sum(len(step.sampled_ids) for step in episode.steps))


def test_dev_calls_closure_agent_here_and_prints_everything(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    called: list[tuple[int, bool]] = []

    def solve(task: agentrl.AgentTask, llm: agentrl.LLM) -> str:
        called.append((os.getpid(), os.environ["OPENAI_API_KEY"] == llm.api_key))
        ask(llm, task.messages)
        agentrl.emit_message("thinking")
        emits = [sys.executable, "-P", "-c", "import agentrl; agentrl.emit_reward(0.25, name='child')"]
        subprocess.run(emits, check=True)
        return f"it is {task.input}"

    first, second = trainer(model, rewards=[long]).dev(agent=solve, train_dataset=ROWS)
    assert called == [(os.getpid(), True)] * 2
    assert first.final_answer == "it is What is 2 plus 1?"
    assert first.task.reference == "3"
    assert first.reward == first.rewards["long"] == long(first) > 0
    assert second.rewards["child"] == 0.25
    shown = capsys.readouterr().out
    assert shown.count("=== task") == 2
    assert "What is 3 plus 1?" in shown
    assert 'agent said: message  {"message": "thinking"}' in shown
    assert f"reward {first.reward:.4g} (long {first.reward:.4g}, child 0.25)" in shown


def test_dev_shows_agent_error_from_its_line_and_continues(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def solve(task: agentrl.AgentTask, llm: agentrl.LLM) -> float:
        ask(llm, task.messages)
        if "2" in task.input:
            raise KeyError("two")
        return 0.5

    first, second = trainer(model, env="plain").dev(agent=solve, train_dataset=ROWS)
    assert (first.stop_reason, second.rewards) == ("agent_error", {"agent": 0.5})
    assert second.reward == 0.5, "nothing else rewards it"
    shown = capsys.readouterr().out
    assert "KeyError: 'two'" in shown
    assert "/dev.py" not in shown


class Thinker(agentrl.Agent):
    """Waits before it answers."""

    async def rollout(self, task: agentrl.AgentTask, llm: agentrl.LLM) -> str:
        """Asks nobody."""
        return task.input


def test_dev_calls_async_agents_classes_and_hooks(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Pays(agentrl.Hook):
        def on_rollout_end(self, rollout: agentrl.Rollout, task: agentrl.Task) -> None:  # type: ignore[override]
            rollout.reward = 2.0

    (episode,) = trainer(model, env="plain", hooks=[Pays()]).dev(agent=Thinker, train_dataset=ROWS[:1])
    assert (episode.reward, episode.rewards) == (2.0, {"reward": 2.0})
    assert "The agent did not call the model" in capsys.readouterr().out


def test_dev_without_agent_tries_builtin_loop(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    episodes = trainer(model, max_steps=2).dev(train_dataset="arithmetic", max_tasks=2)
    episodes += trainer(model, max_steps=2).dev(agent="arithmetic", train_dataset=ROWS[:1])
    assert [episode.rewards.keys() for episode in episodes] == [{"numeric_answer"}] * 3
    assert capsys.readouterr().out.count("=== task") == 3


def test_dev_weighs_rewards_as_a_run_does(model: str) -> None:
    """With the built-in loop too: a named reward has its weight, and the env's own are then recorded with weight 0."""
    trial = trainer(model, rewards={long: 0.5}, env="arithmetic", max_steps=1)
    (episode,) = trial.dev(train_dataset=ROWS[:1])
    assert episode.rewards == {"numeric_answer": episode.rewards["numeric_answer"], "long": long(episode)}
    assert episode.reward == 0.5 * long(episode) > 0


def raises(episode: agentrl.Episode) -> float:
    """No reward."""
    raise ValueError("no")


@pytest.mark.parametrize(
    ("given", "asked", "why"),
    [
        ({}, {"agent": "cmd:python agent.py", "train_dataset": ROWS}, ConfigError),
        ({}, {"agent": "no_module:solve", "train_dataset": ROWS}, ConfigError),
        ({}, {"train_dataset": [{"question": str(n)} for n in range(101)]}, ConfigError),
        ({}, {"train_dataset": ROWS, "max_new_token": 3}, ConfigError),
        ({"rewards": [raises]}, {"train_dataset": ROWS}, RewardError),
    ],
)
def test_dev_refuses_what_cannot_be_tried(model: str, given: Any, asked: Any, why: Any) -> None:
    with pytest.raises(why):
        trainer(model, **given).dev(**asked)


def test_dev_keeps_nothing(model: str, tmp_path: Path) -> None:
    trainer(model, rewards=[long], store=tmp_path / "home").dev(agent=lambda task, llm: "42", train_dataset=ROWS[:1])
    assert not (tmp_path / "home" / "agentrl.db").exists()
    assert EMIT_KEY not in os.environ


def test_dev_gives_agent_resources_of_run(model: str) -> None:
    def solve(task: agentrl.AgentTask, llm: agentrl.LLM, resources: Any, prompt: agentrl.Prompt) -> str:
        assert resources["prompt"] == prompt
        return ask(llm, [{"role": "user", "content": prompt.format(question=task.input)}])

    (episode,) = trainer(model, algorithm="apo", resources={"prompt": "So: {question}"}).dev(solve, ROWS[:1])
    assert episode.steps[0].prompt[0].content == "So: What is 2 plus 1?"
