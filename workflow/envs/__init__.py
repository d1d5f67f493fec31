"""Envs: a file here binds tools, rewards and limits into what an agent acts in. See `Env`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from workflow.plugins import find
from workflow.tools import Tool
from workflow.trajectory import Message, Task, ToolCall, ToolResult


@dataclass(frozen=True)
class Env:
    """What an agent acts in. Subclass it (one level) where `reset` or `step` must differ.

    Args:
        system_prompt: first message of every episode; empty for none.
        tools: names of the tools it offers.
        rewards: reward name -> weight; the scalar reward is the weighted sum.
        resumability: after a lost worker, `replay` rebuilds the env from the record, `restart` begins the episode again.
    """

    system_prompt: str = ""
    tools: tuple[str, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    resumability: Literal["replay", "restart"] = "replay"

    def toolset(self) -> dict[str, Tool]:
        """The env's tools by the name the model writes."""
        found = [find("tools", name) for name in self.tools]
        return {tool.name: tool for tool in found}

    def reset(self, task: Task) -> tuple[Message, ...]:
        """The messages that open an episode."""
        system = (Message("system", self.system_prompt),) if self.system_prompt else ()
        return (*system, *task.messages)

    def step(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> tuple[Message, ...]:
        """What the model reads after its calls: one tool message per result, in the order of the calls."""
        return tuple(Message("tool", result.content, name=call.name) for call, result in zip(calls, results, strict=True))
