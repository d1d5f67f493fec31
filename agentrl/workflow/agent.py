"""Decides what an episode does next (`next_action`). The decision depends only on the episode's recorded steps.

The rollout loop loads the record, calls `next_action`, executes the action, commits the result, and repeats. The loop keeps no
other state, so an episode continues from its committed steps after any crash. Mistakes of the model are also handled here: they
become observations or a `stop_reason`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.config import RolloutConfig
from agentrl.workflow.envs import Env
from agentrl.workflow.tools import Tool
from agentrl.workflow.trajectory import UNCLOSED, UNFINISHED, Episode, Message, Step, StopReason, ToolCall, ToolResult

MAX_ARGUMENT_CHARACTERS = 65536
"""The most characters of a call's arguments. A call with more is not sent, and its result is an error."""


QUESTION = Message("user", "Do not call a tool again. What is the answer?")
"""The message that asks a policy for its answer, before its last turn and after a turn that only repeated calls.

Without it, small models continue to call tools.
"""


@dataclass(frozen=True, slots=True)
class Generate:
    """The action to sample a turn. `messages` are the messages that the policy has not read yet."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class CallTools:
    """The action to run a step's tool calls. All results are recorded together, in the order of the calls."""

    step: Step


@dataclass(frozen=True, slots=True)
class Finish:
    """The action to end the episode."""

    stop_reason: StopReason


Action = Generate | CallTools | Finish


def next_action(episode: Episode, env: Env, limits: RolloutConfig) -> Action:
    """Return the episode's next action. Raise TypeError if the env returned something other than messages with text."""
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
    """Return the messages that the policy reads after the episode's last turn.

    These are the messages of `env.step`. If the last message is a tool result, the message `QUESTION` is added in two cases:
    only one turn is left, or the turn only repeated earlier calls with the same results. If `limits.last_turn` is "plain",
    `QUESTION` is never added.
    """
    messages = env.step(episode)
    if limits.last_turn == "plain" or not messages or not isinstance(messages[-1], Message) or messages[-1].role != "tool":
        return messages
    *before, last = map(_answered_calls, episode.steps)
    is_asked = len(episode.steps) + 1 == limits.max_steps or last <= set[Any]().union(*before)
    return (*messages, QUESTION) if is_asked else messages


def _answered_calls(step: Step) -> set[tuple[str, str, str]]:
    results = zip(step.message.tool_calls, step.results or (), strict=False)
    return {(call.name, repr(call.arguments), result.content) for call, result in results}


def _generate(messages: tuple[Message, ...]) -> Generate:
    if not messages or not all(isinstance(message, Message) and isinstance(message.content, str) for message in messages):
        raise TypeError(f"the env must return messages with text, not {messages!r:.200}")
    return Generate(messages)


def refusal(call: ToolCall, index: int, tools: Mapping[str, Tool], limits: RolloutConfig) -> ToolResult | None:
    """Return the error result for a call that must not run; None if the call may run."""
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
