"""A request of any dialect with any value anywhere in it is read, or refused with status 400."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agentrl.workflow.dialects import RecordedResponse, RequestError, chat_completions, completions, messages, responses
from agentrl.workflow.trajectory import Message, ToolCall

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
EARLIER = RecordedResponse(
    (Message("system", "ab"), Message("user", "x"), Message("assistant", "y", "t", (ToolCall("f", {"a": 1}),))),
    (),
    {"instructions": 2},
)
ID = "ab" * 16
BODIES: dict[Any, dict[str, Any]] = {
    chat_completions: {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "7"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tool_choice": "auto",
        "stop": ["a"],
        "logprobs": True,
        "top_logprobs": 1,
    },
    responses: {
        "model": "m",
        "instructions": "s",
        "previous_response_id": f"resp_{ID}",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "t"}],
                "encrypted_content": "dA==",
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
            {"type": "function_call", "call_id": "c", "namespace": "n", "name": "f", "arguments": "{}", "id": "fc_1"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "7"}]},
            {"type": "item_reference", "id": f"fc_{ID}_0"},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
            {"type": "web_search"},
        ],
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "reasoning": {"summary": "auto"},
        "background": False,
    },
    messages: {
        "model": "m",
        "max_tokens": 1,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "thread": {"type": "create"},
        "messages": [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "redacted_thinking", "data": "dA=="},
                    {"type": "text", "text": "y"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "7"}]}],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "w"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "stop_sequences": ["a"],
        "thinking": {"type": "disabled"},
    },
    completions: {
        "model": "m",
        "prompt": [[1, 2]],
        "logprobs": 1,
        "stop": "a",
        "stream_options": {"include_usage": True},
        "echo": False,
    },
}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "\ud800", "\0", "text", "function", "continue", "item_reference", f"rs_{ID}", "x" * 300]),
    st.sampled_from(
        [[], {}, [[]], [{}], {"type": "text"}, {"": None}, [None], {"type": "continue", "previous_message_id": ID}]
    ),
    st.text(max_size=5),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """The value with another one at that place."""
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


@pytest.mark.parametrize("dialect", BODIES, ids=lambda dialect: dialect.__name__.rpartition(".")[2])
def test_valid_body_is_read(dialect: Any) -> None:
    ask = dialect.read(json.dumps(BODIES[dialect]).encode(), {ID: EARLIER}.get)
    assert ask.messages
    assert len(ask.identity) == 64


@pytest.mark.parametrize("dialect", BODIES, ids=lambda dialect: dialect.__name__.rpartition(".")[2])
def test_body_with_any_value_anywhere_is_read_or_refused(dialect: Any) -> None:
    body = BODIES[dialect]

    @hypothesis_settings(max_examples=400)
    @given(st.sampled_from(list(places(body))), VALUES)
    def check(at: tuple[Any, ...], value: Any) -> None:
        refusal = None
        try:
            ask = dialect.read(json.dumps(replaced(body, at, value)).encode(), {ID: EARLIER}.get)
        except RequestError as error:
            refusal = error
        if refusal is not None:
            assert (refusal.status, len(str(refusal)) < 1000) == (400, True)
            assert dialect.error_event(dialect.error_body(refusal))
            return
        for message in ask.messages:
            assert "\0" not in f"{message.content}{message.thought}{message.name}".encode().decode()
        json.dumps([*ask.tools, *ask.not_applied]).encode()

    check()
