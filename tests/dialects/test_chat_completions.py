"""chat_completions: the replies, as the `openai` package reads them; whole or streamed they say the same."""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.dialects import Ask, ReplyHead, RequestError, ResponseTurn
from agentrl.workflow.dialects.chat_completions import StreamEvents, error_body, models, read, whole
from agentrl.workflow.dialects.reply_text import parse_turn
from agentrl.workflow.engines import Completion
from agentrl.workflow.tool_formats import AUTO
from agentrl.workflow.trajectory import Message, ToolCall
from tests.support.chat_families import FAMILIES, family_tokenizer
from tests.support.small_models import tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "é": [2]}}\n</tool_call>'
HOSTILE = (
    "<think>",
    "</think>",
    CALL,
    "<tool_call>",
    "[TOOL_CALLS]",
    "<function=f>",
    "[",
    "f(a=1)",
    "</",
    "{",
    "🙂",
    "漢é",
    " ",
    "\n",
    "\0",
)
PROMPT = tuple(tokenizer().encode("What?"))
HEAD = ReplyHead(PROMPT, "ab" * 16, 1700000000, "fp_1", 2)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "f")]


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(tokenizer())


def asking(**fields: Any) -> Ask:
    return read(json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS} | fields).encode())


def turn_of(chat: Chat, text: str, finish: Any = "stop", top: Any = ()) -> ResponseTurn:
    ids = tuple(chat.tokenizer.encode(text, add_special_tokens=False))
    return turn_of_ids(chat, ids, finish, top)


def turn_of_ids(chat: Chat, ids: Sequence[int], finish: Any = "stop", top: Any = ()) -> ResponseTurn:
    return answering(asking(), chat, ids, finish, top)


def answering(ask: Ask, chat: Chat, ids: Sequence[int], finish: Any = "stop", top: Any = ()) -> ResponseTurn:
    return ResponseTurn(parse_turn(chat, ask, PROMPT, ids), Completion(tuple(ids), (-0.5,) * len(ids), finish, 0.1, top))


def answered(ask: Ask, turns: Sequence[ResponseTurn], chat: Chat) -> ChatCompletion:
    return ChatCompletion.model_validate(whole(ask, turns, HEAD, chat), strict=True)


def streamed(ask: Ask, turns: Sequence[ResponseTurn], chat: Chat) -> bytes:
    events = StreamEvents(ask, HEAD, chat)
    said = [events.begin()]
    for choice, turn in enumerate(turns):
        said += [events.token(choice, token) for token in turn.completion.token_ids]
        said.append(events.end(choice, turn))
    return b"".join([*said, events.close(turns)])


def chunks(stream: bytes) -> list[ChatCompletionChunk]:
    *events, done, nothing = stream.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    return [ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: ")) for event in events]


def told(found: Sequence[ChatCompletionChunk], choice: int = 0) -> dict[str, Any]:
    """What a client adds up of one choice."""
    said: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "calls": [], "finish": None}
    for chunk in found:
        for one in chunk.choices:
            if one.index != choice:
                continue
            said["content"] += one.delta.content or ""
            for name in ("reasoning", "reasoning_content"):
                said[name] += (one.delta.model_extra or {}).get(name) or ""
            said["calls"] += [call.function.model_dump() for call in one.delta.tool_calls or [] if call.function]
            said["finish"] = one.finish_reason or said["finish"]
    return said


