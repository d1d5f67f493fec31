"""Adapters. Each file of this folder reads model turns from spans of one convention. See `Adapter`.

Spans come from other systems and are not trusted. This module checks the sizes of texts, calls and tokens for all conventions.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from agentrl.workflow.annotations import MAX_DEPTH, is_deep
from agentrl.workflow.call_json import read_arguments
from agentrl.workflow.spans import Span, span_names
from agentrl.workflow.tool_formats import Schema
from agentrl.workflow.trajectory import FinishReason, Message, Role, ToolCall

ROLES: Mapping[str, Role] = {**{role: role for role in get_args(Role)}, "developer": "system", "model": "assistant"}
MAX_TEXT = 4_000_000
"""The most characters of all messages of a turn. Conversations that a model can read are shorter."""
MAX_MESSAGES = 10_000
MAX_TOKENS = 1_000_000
MAX_ID = 2**31 - 1
LOWEST_LOGPROB = -1e30
"""The lowest logprob that is accepted. Logprobs are stored as float32."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A model turn that was read from a span.

    Args:
        messages: the messages of the turn's request, with the complete history.
        said: the model's message.
        tools: the offered tools, in the format of chat APIs.
        finish_reason: the reason why the turn ended.
        prompt_ids, sampled_ids: the exact tokens; empty if the span has none.
        logprobs: the natural logprobs of the sampled tokens; empty if the span has none.
        answers: for each tool result after the model's last message, the index of its call, counted from 0; -1 if it has no
            call. Empty: the results are in the order of the calls.
    """

    messages: tuple[Message, ...]
    said: Message
    tools: tuple[Schema, ...] = ()
    finish_reason: FinishReason = "stop"
    prompt_ids: tuple[int, ...] = ()
    sampled_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    answers: tuple[int, ...] = ()

    @property
    def exact(self) -> bool:
        """True if the token ids and logprobs are known."""
        return bool(self.prompt_ids and self.sampled_ids) and len(self.logprobs) == len(self.sampled_ids)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A plug-in that reads model turns from spans. Each adapter reads one convention of attribute names.

    Args:
        name: the name of the adapter's file.
        turn: a function that returns the turn of a span, or None if the span is not a model turn. It raises ValueError if the
            turn is invalid.
    """

    name: str
    turn: Callable[[Span], Turn | None]


@dataclass(frozen=True, slots=True)
class SpanMessage:
    """A message that was read from a span.

    Args:
        message: the message.
        calls: the id of each of its calls; an empty text for a call without an id.
        answers: the id of the call to which a tool result belongs; empty if the span does not name the call.
    """

    message: Message
    calls: tuple[str, ...] = ()
    answers: str = ""


def make_turn(
    span: Span, messages: Sequence[SpanMessage], reply: Message, tools: Sequence[Schema] = (), finish_reason: str = "stop"
) -> Turn:
    """Build a turn, and validate the token ids of the span. Raise ValueError if the turn is invalid."""
    history, answers = _answered(messages)
    if not history or len(history) > MAX_MESSAGES:
        raise ValueError(f"a turn must have 1 to {MAX_MESSAGES} messages before it")
    if sum(len(message.content) + len(message.thought) for message in (*history, reply)) > MAX_TEXT:
        raise ValueError(f"the messages of a turn may have at most {MAX_TEXT} characters")
    prompt_ids, sampled_ids = (_ids(span, names) for names in (span_names.PROMPT_IDS, span_names.SAMPLED_IDS))
    ended: FinishReason = "length" if finish_reason in ("length", "max_tokens") else "stop"
    logprobs = _logprobs(span, len(sampled_ids))
    return Turn(history, reply, tuple(tools), ended, prompt_ids, sampled_ids, logprobs, answers)


