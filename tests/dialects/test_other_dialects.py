"""The Responses and the Messages API: requests and replies as the official packages write and read them."""

import json
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import anthropic.types
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.dialects import Ask, RecordedResponse, ReplyHead, RequestError, ResponseTurn, messages, responses
from agentrl.workflow.dialects.reply_text import parse_turn
from agentrl.workflow.engines import Completion
from agentrl.workflow.trajectory import Message, ToolCall
from tests.dialects.test_chat_completions import CALL, HOSTILE, PROMPT
from tests.support.small_models import tokenizer

HEAD = ReplyHead(PROMPT, "ab" * 16, 1700000000, "fp_1", 2)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXTS = [
    "Hello.",
    f"Look: {CALL}{CALL}",
    "<think>\nhm\n</think>\n\nYes 🙂 é",
    "<tool_call>{bad}",
    "",
    "<think>only",
    "a</think>b",
    CALL,
]


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(tokenizer())


class Responses:
    """The Responses API."""

    module: ClassVar[Any] = responses

    @staticmethod
    def ask(history: Sequence[Any] = (), **fields: Any) -> Ask:
        tools = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in ("add", "f")]
        body = {"model": "m", "input": [{"role": "user", "content": "x"}, *history], "tools": tools} | fields
        return responses.read(json.dumps(body).encode())

    @staticmethod
    def history(reply: dict[str, Any]) -> list[Any]:
        return [item.to_dict() for item in Response.model_validate(reply).output]

    @staticmethod
    def results(reply: dict[str, Any], texts: Sequence[str]) -> list[Any]:
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        return [
            {"type": "function_call_output", "call_id": call["call_id"], "output": text}
            for call, text in reversed(list(zip(calls, texts, strict=True)))
        ]

    @staticmethod
    def user(text: str) -> Any:
        return {"role": "user", "content": [{"type": "input_text", "text": text}]}

    @staticmethod
    def streamed(stream: bytes) -> dict[str, Any]:
        """The last event's response, after openai's own accumulator has read all events; what it accumulated is the same."""
        state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
        events = [TypeAdapter(ResponseStreamEvent).validate_python(event) for event in sse(stream)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        for event in events:
            state.handle_event(event)
        items = [event["item"] for event in sse(stream) if event["type"] == "response.output_item.done"]
        final = sse(stream)[-1]["response"]
        assert items == final["output"]
        return dict(final)


class Messages:
    """The Messages API."""

    module: ClassVar[Any] = messages

    @staticmethod
    def ask(history: Sequence[Any] = (), **fields: Any) -> Ask:
        tools = [{"name": name, "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}} for name in ("add", "f")]
        body = {
            "model": "m",
            "max_tokens": 32000,
            "messages": [{"role": "user", "content": "x"}, *history],
            "tools": tools,
        } | fields
        return messages.read(json.dumps(body).encode())

    @staticmethod
    def history(reply: dict[str, Any]) -> list[Any]:
        message = anthropic.types.Message.model_validate(reply)
        return [{"role": "assistant", "content": [block.to_dict() for block in message.content]}]

    @staticmethod
    def results(reply: dict[str, Any], texts: Sequence[str]) -> list[Any]:
        calls = [block for block in reply["content"] if block["type"] == "tool_use"]
        blocks = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": text}]}
            for call, text in reversed(list(zip(calls, texts, strict=True)))
        ]
        return [{"role": "user", "content": blocks}]

    @staticmethod
    def user(text: str) -> Any:
        return {"role": "user", "content": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]}

    @staticmethod
    def streamed(stream: bytes) -> dict[str, Any]:
        """What anthropic's own accumulator makes of the events."""
        snapshot: Any = None
        buffers: dict[int, bytes] = {}
        *events, stop = sse(stream)
        assert stop == {"type": "message_stop"}
        adapter: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
        for event in events:
            snapshot = accumulate_event(event=adapter.validate_python(event), current_snapshot=snapshot, json_bufs=buffers)
        return dict(snapshot.to_dict())


DIALECTS: Any = [Responses, Messages]


def sse(stream: bytes) -> list[dict[str, Any]]:
    *events, nothing = stream.split(b"\n\n")
    assert nothing == b""
    parsed = []
    for event in events:
        kind, data = event.split(b"\n")
        parsed.append(json.loads(data.removeprefix(b"data: ")))
        assert kind == b"event: " + parsed[-1]["type"].encode()
    return parsed


def turn_of(chat: Chat, ask: Ask, text: str, finish: Any = "stop") -> ResponseTurn:
    ids = tuple(chat.tokenizer.encode(text, add_special_tokens=False))
    return ResponseTurn(parse_turn(chat, ask, PROMPT, ids), Completion(ids, (-0.5,) * len(ids), finish, 0.1))


def stream_of(dialect: Any, ask: Ask, turn: ResponseTurn, chat: Chat) -> bytes:
    events = dialect.module.stream(ask, HEAD, chat)
    written = [events.begin()]
    written += [events.token(0, token) for token in turn.completion.token_ids]
    written += [events.end(0, turn), events.close([turn])]
    return b"".join(written)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_stream_gives_the_whole_reply(dialect: Any, text: str, chat: Chat) -> None:
    ask = dialect.ask()
    turn = turn_of(chat, ask, text)
    reply = dialect.module.whole(ask, [turn], HEAD, chat)
    streamed = dialect.streamed(stream_of(dialect, ask, turn, chat))
    assert {name: streamed.get(name) for name in reply} == reply


@hypothesis_settings(max_examples=30)
@given(st.lists(st.sampled_from(HOSTILE), max_size=8).map("".join))
def test_stream_of_hostile_text_gives_the_whole_reply(text: str) -> None:
    chat = Chat(tokenizer())
    for dialect in DIALECTS:
        ask = dialect.ask()
        turn = turn_of(chat, ask, text)
        reply = dialect.module.whole(ask, [turn], HEAD, chat)
        streamed = dialect.streamed(stream_of(dialect, ask, turn, chat))
        assert {name: streamed.get(name) for name in reply} == reply


@pytest.mark.parametrize("text", [text for text in TEXTS if text])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_reply_returns_with_the_history_as_the_same_turn(dialect: Any, text: str, chat: Chat) -> None:
    ask = dialect.ask()
    turn = turn_of(chat, ask, text)
    reply = dialect.module.whole(ask, [turn], HEAD, chat)
    calls = [call for call in turn.message.tool_calls if call.error is None]
    after = dialect.results(reply, [f"r{number}" for number in range(len(calls))]) if calls else [dialect.user("and?")]
    again = dialect.ask([*dialect.history(reply), *after])
    assert again.messages[:2] == (
        Message("user", "x"),
        Message("assistant", turn.message.content, turn.message.thought, tuple(calls)),
    )
    wanted = [Message("tool", f"r{number}", name=call.name) for number, call in enumerate(calls)] or [Message("user", "and?")]
    assert list(again.messages[2:]) == wanted


@pytest.mark.parametrize("dialect", DIALECTS)
def test_reply_says_why_the_turn_ended(dialect: Any, chat: Chat) -> None:
    ask = dialect.ask()
    cut = dialect.module.whole(ask, [turn_of(chat, ask, "Hel", "length")], HEAD, chat)
    called = dialect.module.whole(ask, [turn_of(chat, ask, CALL)], HEAD, chat)
    if dialect is Messages:
        assert (cut["stop_reason"], called["stop_reason"]) == ("max_tokens", "tool_use")
        stopping = dialect.ask(stop_sequences=["two", "three"])
        ended = messages.whole(stopping, [turn_of(chat, stopping, "one two")], HEAD, chat)
        assert (ended["stop_reason"], ended["stop_sequence"], ended["content"][0]["text"]) == ("stop_sequence", "two", "one")
    else:
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (called["status"], called["incomplete_details"]) == ("completed", None)


def test_responses_offer_namespaces_and_name_hosted_tools(chat: Chat) -> None:
    tools = [
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}]},
        {"type": "web_search", "external_web_access": True},
    ]
    ask = Responses.ask(
        tools=tools, parallel_tool_calls=True, store=False, reasoning={"effort": "low"}, client_metadata={"a": 1}
    )
    assert [tool["function"]["name"] for tool in ask.tools] == ["agents__add"]
    assert ask.not_applied == ("tools[web_search]", "reasoning")
    turn = turn_of(chat, ask, CALL.replace('"add"', '"agents__add"'))
    (call,) = responses.whole(ask, [turn], HEAD, chat)["output"]
    assert (call["namespace"], call["name"]) == ("agents", "add")
    again = Responses.ask([call], tools=tools)
    assert again.messages[1].tool_calls[0].name == "agents__add"


