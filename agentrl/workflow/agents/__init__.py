"""Arguments and return values of Python agents. An agent is a function `solve(task, llm)`, sync or async.

The function receives the task's messages and metadata, and the address of its model. It returns None, a number (a reward),
named rewards, or an `Answer`. The output of an agent program is read by the same rules.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.workflow.resources import Prompt
from agentrl.workflow.trajectory import Rollout

CLOCK = "AGENTRL_CLOCK"
"""The environment variable with the time at which the first attempt at the episode began, in seconds since 1970. It is set if
the run has `agent.frozen_clock`.
"""
MAX_REWARDS = 64
MAX_NAME = 64
MAX_ANSWER = 100_000
REWARD = "agent"
"""The name of a reward that an agent returns as a plain number."""


@dataclass(frozen=True)
class LLM:
    """The address of the agent's model, for any client of the OpenAI or the Anthropic API.

    Args:
        base_url: the base URL, which ends with `/v1`.
        api_key: the key, which is valid only for this episode.
        model: the name of the model.
    """

    base_url: str
    api_key: str
    model: str

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables with which SDKs, Codex and Claude Code find the model.

        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC stops requests of Claude Code that are not part of the task, such as the
        request for a title.
        """
        return {
            **{"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model},
            **{"ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": self.api_key},
            **{"ANTHROPIC_MODEL": self.model, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        }


@dataclass(frozen=True)
class AgentTask:
    """A task as an agent receives it.

    Args:
        key: the task's name in its dataset.
        messages: the messages with role and content, in the format of the chat API.
        metadata: the task's metadata.
        reference: the reference answer; None unless the run passes it to its agent.
        training: True if the episode trains the model, False if it measures the model.
        resources: the run's texts by name; `text.format(name=...)` replaces their placeholders.
    """

    key: str
    messages: list[dict[str, Any]]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    reference: str | None = None
    training: bool = True
    resources: Mapping[str, Prompt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "resources", {name: Prompt(text) for name, text in self.resources.items()})

    @property
    def input(self) -> str:
        """The question: the text of the last message."""
        return str(self.messages[-1]["content"]) if self.messages else ""


@dataclass(frozen=True)
class Answer:
    """The result that an agent may return: its answer, and rewards for its own episode."""

    text: str = ""
    rewards: Mapping[str, float] | float | None = None


@dataclass(frozen=True)
class AgentResult:
    """The validated result of an agent: its answer, and its rewards by name. If the answer is None, the model's last turn is
    the answer.
    """

    answer: str | None = None
    rewards: Mapping[str, float] | None = None


def freeze_clock() -> None:
    """Stop the clock of this process at the time in the environment variable AGENTRL_CLOCK. Do nothing if it is not set.

    The date and time of Python stand still: `time.time`, `time.time_ns`, `time.localtime`, `time.gmtime`, `time.strftime`, and
    the present time of `datetime` and `date`. Clocks that measure durations go on (`time.monotonic`, `time.perf_counter`), and
    so do sleeps, time limits, other programs and the times of files.
    """
    if moment := os.environ.get(CLOCK):
        import time_machine  # only if needed: it changes functions of the interpreter

        time_machine.travel(float(moment), tick=False).start()


def read_result(value: Any) -> AgentResult:
    """Validate the value that an agent returned.

    Raises:
        TypeError, ValueError: the value is not a valid result; the message says which values are valid.
    """
    if isinstance(value, str):
        value = {"text": value}
    elif isinstance(value, Answer):
        value = {"text": value.text, "rewards": value.rewards}
    elif isinstance(value, Rollout):
        value = {"text": value.output, "rewards": value.reward}
    elif (isinstance(value, Mapping) and value.keys() - {"text", "rewards"}) or not isinstance(value, Mapping):
        value = {"rewards": value}
    return AgentResult(_text(value.get("text") or None), _rewards(value.get("rewards")))


def _text(text: Any) -> str | None:
    if text is not None and not isinstance(text, str):
        raise TypeError(f"the text of an answer must be a string, not {type(text).__name__}")
    return None if text is None else text[:MAX_ANSWER].encode("utf-8", "replace").decode()


def _rewards(rewards: Any) -> dict[str, float] | None:
    if rewards is None:
        return None
    by_name = rewards if isinstance(rewards, Mapping) else {REWARD: rewards}
    if len(by_name) > MAX_REWARDS:
        raise ValueError(f"an agent may return at most {MAX_REWARDS} rewards, not {len(by_name)}")
    return {
        _name(name): _number(value, f"rewards.{name}" if isinstance(rewards, Mapping) else "")
        for name, value in by_name.items()
    }


def _name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"the name of a reward must be a string of at most {MAX_NAME} characters")
    return name.encode("utf-8", "replace").decode()


def _number(value: Any, field: str) -> float:
    """Return a reward as a number. `field` is its name in the result; empty if the result is the reward."""
    item = getattr(value, "item", None)  # of numpy and torch
    value = item() if callable(item) and not isinstance(value, int | float) else value
    if not isinstance(value, int | float):
        if field:
            raise TypeError(f"{field} must be a number, not {type(value).__name__:.100}")
        raise TypeError(
            f"an agent must return None, a string, a number, a dict of numbers or an Answer, not {type(value).__name__:.100}"
        )
    if not math.isfinite(value):
        raise ValueError("a reward must be a finite number")
    return float(value)