def test_reply_of_turn_is_chat_completion(chat: Chat) -> None:
    found = answered(asking(), [turn_of(chat, "Hello!")], chat)
    assert (found.id, found.created, found.model, found.object) == ("chatcmpl-" + "ab" * 16, 1700000000, "m", "chat.completion")
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("Hello!", "stop")
    assert found.usage is not None
    assert found.usage.total_tokens == len(PROMPT) + found.usage.completion_tokens
    assert found.usage.prompt_tokens_details is not None
    assert (found.system_fingerprint, found.usage.prompt_tokens_details.cached_tokens) == ("fp_1", 2)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_the_tokens_of_the_thought(chat: Chat, stream: bool) -> None:
    for text, thought in (("<think>hm</think>Yes", "<think>hm</think>"), ("<think>no end", "<think>no end"), ("Yes", "")):
        ask = asking(stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
        turn = turn_of(chat, text)
        usage = chunks(streamed(ask, [turn], chat))[-1].usage if stream else answered(ask, [turn], chat).usage
        assert usage is not None
        assert usage.completion_tokens_details is not None
        wanted = len(chat.tokenizer.encode(thought, add_special_tokens=False))
        assert usage.completion_tokens_details.reasoning_tokens == wanted


def test_reply_calls_have_ids_that_history_resolves(chat: Chat) -> None:
    turn = turn_of(chat, f"<think>two</think>Both:\n{CALL}\n{CALL}")
    message = answered(asking(), [turn], chat).choices[0].message
    assert message.tool_calls is not None
    assert len({call.id for call in message.tool_calls}) == 2
    assert (message.content, answered(asking(), [turn], chat).choices[0].finish_reason) == ("Both:", "tool_calls")
    again = asking(messages=[{"role": "user", "content": "x"}, message.model_dump()])
    assert again.messages[1] == turn.message


def test_reply_keeps_unreadable_call_as_text(chat: Chat) -> None:
    found = answered(asking(), [turn_of(chat, "<tool_call>\n{bad}\n</tool_call>")], chat).choices[0]
    assert (found.message.tool_calls, found.finish_reason) == (None, "stop")
    assert found.message.content == "<tool_call>\n{bad}\n</tool_call>"


@pytest.mark.parametrize("stream", [False, True])
def test_reply_is_cut_at_stop_text_and_keeps_its_tokens(chat: Chat, stream: bool) -> None:
    ids = chat.tokenizer.encode("one two three", add_special_tokens=False)
    for stop, left in (
        ("two", "one"),
        (["three", "e t"], "on"),
        ("one", ""),
        ("four", "one two three"),
        (["two", "w"], "one t"),
    ):
        ask = asking(stop=stop, stream=stream, return_token_ids=True)
        turn = answering(ask, chat, ids)
        assert turn.message.content == left
        if stream:
            assert told(chunks(streamed(ask, [turn], chat)))["content"] == left
        else:
            choice = whole(ask, [turn], HEAD, chat)["choices"][0]
            assert (choice["message"]["content"], choice["token_ids"], choice["finish_reason"]) == (left, list(ids), "stop")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_reply_has_calls_of_tools_not_offered_as_text(family: str) -> None:
    """In every family's own way of writing calls: with tool_choice none, without tools, and beside other tools."""
    made = Chat(family_tokenizer(family), AUTO)
    calling = Message("assistant", "Look:", tool_calls=(ToolCall("add", {"a": 1}),))
    ids = made.turn(calling, TOOLS)
    offered = answered(asking(), [answering(asking(), made, ids)], made).choices[0]
    assert (offered.finish_reason, len(offered.message.tool_calls or ())) == ("tool_calls", 1)
    others: Any = ({"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"tools": TOOLS[1:]})
    for fields in others:
        ask = asking(**fields)
        turn = answering(ask, made, ids)
        choice = answered(ask, [turn], made).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert "add" in (choice.message.content or "")
        assert told(chunks(streamed(ask, [turn], made)))["content"] == choice.message.content


def test_reply_has_token_ids_and_logprobs_on_request(chat: Chat) -> None:
    ask = asking(logprobs=True, top_logprobs=1, return_token_ids=True)
    plain = turn_of(chat, "Hi")
    turn = turn_of(chat, "Hi", top=(((9, -0.1), (8, -0.2)),) * len(plain.completion.token_ids))
    found = whole(ask, [turn], HEAD, chat)
    assert found["prompt_token_ids"] == list(PROMPT)
    assert found["choices"][0]["token_ids"] == list(turn.completion.token_ids)
    spelled = answered(ask, [turn], chat).choices[0].logprobs
    assert spelled is not None
    assert spelled.content is not None
    assert b"".join(bytes(one.bytes or ()) for one in spelled.content) == b"Hi"
    assert [(len(one.top_logprobs), one.logprob) for one in spelled.content] == [(1, -0.5)] * len(spelled.content)
    assert "prompt_token_ids" not in whole(asking(), [turn], HEAD, chat)


@pytest.mark.parametrize(
    "text",
    ["Hello, world.", f"Look: {CALL}{CALL}", "<think>\nhm\n</think>\n\nYes 🙂 é", "<tool_call>{bad}", "", "  ", "a</think>b"],
)
def test_stream_equals_whole_reply(chat: Chat, text: str) -> None:
    turn = turn_of(chat, text)
    message = whole(asking(), [turn], HEAD, chat)["choices"][0]["message"]
    said = told(chunks(streamed(asking(stream=True), [turn], chat)))
    assert said["content"] == (message["content"] or "")
    assert said["reasoning"] == said["reasoning_content"] == message.get("reasoning", "")
    assert said["calls"] == [call["function"] for call in message.get("tool_calls", [])]
    assert said["finish"] == whole(asking(), [turn], HEAD, chat)["choices"][0]["finish_reason"]


@given(st.lists(st.integers(0, 600), max_size=40), st.lists(st.sampled_from(("e", "th", "er\n", "\ufffd", "1")), max_size=3))
@hypothesis_settings(max_examples=200)
def test_stream_of_any_tokens_equals_the_whole_reply(ids: list[int], stop: list[str]) -> None:
    made = Chat(tokenizer())
    ids = [token % len(made.tokenizer) for token in ids]
    ask = asking(stream=True, stop=stop)
    turn = answering(ask, made, ids)
    said = told(chunks(streamed(ask, [turn], made)))
    assert (said["content"], said["reasoning"]) == (turn.message.content, turn.message.thought)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stream_of_hostile_tokens_equals_reply_in_every_family(family: str) -> None:
    made, drawn = Chat(family_tokenizer(family), AUTO), Random(family)
    halves = [token for token in range(len(made.tokenizer)) if (made.bytes_of(token) or b"a")[0] >= 0x80]
    kinds: list[Callable[[], list[int]]] = [
        lambda: made.tokenizer.encode(drawn.choice(HOSTILE), add_special_tokens=False),
        lambda: [drawn.randrange(len(made.tokenizer))],
        lambda: drawn.choices(halves, k=drawn.choice((1, 2, 3, 50))),
        lambda: [drawn.choice(sorted(made.end_ids))],
    ]
    for _ in range(300):
        ids = [token for _ in range(drawn.randrange(12)) for token in drawn.choice(kinds)()]
        ask = asking(
            stream=True, tools=drawn.choice(([], TOOLS)), stop=drawn.choice(([], ["</think>"], ["f(", "_call>", "漢é"]))
        )
        turn = answering(ask, made, ids)
        said = told(chunks(streamed(ask, [turn], made)))
        assert (said["content"], said["reasoning"]) == (turn.message.content, turn.message.thought), ids


def test_stream_of_same_turn_has_same_bytes(chat: Chat) -> None:
    turns = [turn_of(chat, f"Look: {CALL}"), turn_of(chat, "No.")]
    ask = asking(stream=True, n=2, return_token_ids=True, logprobs=True, stream_options={"include_usage": True})
    assert streamed(ask, turns, chat) == streamed(ask, turns, chat)


def test_stream_has_ids_logprobs_and_usage_in_chunks(chat: Chat) -> None:
    turns = [turn_of(chat, "Hi there"), turn_of(chat, f"{CALL}", "length")]
    ask = asking(stream=True, n=2, return_token_ids=True, logprobs=True, stream_options={"include_usage": True})
    found = chunks(streamed(ask, turns, chat))
    extras = [chunk.model_extra or {} for chunk in found]
    assert [extra.get("prompt_token_ids") for extra in extras] == [list(PROMPT), *[None] * (len(extras) - 1)]
    for number, turn in enumerate(turns):
        mine = [one for chunk in found for one in chunk.choices if one.index == number]
        ids = [token for one in mine for token in (one.model_extra or {}).get("token_ids", [])]
        logprobs = [one for choice in mine if choice.logprobs for one in choice.logprobs.content or []]
        assert (tuple(ids), len(logprobs)) == (turn.completion.token_ids, len(turn.completion.token_ids))
    assert [told(found, number)["finish"] for number in (0, 1)] == ["stop", "length"]
    assert found[-1].choices == []
    assert found[-1].usage is not None
    assert found[-1].usage.completion_tokens == sum(len(turn.completion.token_ids) for turn in turns)
    assert all(chunk.usage is None for chunk in found[:-1])


def test_error_body_has_openai_shape() -> None:
    error = RequestError(400, "Too long.", "context_length_exceeded", "messages")
    assert error_body(error) == {
        "error": {
            "message": "Too long.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
    assert error_body(RequestError(429, "Later."))["error"]["type"] == "rate_limit_error"


def test_models_list_has_openai_shape() -> None:
    assert [Model.model_validate(one).id for one in models("gsm8k-1")["data"]] == ["gsm8k-1"]


def test_reply_omits_empty_thought_and_calls(chat: Chat) -> None:
    message = whole(asking(), [ResponseTurn(Message("assistant", "x"), Completion((), (), "stop", 0.0))], HEAD, chat)
    assert set(message["choices"][0]["message"]) == {"role", "content", "refusal"}