def test_responses_repeat_fields_of_the_request(chat: Chat) -> None:
    fields = {"metadata": {"k": "v"}, "parallel_tool_calls": False, "tool_choice": "required", "max_output_tokens": 7}
    ask = Responses.ask(**fields)
    turn = turn_of(chat, ask, "Hello.")
    reply = responses.whole(ask, [turn], HEAD, chat)
    assert {name: reply[name] for name in fields} == fields
    assert [(tool["name"], tool["parameters"]) for tool in reply["tools"]] == [("add", SCHEMA), ("f", SCHEMA)]
    assert sse(responses.stream(ask, HEAD, chat).begin())[0]["response"]["metadata"] == {"k": "v"}
    Response.model_validate(reply)
    large = responses.whole(Responses.ask(metadata={"k": "v" * 70_000}, tools=[]), [turn], HEAD, chat)
    assert (large["metadata"], large["tools"], large["tool_choice"]) == ({}, [], "auto")
    assert (large["parallel_tool_calls"], large["max_output_tokens"]) == (True, None)


def test_responses_repeat_no_hosted_tool(chat: Chat) -> None:
    """Its headers may contain credentials."""
    hosted = {"type": "mcp", "server_label": "s", "server_url": "https://s", "headers": {"authorization": "Bearer SECRET"}}
    function = {"type": "function", "name": "f", "parameters": SCHEMA}
    ask = Responses.ask(tools=[hosted, function])
    reply = responses.whole(ask, [turn_of(chat, ask, "Hello.")], HEAD, chat)
    assert [tool["name"] for tool in reply["tools"]] == ["f"]
    assert "SECRET" not in json.dumps(reply)


