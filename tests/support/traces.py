"""Traces as agent-lightning's proxy and the GenAI conventions write them, of turns that the tests make up."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.spans import Span
from agentrl.workflow.tool_formats import Schema
from agentrl.workflow.tools.calculator import calculator
from agentrl.workflow.trajectory import Message, ToolCall

TOOLS: tuple[Schema, ...] = (calculator.schema,)
ASKED = Message("user", "What is 2 plus 3?")
CALL = Message("assistant", "", tool_calls=(ToolCall("calculator", {"expression": "2+3"}),))
RESULT = Message("tool", "5", name="calculator")
ANSWER = Message("assistant", "5")


def span(number: int, name: str, attributes: Mapping[str, Any], trace: int = 1, **more: Any) -> Span:
    """The span of that number, which begins at that second and lasts half of one."""
    start = 1_700_000_000_000_000_000 + number * 1_000_000_000
    return Span(f"{trace:032x}", f"{number:016x}", name, start=start, end=start + 500_000_000, attributes=attributes, **more)


def flat(history: Sequence[Message], said: Message) -> dict[str, Any]:
    """A turn by numbered attributes."""
    found: dict[str, Any] = {}
    for prefix, told in (("gen_ai.prompt", history), ("gen_ai.completion", [said])):
        for number, message in enumerate(told):
            found |= {f"{prefix}.{number}.role": message.role, f"{prefix}.{number}.content": message.content}
            for place, call in enumerate(message.tool_calls):
                found[f"{prefix}.{number}.tool_calls.{place}.name"] = call.name
                found[f"{prefix}.{number}.tool_calls.{place}.arguments"] = json.dumps(dict(call.arguments))
    function = TOOLS[0]["function"]
    named = {"name": function["name"], "description": function["description"]}
    named |= {"parameters": json.dumps(function["parameters"])}
    return found | {f"llm.request.functions.0.{key}": value for key, value in named.items()}


def parts(history: Sequence[Message], said: Message) -> dict[str, Any]:
    """A turn by the GenAI conventions."""
    ending = {"finish_reason": "stop"}
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps([_parts(message) for message in history]),
        "gen_ai.output.messages": json.dumps([_parts(said) | ending]),
        "gen_ai.tool.definitions": json.dumps(TOOLS),
    }


def _parts(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": message.content}]}
    text = [{"type": "text", "content": message.content}] if message.content else []
    thought = [{"type": "reasoning", "content": message.thought}] if message.thought else []
    calls = [
        {"type": "tool_call", "id": "c", "name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls
    ]
    return {"role": message.role, "parts": [*thought, *text, *calls]}


def tokens(chat: Chat, history: Sequence[Message], said: Message) -> dict[str, Any]:
    """The turn's exact tokens, as attributes; each has a logprob of -0.5."""
    sampled = chat.turn(said, TOOLS)
    told = [{"token": str(each), "logprob": -0.5} for each in sampled]
    prompt = chat.opening(history, TOOLS)
    return {"prompt_token_ids": list(prompt), "response_token_ids": list(sampled), "logprobs.content": json.dumps(told)}


def reward(number: int, value: Any, trace: int = 1, name: str = "right") -> Span:
    """A reward, as agent-lightning emits it."""
    told = {"agentlightning.reward.0.name": name, "agentlightning.reward.0.value": value}
    return span(number, "agentlightning.reward", told, trace)


def rollout(chat: Chat | None, trace: int, earned: float | None = None, asked: Message = ASKED) -> list[Span]:
    """A call, its result, an answer, and a reward; exact where there is a chat."""
    found = []
    for number, (history, said) in enumerate((([asked], CALL), ([asked, CALL, RESULT], ANSWER))):
        exact = tokens(chat, history, said) if chat else {}
        found.append(span(100 * trace + number, "openai.chat.completion", flat(history, said) | exact, trace))
    return found if earned is None else [*found, reward(100 * trace + 50, earned, trace)]


def write(file: Path, spans: Sequence[Span]) -> Path:
    """The spans as OTLP, a line each."""
    file.write_text("".join(json.dumps(document([each])) + "\n" for each in spans))
    return file


def document(spans: Sequence[Span]) -> dict[str, Any]:
    """An export of spans as JSON."""
    made = [
        {
            "traceId": each.trace_id,
            "spanId": each.span_id,
            "parentSpanId": each.parent_id,
            "name": each.name,
            "startTimeUnixNano": str(each.start),
            "endTimeUnixNano": str(each.end),
            "attributes": _attributes(each.attributes),
            "status": {"code": 2, "message": each.error} if each.error is not None else {},
        }
        for each in spans
    ]
    resource = {"attributes": _attributes(spans[0].resource)} if spans else {}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": made}]}]}


def _attributes(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in told.items()]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": value}