def make_message(role: Any, content: str, calls: Sequence[ToolCall] = (), thought: str = "", name: str = "") -> Message:
    """Build a message. Raise ValueError if the role is unknown."""
    chat_role = ROLES.get(role) if isinstance(role, str) else None
    if chat_role is None:
        raise ValueError(f"a message's role must be one of {', '.join(ROLES)}, not {str(role)[:40]!r}")
    return Message(
        chat_role, content, thought, tuple(calls) if chat_role == "assistant" else (), name if chat_role == "tool" else ""
    )


def make_call(name: Any, arguments: Any) -> ToolCall:
    """Build a call. If the arguments cannot be parsed, the call has an error."""
    value = parsed(arguments) or {}
    return read_arguments(name if isinstance(name, str) else "", dict(value) if isinstance(value, Mapping) else value)


def make_schema(name: Any, description: Any, parameters: Any) -> Schema:
    """Build the schema of a tool in the format of chat APIs."""
    value = parsed(parameters)
    shape = value if isinstance(value, Mapping) else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": str(name), "description": str(description or ""), "parameters": shape}}


def parsed(value: Any) -> Any:
    """Parse a value that is JSON text; return any other value unchanged. Raise ValueError if the value is nested too deep."""
    if isinstance(value, str) and len(value) <= MAX_TEXT:
        with suppress(ValueError, RecursionError):
            value = _with_whole_characters(json.loads(value), MAX_DEPTH + 1) if "\\u" in value else json.loads(value)
    if is_deep(value, MAX_DEPTH):
        raise ValueError(f"objects and lists nest more than {MAX_DEPTH} levels")
    return value


def _with_whole_characters(value: Any, levels: int) -> Any:
    """Replace unpaired surrogates in the texts of the value, down to `levels` levels."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if not levels:
        return value
    if isinstance(value, dict):
        return {_with_whole_characters(key, 1): _with_whole_characters(item, levels - 1) for key, item in value.items()}
    return [_with_whole_characters(item, levels - 1) for item in value] if isinstance(value, list) else value


def _answered(messages: Sequence[SpanMessage]) -> tuple[tuple[Message, ...], tuple[int, ...]]:
    """Return the messages, and the call numbers of the last tool results."""
    history: list[Message] = []
    calls: tuple[ToolCall, ...] = ()
    places: dict[str, int] = {}
    left, answers = dict[int, None](), list[int]()
    for span_message in messages:
        message = span_message.message
        if message.role == "assistant":
            calls, answers = message.tool_calls, []
            places, left = (
                {name: place for place, name in enumerate(span_message.calls) if name},
                dict.fromkeys(range(len(calls))),
            )
        elif message.role == "tool":
            place = places.get(span_message.answers, -1)
            place = place if place in left else next(iter(left), -1)
            answers.append(place)
            if place >= 0:
                del left[place]
                message = Message("tool", message.content, name=message.name or calls[place].name)
        history.append(message)
    return tuple(history), tuple(answers)


def _ids(span: Span, names: Sequence[str]) -> tuple[int, ...]:
    """Return the token ids under the first of these names that exists."""
    value = next((parsed(span.attributes[name]) for name in names if name in span.attributes), None)
    if isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    if value is None or value == []:
        return ()
    if (
        not isinstance(value, list)
        or len(value) > MAX_TOKENS
        or not all(type(token) is int and 0 <= token <= MAX_ID for token in value)
    ):
        raise ValueError(f"token ids must be a list of at most {MAX_TOKENS} whole numbers, 0 or more")
    return tuple(value)


def _logprobs(span: Span, count: int) -> tuple[float, ...]:
    value = parsed(span.attributes.get(span_names.LOGPROBS))
    if not isinstance(value, list) or not count:
        return ()
    logprobs: list[Any] = [entry.get("logprob") if isinstance(entry, Mapping) else entry for entry in value]
    if len(logprobs) != count:
        return ()
    if not all(type(entry) in (int, float) and LOWEST_LOGPROB <= entry <= 0 for entry in logprobs):
        raise ValueError(f"a token's logprob must be a number from {LOWEST_LOGPROB:g} to 0")
    return tuple(map(float, logprobs))