def test_responses_read_encrypted_thought(chat: Chat) -> None:
    ask = Responses.ask(include=["reasoning.encrypted_content"])
    reply = responses.whole(ask, [turn_of(chat, ask, "<think>hm</think>Yes")], HEAD, chat)
    item = Responses.history(reply)[0] | {"content": None}
    assert Responses.ask([item, *Responses.history(reply)[1:]]).messages[1] == Message("assistant", "Yes", "hm")


def recorded(chat: Chat, text: str, *before: Message, **kept: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """A response whose turn is the text, and the function that finds it by its id."""
    ask = Responses.ask()
    turn = turn_of(chat, ask, text)
    response = RecordedResponse((*before, Message("user", "x"), turn.message), (), kept)
    return responses.whole(ask, [turn], HEAD, chat), {HEAD.request_id: response}.get


def read_responses(find: Callable[[str], Any], **fields: Any) -> Ask:
    return responses.read(json.dumps({"model": "m", **fields}).encode(), find)


def test_responses_continue_previous_response_by_its_id(chat: Chat) -> None:
    reply, find = recorded(chat, f"{CALL}{CALL}")
    ask = read_responses(find, input=Responses.results(reply, ["r0", "r1"]), previous_response_id=reply["id"])
    before = find(HEAD.request_id).messages
    assert ask.previous == HEAD.request_id
    assert ask.messages == (*before, Message("tool", "r0", name="add"), Message("tool", "r1", name="add"))
    with pytest.raises(RequestError, match="call_id: no earlier function_call has this id"):
        Responses.ask(input=Responses.results(reply, ["r0", "r1"]))
    with pytest.raises(RequestError, match="this API key has no response with this id") as error:
        Responses.ask(previous_response_id=reply["id"])
    assert (error.value.status, error.value.code) == (400, "previous_response_not_found")


def test_responses_replace_instructions_of_previous_response(chat: Chat) -> None:
    first = Responses.ask(instructions="Be brief.", input=[{"role": "developer", "content": "Use tools."}, Responses.user("x")])
    assert first.messages[0] == Message("system", "Be brief.\n\nUse tools.")
    assert first.kept == {"instructions": 9}
    reply, find = recorded(chat, "Hello.", first.messages[0], **first.kept)
    asked = {"input": "and?", "previous_response_id": reply["id"]}
    for more, system in (({}, "Use tools."), ({"instructions": "Be long."}, "Be long.\n\nUse tools.")):
        ask = read_responses(find, **asked, **more)
        assert ask.messages[0] == Message("system", system)
        assert [message.role for message in ask.messages] == ["system", "user", "assistant", "user"]


def test_responses_read_items_by_reference(chat: Chat) -> None:
    reply, find = recorded(chat, f"<think>hm</think>Look: {CALL}{CALL}")
    items = [{"type": "item_reference", "id": item["id"]} for item in reply["output"]]
    ask = read_responses(find, input=[Responses.user("x"), *items, *Responses.results(reply, ["r0", "r1"])])
    turn = find(HEAD.request_id).messages[-1]
    assert ask.messages[1:] == (turn, Message("tool", "r0", name="add"), Message("tool", "r1", name="add"))
    for name in ("fc_" + HEAD.request_id + "_7", "msg_" + "0" * 32, "rs_1", ""):
        with pytest.raises(RequestError, match=r"input\[0\].id: this API key has no item with this id"):
            read_responses(find, input=[{"type": "item_reference", "id": name}])


@pytest.mark.parametrize(("name", "again"), [("msg_{}", "msg_{}"), ("msg_{}", "msg_{}_1"), ("fc_{}_1", "fc_{}_01")])
def test_responses_refuse_item_that_is_referenced_twice(chat: Chat, name: str, again: str) -> None:
    """Otherwise a request of a few bytes per item would be rendered as a prompt of gigabytes."""
    _, find = recorded(chat, f"Look: {CALL}{CALL}")
    items = [{"type": "item_reference", "id": one.format(HEAD.request_id)} for one in (name, again)]
    with pytest.raises(RequestError, match=r"input\[1\].id: the input has this item twice"):
        read_responses(find, input=items)


def test_later_system_messages_become_user_messages() -> None:
    ask = Responses.ask([{"role": "developer", "content": "now"}])
    assert ask.messages == (Message("user", "x"), Message("user", "now"))
    assert Messages.ask([{"role": "system", "content": "now"}]).messages == ask.messages


def test_messages_ignore_where_the_cache_ends(chat: Chat) -> None:
    system = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]
    ask = Messages.ask(
        [], system=system, thinking={"type": "enabled", "budget_tokens": 31999}, context_management={"edits": []}
    )
    assert ask.messages[0] == Message("system", "one\n\ntwo")
    assert ask.not_applied == ("thinking", "context_management")
    assert Messages.ask([Messages.user("y")]).messages == Messages.ask([{"role": "user", "content": "y"}]).messages


