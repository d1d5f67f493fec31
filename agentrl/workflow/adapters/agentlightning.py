"""Spans of agent-lightning 0.3 and of OpenLLMetry, which it uses: `gen_ai.prompt.0.content` and similar attributes."""

import re
from collections.abc import Mapping
from typing import Any

from agentrl.workflow.adapters import (
    MAX_MESSAGES,
    Adapter,
    SpanMessage,
    Turn,
    make_call,
    make_message,
    make_schema,
    make_turn,
    parsed,
)
from agentrl.workflow.spans import Span, span_names
from agentrl.workflow.spans.span_names import COMPLETION, FUNCTIONS, PROMPT

_NUMBERED, _CALL = re.compile(span_names.NUMBERED), re.compile(span_names.NUMBERED_CALL)


def _turn(span: Span) -> Turn | None:
    fields: dict[str, dict[int, dict[str, Any]]] = {PROMPT: {}, COMPLETION: {}, FUNCTIONS: {}}
    for key, value in span.attributes.items():
        if match := _NUMBERED.fullmatch(key):
            fields[match[1]].setdefault(int(match[2]), {})[match[3]] = value
    if not fields[PROMPT] or not fields[COMPLETION]:
        return None
    if len(fields[PROMPT]) > MAX_MESSAGES:
        raise ValueError(f"a turn may have at most {MAX_MESSAGES} messages before it")
    completion = fields[COMPLETION].get(0)
    if completion is None:
        raise ValueError(f"{COMPLETION}.0 is missing")
    tools = [
        make_schema(entry.get("name"), entry.get("description"), entry.get("parameters"))
        for _, entry in _sorted(fields[FUNCTIONS])
    ]
    messages = [_span_message(entry) for _, entry in _sorted(fields[PROMPT])]
    answer = _span_message({"role": "assistant", **completion}).message
    return make_turn(span, messages, answer, tools, str(completion.get("finish_reason", "stop")))


def _sorted(entries: Mapping[int, dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return sorted(entries.items())


def _span_message(entry: Mapping[str, Any]) -> SpanMessage:
    calls: dict[int, dict[str, Any]] = {}
    for key, value in entry.items():
        if match := _CALL.fullmatch(key):
            calls.setdefault(int(match[1]), {})[match[2]] = value
    tool_calls = [make_call(call.get("name"), call.get("arguments")) for _, call in _sorted(calls)]
    thought = entry.get("reasoning_content") or entry.get("reasoning") or ""
    content, name = _content(entry.get("content", "")), str(entry.get("name") or "")
    message = make_message(entry.get("role"), content, tool_calls, str(thought), name)
    ids = tuple(str(call.get("id") or "") for _, call in _sorted(calls))
    return SpanMessage(message, ids, str(entry.get("tool_call_id") or ""))


def _content(value: Any) -> str:
    parts = parsed(value) if isinstance(value, str) and value.startswith("[{") else value
    if isinstance(parts, list) and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return "" if value is None else str(value)


agentlightning = Adapter("agentlightning", _turn)
