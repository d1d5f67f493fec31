"""chat_requests: what a client's request asks for; whatever is wrong with it is told in the API's shape."""

import json
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.workflow.dialects import Ask, RequestError
from agentrl.workflow.dialects.chat_completions import error_body, read
from agentrl.workflow.trajectory import Message, ToolCall

HELLO = {"role": "user", "content": "Hello"}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}

FIRST = "messages[0].tool_calls[0].function"


def asked(**fields: Any) -> Ask:
    return read(json.dumps({"model": "m", "messages": [HELLO]} | fields).encode())


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 500
    json.dumps(error_body(caught.value), ensure_ascii=False).encode()
    return caught.value


def call(name: str, arguments: str, of: str) -> dict[str, Any]:
    return {"id": of, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_request_plain_asks_for_one_turn() -> None:
    assert asked() == Ask((Message("user", "Hello"),), "m")


def test_request_reads_every_supported_field() -> None:
    found = asked(
        tools=[ADD], tool_choice="auto", parallel_tool_calls=True, n=3, stop="END", max_tokens=9, max_completion_tokens=7,
        temperature=0.3, top_p=0.9, top_k=5, min_p=0.1, seed=4, logprobs=True, top_logprobs=2, return_token_ids=True,
        stream=True, stream_options={"include_usage": True}, chat_template_kwargs={"enable_thinking": False},
        response_format={"type": "text"}, user="me", metadata={"a": "b"}, reasoning_effort="low", presence_penalty=0,
    )  # fmt: skip
    assert found == Ask(
        (Message("user", "Hello"),), "m", (ADD,), {"enable_thinking": False}, 7, ("END",), 3,
        {"temperature": 0.3, "top_p": 0.9, "min_p": 0.1, "top_k": 5, "seed": 4}, True, True, True, 2, True,
    )  # fmt: skip


def test_request_null_means_not_given() -> None:
    nulls = dict.fromkeys(("tools", "n", "stop", "max_tokens", "temperature", "stream", "logit_bias", "seed", "unheard_of"))
    assert asked(**nulls) == asked()


def test_request_orders_tool_results_by_their_calls() -> None:
    said = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        HELLO,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "two at once",
            "refusal": None,
            "annotations": [],
            "tool_calls": [call("add", '{"a": 1}', "x"), call("look", "", "y")],
        },
        {"role": "tool", "tool_call_id": "y", "content": "seen"},
        {"role": "tool", "tool_call_id": "x", "content": "2"},
        HELLO,
    ]
    calls = (ToolCall("add", {"a": 1}), ToolCall("look", {}))
    assert asked(messages=said).messages == (
        Message("system", "Be brief."),
        Message("user", "Hello"),
        Message("assistant", "", "two at once", calls),
        Message("tool", "2", name="add"),
        Message("tool", "seen", name="look"),
        Message("user", "Hello"),
    )


def test_request_reads_reasoning_under_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        said = [HELLO, {"role": "assistant", "content": "Hi", name: "polite"}, HELLO]
        assert asked(messages=said).messages[1] == Message("assistant", "Hi", "polite")


def test_request_offers_no_tools_if_choice_is_none() -> None:
    assert asked(tools=[ADD], tool_choice="none").tools == ()


def test_request_reads_what_it_requires_of_the_turn() -> None:
    strict = {"type": "function", "function": ADD["function"] | {"strict": True}}
    found = asked(tools=[strict])
    assert (found.tools, found.constraint.stored) == ((ADD,), {"strict": ("add",)})
    named = {"type": "function", "function": {"name": "add"}}
    assert asked(tools=[strict], tool_choice=named).constraint.stored == {"tool": "add"}
    any_one = asked(tools=[ADD], tool_choice="required", parallel_tool_calls=False).constraint
    assert any_one.stored == {"tool": "*", "one_call": True}
    assert any_one.field_names == ("tool_choice", "parallel_tool_calls")
    assert asked(response_format={"type": "json_object"}).constraint.schema == "{}"
    schema = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "integer"}}}
    assert asked(response_format=schema).constraint.schema == '{"type":"integer"}'
    for nothing in ({"response_format": {"type": "text"}}, {"parallel_tool_calls": False}, {"tool_choice": "none"}):
        assert not asked(**nothing).constraint


