"""Spans of OpenTelemetry's GenAI conventions (1.37, in development): `gen_ai.input.messages` and `gen_ai.output.messages` with
their parts.
"""

import json
from collections.abc import Mapping
from typing import Any

from agentrl.workflow.adapters import Adapter, SpanMessage, Turn, make_call, make_message, make_schema, make_turn, parsed
from agentrl.workflow.spans import Span
from agentrl.workflow.spans import span_names as names
from agentrl.workflow.tool_formats import Schema


def _turn(span: Span) -> Turn | None:
    if names.GEN_AI_INPUT not in span.attributes or names.GEN_AI_OUTPUT not in span.attributes:
        return None
    inputs, outputs = (parsed(span.attributes[name]) for name in (names.GEN_AI_INPUT, names.GEN_AI_OUTPUT))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not outputs:
        raise ValueError(f"{names.GEN_AI_INPUT} and {names.GEN_AI_OUTPUT} must be lists of messages")
    system = parsed(span.attributes.get(names.GEN_AI_SYSTEM)) or []
    before = [{"role": "system", "parts": system if isinstance(system, list) else [system]}] if system else []
    messages = [message for item in [*before, *inputs] for message in _messages(item)]
    answers = [item.message for item in _messages(outputs[0])]
    if len(answers) != 1 or answers[0].role != "assistant":
        raise ValueError(f"the first message of {names.GEN_AI_OUTPUT} must be an assistant's message")
    endings = parsed(span.attributes.get(names.GEN_AI_ENDINGS))
    ending = outputs[0].get("finish_reason") or (endings[0] if isinstance(endings, list) and endings else "stop")
    return make_turn(span, messages, answers[0], _tools(span), str(ending))


def _messages(item: Any) -> list[SpanMessage]:
    if not isinstance(item, Mapping):
        raise ValueError("a message must be an object with role and parts")
    parts = item.get("parts", item.get("content", []))
    parts = parts if isinstance(parts, list) else [parts]
    texts, thoughts, calls = list[str](), list[str](), []
    ids, results = list[str](), list[tuple[str, str]]()
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind == "text":
            texts.append(str(part.get("content", part.get("text", "")) if isinstance(part, Mapping) else part))
        elif kind in ("reasoning", "thinking"):
            thoughts.append(str(part.get("content", "")))
        elif kind == "tool_call":
            calls.append(make_call(part.get("name"), part.get("arguments")))
            ids.append(str(part.get("id") or ""))
        elif kind == "tool_call_response":
            came = _text(next((part[name] for name in names.GEN_AI_RESULT if name in part), ""))
            results.append((came, str(part.get("id") or "")))
        else:
            raise ValueError(f"unknown part type {str(kind)[:40]!r}; known: text, reasoning and calls")
    if item.get("role") == "tool" and not results:
        results = [("".join(texts), "")]
    if results:
        return [SpanMessage(make_message("tool", text, name=str(item.get("name") or "")), (), call) for text, call in results]
    return [SpanMessage(make_message(item.get("role"), "\n".join(texts), calls, "\n".join(thoughts)), tuple(ids))]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tools(span: Span) -> list[Schema]:
    value = parsed(span.attributes.get(names.GEN_AI_TOOLS))
    listed = [tool for tool in value if isinstance(tool, Mapping)] if isinstance(value, list) else []
    schemas = [tool["function"] if isinstance(tool.get("function"), Mapping) else tool for tool in listed]
    return [make_schema(tool.get("name"), tool.get("description"), tool.get("parameters")) for tool in schemas]


genai = Adapter("genai", _turn)
