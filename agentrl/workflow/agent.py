"""next_action(episode, env): what an episode needs next, decided from its record alone.

The rollout loop is: load the record, ask `next_action`, act, commit, ask again. Since nothing else is remembered, an
episode goes on after any crash from what was committed. The model's mistakes are decided here too: they become observations
or a stop_reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.config import RolloutConfig
from agentrl.workflow.envs import Env
from agentrl.workflow.tools import Tool
from agentrl.workflow.trajectory import UNCLOSED, UNFINISHED, Episode, Message, Step, StopReason, ToolCall, ToolResult

MAX_ARGUMENT_CHARACTERS = 65536
"""The most characters of arguments; longer ones are not sent to a tool, and the model is told."""


QUESTION = Message("user", "Do not call a tool again. What is the answer?")
"""What a policy is asked before its last turn, and after a turn that only repeated calls. Small models go on calling else."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Sample a turn: these messages are new to the policy."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class CallTools:
    """Run the calls of this step, wait for all results and record them in the order of the calls."""

    step: Step


@dataclass(frozen=True, slots=True)
class Finish:
    """The episode is over."""

    stop_reason: StopReason


Action = Generate | CallTools | Finish


def next_action(episode: Episode, env: Env, limits: RolloutConfig) -> Action:
    """Return the action that the episode needs next.

    Raises:
        TypeError: the env returned something other than messages with text; errors of its own code pass through as well.
    """
    if not episode.steps:
        return _generate(env.reset(episode.task))
    step = episode.steps[-1]
    if step.finish_reason == "length":
        return Finish("max_tokens")
    if any(call.error in (UNCLOSED, UNFINISHED) for call in step.message.tool_calls):
        return Finish("parse_error")
    if step.pending:
        return CallTools(step)
    messages = observe(episode, env, limits)
    if len(messages) == 0:  # not `not told`: a `step` that forgot to return has not said that the episode is over
        return Finish("answered")
    if sum(step.seconds + sum(r.seconds for r in step.results or ()) for step in episode.steps) > limits.timeout_seconds:
        return Finish("timeout")
    if len(episode.steps) >= limits.max_steps:
        return Finish("max_steps")
    return _generate(messages)


def observe(episode: Episode, env: Env, limits: RolloutConfig) -> tuple[Message, ...]:
    """Return what the policy reads after the episode's last turn: what the env says, and where `last_turn` says so, a question.

    It is asked for its answer if results are the last that it reads before its last turn, or if all of them are results that it
    has read before, of the same calls.
    """
    messages = env.step(episode)
    if limits.last_turn == "plain" or not messages or not isinstance(messages[-1], Message) or messages[-1].role != "tool":
        return messages
    *before, last = map(_answered_calls, episode.steps)
    is_asked = len(episode.steps) + 1 == limits.max_steps or last <= set[Any]().union(*before)
    return (*messages, QUESTION) if is_asked else messages


def _answered_calls(step: Step) -> set[tuple[str, str, str]]:
    """(tool, arguments, result) for each call of a turn."""
    results = zip(step.message.tool_calls, step.results or (), strict=False)
    return {(call.name, repr(call.arguments), result.content) for call, result in results}


def _generate(messages: tuple[Message, ...]) -> Generate:
    if not messages or not all(isinstance(message, Message) and isinstance(message.content, str) for message in messages):
        raise TypeError(f"the env must give messages with text, not {messages!r:.200}")
    return Generate(messages)


def refusal(call: ToolCall, index: int, tools: Mapping[str, Tool], limits: RolloutConfig) -> ToolResult | None:
    """Return the immediate answer to the model for a call that cannot be sent; None for a call that can."""
    if call.error is not None:
        return ToolResult(call.error, "parse_error")
    if index >= limits.max_tool_calls:
        return ToolResult(f"only {limits.max_tool_calls} calls are accepted in one turn", "too_many_calls")
    if call.name not in tools:
        return ToolResult(f"unknown tool {call.name[:100]!r}; known: {', '.join(sorted(tools)) or 'none'}", "unknown_tool")
    if _size(call.arguments) > MAX_ARGUMENT_CHARACTERS:
        return ToolResult(f"the arguments are longer than {MAX_ARGUMENT_CHARACTERS} characters", "bad_arguments")
    return None


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _size(item) for key, item in value.items())
    if isinstance(value, Sequence):
        return sum(_size(item) for item in value)
    return 8