def test_messages_leave_out_the_billing_header() -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=12;"}, {"type": "text", "text": "one"}]
    assert Messages.ask(system=system).messages[0] == Message("system", "one")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_identity_ignores_only_stream(dialect: Any) -> None:
    first, second, other = (dialect.ask(**more).identity for more in ({"stream": True}, {}, {"top_p": 0.5}))
    assert first == second != other


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: Responses.ask(input="x", tools=[{"type": "function"}]), r"tools\[0\].name: it is missing"),
    (
        lambda: Responses.ask(
            tools=[{"type": "namespace", "name": "n" * 64, "tools": [{"type": "function", "name": "f" * 63}]}]
        ),
        r"tools\[0\].tools\[0\].name: a tool's name has 129 characters, at most 128 are accepted",
    ),
    (lambda: Responses.ask(input="a\ud800"), "^input: it contains an unpaired surrogate"),
    (lambda: Responses.ask(input=[]), "input: at least one item is needed"),
    (lambda: Responses.ask(input=[{"type": "computer_call"}]), r"input\[0\].type: 'computer_call' is not supported"),
    (
        lambda: Responses.ask(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        r"input\[0\].content\[0\].type: 'input_image' is not supported: the policy reads only text",
    ),
    (lambda: Responses.ask(conversation="conv_1"), "conversation: it is not supported; send the input itself"),
    (lambda: Responses.ask(background=True), "background: it is not supported"),
    (lambda: Responses.ask([{"type": "reasoning", "encrypted_content": "?"}]), "no response of this server contained it"),
    (
        lambda: Messages.ask([{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        r"messages\[1\].content\[0\].type",
    ),
    (
        lambda: Messages.ask(
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_x", "content": "7"}]}]
        ),
        r"messages\[1\].content\[0\].tool_use_id: no earlier assistant message has a call with this id",
    ),
    (lambda: Messages.ask([{"role": "tool", "content": "x"}]), r"messages\[1\].role"),
    (lambda: messages.read(b'{"messages": []}'), "messages: at least one message is needed"),
]


@pytest.mark.parametrize(("ask", "said"), BAD)
def test_bad_request_names_its_field(ask: Callable[[], Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as error:
        ask()
    assert error.value.status == 400


def test_errors_have_shape_of_their_api() -> None:
    error = RequestError(429, "Too many.", code="rate")
    assert messages.error_body(error) == {"type": "error", "error": {"type": "rate_limit_error", "message": "Too many."}}
    assert responses.error_body(error)["error"]["code"] == "rate"
    for status, kind in (
        (401, "authentication_error"),
        (409, "invalid_request_error"),
        (500, "api_error"),
        (421, "invalid_request_error"),
    ):
        assert messages.error_body(RequestError(status, "x"))["error"]["type"] == kind
    (event,) = sse(messages.error_event(messages.error_body(error)))
    assert event == messages.error_body(error)
    (event,) = sse(responses.error_event(responses.error_body(error)))
    assert (event["type"], event["code"], event["error"]["message"]) == ("error", "rate", "Too many.")


def test_tool_results_that_failed_say_so() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
    failed = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such file", "is_error": True}
    ask = Messages.ask(
        [{"role": "assistant", "content": [call]}, {"role": "user", "content": [failed, {"type": "text", "text": "Go on."}]}]
    )
    assert ask.messages[1:] == (
        Message("assistant", "", tool_calls=(ToolCall("add", {"a": 1}),)),
        Message("tool", "Error: no such file", name="add"),
        Message("user", "Go on."),
    )
