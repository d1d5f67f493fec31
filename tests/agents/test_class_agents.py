"""Agents that are classes, in the processes that run them."""

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from agentrl.workers.agents import processes
from agentrl.workers.agents.processes import servers
from agentrl.workers.requests.agent_request import check_function
from agentrl.workflow.agents import LLM, AgentTask, Answer, read_result
from agentrl.workflow.agents.classes import Agent, as_function
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.resources import Prompt
from agentrl.workflow.trajectory import Rollout
from tests.agents.test_processes import order

LLM_HERE = LLM("http://127.0.0.1:1/v1", "key", "m")


class Whole(Agent):
    """Made where it is forked from."""

    def __init__(self, most: int = 7) -> None:
        self.maker, self.most = os.getpid(), most

    def rollout(self, task: AgentTask, resources: dict[str, Any], llm: LLM) -> Rollout:
        """Answers."""
        rollout = Rollout(task.input, f"{llm.model} {resources['llm'].model} {self.most} {self.maker != os.getpid()}")
        rollout.reward = 0.5
        return rollout


class Parted(Agent):
    """Does otherwise where it is measured."""

    async def training_rollout(self, task: AgentTask, llm: LLM) -> str:
        """Waits."""
        await asyncio.sleep(0)
        return f"trains with {llm.model}"

    def validation_rollout(self, task: AgentTask) -> Answer:
        """Is measured."""
        return Answer("is measured", {"own": 1.0})


class Foreign:
    """Derived of nothing of ours, with names of its own."""

    def rollout(self, one: Any, two: Any, three: Any) -> float:
        """All three."""
        return float(one.training and two["llm"] == three)


foreign = Foreign()


class Empty(Agent):
    """Nothing."""


class Wanting(Agent):
    """Cannot be made."""

    def __init__(self, client: Any) -> None:
        self.client = client


class Crowded:
    """Takes too much."""

    def rollout(self, a: Any, b: Any, c: Any, d: Any) -> None:
        """No."""


class OnlyTrains(Agent):
    """Cannot be measured."""

    def training_rollout(self, task: AgentTask) -> None:
        """Trains."""


@pytest.fixture(scope="module", autouse=True)
def _end_servers() -> Iterator[None]:
    yield
    servers.close()


def ran(name: str, training: bool = True) -> processes.AgentReport:
    task = {"key": "t/1", "messages": [{"role": "user", "content": "Hi"}], "metadata": {}, "reference": None}
    report = processes.run(order(task=task | {"training": training}), f"{__name__}:{name}", lambda: False)
    assert report is not None
    return report


def test_agent_class_is_made_once_and_forked_by_episode() -> None:
    for _ in range(2):
        report = ran("Whole")
        assert (report.answer, report.rewards) == ("m m 7 True", {"agent": 0.5}), report


def test_agent_class_may_differ_in_evaluation() -> None:
    assert ran("Parted").answer == "trains with m"
    measured = ran("Parted", training=False)
    assert (measured.answer, measured.rewards) == ("is measured", {"own": 1.0})


def test_agent_class_needs_only_rollout_method() -> None:
    assert ran("foreign").rewards == {"agent": 1.0}
    assert ran("Foreign").rewards == {"agent": 1.0}


@pytest.mark.parametrize("agent", [Whole, Whole(3), Parted, Foreign, foreign])
def test_agent_may_be_anything_with_rollout(agent: Any) -> None:
    check_function("mine:it", agent)
    assert callable(as_function(agent))


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (Empty, "has no rollout method to evaluate it with. Write rollout"),
        (Agent, "has no rollout method to evaluate it with"),
        (OnlyTrains, "has no rollout method to evaluate it with"),
        (Wanting, "without arguments: TypeError"),
        (Crowded, "takes 4 arguments. Write rollout"),
        (int, "is a class without rollout"),
    ],
)
def test_agent_class_without_rollout_is_refused_with_example(agent: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_function("mine:it", agent)


def test_agent_function_is_used_as_it_is() -> None:
    def solve(task: AgentTask, llm: LLM) -> float:
        return 1.0

    assert as_function(solve) is solve


def one_text(task: AgentTask, prompt_template: Prompt) -> str:
    """Takes a text, and no model."""
    return prompt_template.format(question=task.input)


def text_first(prompt_template: Prompt, llm: LLM, task: AgentTask, tries: int = 3) -> str:
    """Takes everything, in an order of its own."""
    return prompt_template.format(question=task.input) + llm.model + str(tries)


def all_texts(task: AgentTask, resources: dict[str, Any]) -> str:
    """Takes them all, and no model by itself."""
    return str(resources["prompt_template"]) + resources["llm"].model


def old(t: AgentTask, m: LLM, resources: dict[str, Any]) -> str:
    """Names its task and its model as it likes."""
    return t.input + m.model + resources["prompt_template"]


class OneText(Agent):
    """Takes a text."""

    def rollout(self, task: AgentTask, prompt_template: Prompt) -> str:  # type: ignore[override]
        """Fills it."""
        return one_text(task, prompt_template)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (one_text, "Say Hi"),
        (text_first, "Say Him3"),
        (all_texts, "Say {question}m"),
        (old, "HimSay {question}"),
        (OneText, "Say Hi"),
    ],
)
def test_agent_parameter_gets_resource_by_name(agent: Any, said: str) -> None:
    task = AgentTask("t/1", [{"role": "user", "content": "Hi"}], resources={"prompt_template": Prompt("Say {question}")})
    assert as_function(agent)(task, LLM_HERE) == said
    check_function("mine:it", agent, task.resources)


def wants_more(task: AgentTask, prompt_template: Prompt, rollout: Any) -> None:
    """Takes what there is not."""


@pytest.mark.parametrize(
    ("agent", "texts", "said"),
    [
        (one_text, ["prompt"], 'the run has no prompt with that name. Write resources={"prompt_template": '),
        (one_text, [], "the run has no prompt with that name"),
        (wants_more, ["prompt_template"], "missing a required argument: 'rollout'"),
    ],
)
def test_agent_parameter_without_resource_is_refused(agent: Any, texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_function("mine:it", agent, texts)


WRONG: dict[str, Any] = {"a text": "x", "NaN": float("nan"), "a list": [1.0], "too many": {str(n): 1.0 for n in range(65)}}


@pytest.mark.parametrize("name", WRONG)
def test_agent_rollout_result_is_read_like_any_other(name: str) -> None:
    rollout = Rollout("asked", "said")
    assert read_result(rollout).answer == "said"
    assert read_result(rollout).rewards is None
    rollout.metadata["reward"] = {"right": 1}
    assert read_result(rollout).rewards == {"right": 1.0}
    rollout.reward = WRONG[name]
    with pytest.raises((TypeError, ValueError)):
        read_result(rollout)