def test_request_names_penalties_as_not_applied() -> None:
    assert asked(presence_penalty=1, logit_bias={"5": 1}, frequency_penalty=0).not_applied == ("presence_penalty", "logit_bias")


@pytest.mark.parametrize("left_out", [{"parameters"}, {"description"}, {"parameters", "description"}], ids=sorted)
def test_request_fills_optional_fields_of_function(left_out: set[str]) -> None:
    whole = {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}
    bare = {name: value for name, value in whole.items() if name not in left_out}
    for function in (
        bare,
        bare | dict.fromkeys(left_out),
        bare | {"parameters": {}},
        bare | {"parameters": {"type": "object"}},
    ):
        (tool,) = asked(tools=[{"type": "function", "function": function}]).tools
        assert tool["function"] == whole


def test_template_renders_a_function_that_has_only_a_name() -> None:
    source = (
        "{% for tool in tools %}{% set f = tool.function %}{{ '// ' + f.description }} {{ f.name }}: {{ f.parameters.type }}"
        "{% for name, value in f.parameters.properties.items() %}{{ name }}{% endfor %}{% endfor %}"
    )
    tools = asked(tools=[{"type": "function", "function": {"name": "now"}}]).tools
    assert ImmutableSandboxedEnvironment().from_string(source).render(tools=tools) == "//  now: object"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [HELLO, {"role": "tool", "content": "4", "tool_call_id": "none"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "function", "name": "f", "content": "4"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("f", "[1]", "x")]}]}, f"{FIRST}.arguments"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("f", '{"a":', "x")]}]}, f"{FIRST}.arguments"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("", "{}", "x")]}]}, f"{FIRST}.name"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [HELLO] * 10_001}, "messages"),
        ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": True}, "n"), ({"n": 1.5}, "n"), ({"n": "1"}, "n"),
        ({"temperature": 3}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": -1}, "top_p"),
        ({"seed": 2**63}, "seed"), ({"seed": 10**400}, "seed"), ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"), ({"stop": ["x"] * 17}, "stop"), ({"stop": "x" * 257}, "stop"), ({"stop": 4}, "stop"),
        ({"tools": {}}, "tools"), ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 4}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"response_format": {"type": "xml"}}, "response_format.type"), ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 4}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}},
         "response_format.json_schema.schema"),
        ({"top_logprobs": 3}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"), ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"), ({"model": 4}, "model"), ({"model": "m" * 300}, "model"),
    ],
)  # fmt: skip
def test_request_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param in str(error)


def test_request_unknown_field_is_refused_like_openai() -> None:
    assert str(refused(temprature=1)) == "Unrecognized request argument supplied: temprature"
    assert len(str(refused(**{"x" * 10_000: 1}))) < 300


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"4", b"null", b'"x"', b"\xff\xfe\xff", b"{}", b'{"messages": NaN}'),
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"messages": ' + b"[" * 70 + b"]" * 70 + b"}",
    ],
)
def test_request_invalid_body_gets_one_sentence(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read(body)
    assert (caught.value.status, len(str(caught.value)) < 300) == (400, True)


def test_request_of_ten_thousand_messages_is_read() -> None:
    assert len(asked(messages=[HELLO] * 10_000).messages) == 10_000


def test_request_text_unfit_for_database_reads_repeatably() -> None:
    assert asked(messages=[{"role": "user", "content": "a\0b"}]).messages[0].content == "a\ufffdb"


def test_request_with_a_million_numbers_is_checked() -> None:
    schema = {"type": "function", "function": {"name": "add", "parameters": {"enum": [1] * 1_000_000}}}
    assert len(asked(tools=[schema]).tools[0]["function"]["parameters"]["enum"]) == 1_000_000
    assert refused(chat_template_kwargs={f"n{n}": 1 for n in range(300_000)}).param == "chat_template_kwargs"
