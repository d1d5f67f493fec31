"""Spans of agent-lightning 0.3 and of OpenLLMetry, which it uses: `gen_ai.prompt.0.content` and similar."""

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
    found: dict[str, dict[int, dict[str, Any]]] = {PROMPT: {}, COMPLETION: {}, FUNCTIONS: {}}
    for key, value in span.attributes.items():
        if named := _NUMBERED.fullmatch(key):
            found[named[1]].setdefault(int(named[2]), {})[named[3]] = value
    if not found[PROMPT] or not found[COMPLETION]:
        return None
    if len(found[PROMPT]) > MAX_MESSAGES:
        raise ValueError(f"a turn has at most {MAX_MESSAGES} messages before it")
    said = found[COMPLETION].get(0)
    if said is None:
        raise ValueError(f"{COMPLETION}.0 is missing")
    tools = [
        make_schema(each.get("name"), each.get("description"), each.get("parameters")) for _, each in _sorted(found[FUNCTIONS])
    ]
    messages = [_told(each) for _, each in _sorted(found[PROMPT])]
    answer = _told({"role": "assistant", **said}).message
    return make_turn(span, messages, answer, tools, str(said.get("finish_reason", "stop")))


def _sorted(found: Mapping[int, dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return sorted(found.items())


def _told(told: Mapping[str, Any]) -> SpanMessage:
    calls: dict[int, dict[str, Any]] = {}
    for key, value in told.items():
        if named := _CALL.fullmatch(key):
            calls.setdefault(int(named[1]), {})[named[2]] = value
    made = [make_call(call.get("name"), call.get("arguments")) for _, call in _sorted(calls)]
    thought = told.get("reasoning_content") or told.get("reasoning") or ""
    content, name = _content(told.get("content", "")), str(told.get("name") or "")
    message = make_message(told.get("role"), content, made, str(thought), name)
    ids = tuple(str(call.get("id") or "") for _, call in _sorted(calls))
    return SpanMessage(message, ids, str(told.get("tool_call_id") or ""))


def _content(value: Any) -> str:
    """The text of a message, which may be written as a list of parts."""
    parts = parsed(value) if isinstance(value, str) and value.startswith("[{") else value
    if isinstance(parts, list) and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return "" if value is None else str(value)


agentlightning = Adapter("agentlightning", _turn)
