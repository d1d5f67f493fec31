"""The clients that people have, against our replies: the `openai` package, sync and async, and langchain."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.dialects import Ask, ReplyHead, RequestError, ResponseTurn
from agentrl.workflow.dialects.chat_completions import StreamEvents, error_body, read, whole
from agentrl.workflow.engines import Completion
from tests.support.small_models import tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "é": [2]}}\n</tool_call>'
SAYINGS = {
    "words": "Hello, world. 🙂 é",
    "call": CALL,
    "calls": f"<think>\nhm\n</think>\n\nBoth:\n{CALL}\n{CALL}",
    "unreadable call": "<tool_call>\n{bad}\n</tool_call>",
    "nothing": "",
}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
USER: Any = {"role": "user", "content": "x"}
PROMPT = (5, 6, 7)
HEAD = ReplyHead(PROMPT, "ab" * 16, 1700000000, "fp_1", 2)


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(tokenizer())


class Server(httpx.MockTransport):
    """Answers each request with the same text."""

    def __init__(self, chat: Chat, text: str, finish: Any = "stop") -> None:
        super().__init__(self._answer)
        self.asked: list[Ask] = []
        ids = tuple(chat.tokenizer.encode(text, add_special_tokens=False))
        top = tuple(((token, -0.5), (9, -0.7)) for token in ids)
        self.turn = ResponseTurn(
            chat.parse(ids, [ADD], False, offered_only=True), Completion(ids, (-0.5,) * len(ids), finish, 0.1, top)
        )
        self._chat = chat

    def _answer(self, request: httpx.Request) -> httpx.Response:
        try:
            ask = read(request.content)
        except RequestError as error:
            return httpx.Response(error.status, json=error_body(error))
        self.asked.append(ask)
        turns = [self.turn] * ask.count
        if not ask.stream:
            return httpx.Response(200, json=whole(ask, turns, HEAD, self._chat))
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=b"".join(self._stream(ask, turns)))

    def _stream(self, ask: Ask, turns: list[ResponseTurn]) -> Iterator[bytes]:
        events = StreamEvents(ask, HEAD, self._chat)
        yield events.begin()
        for choice, turn in enumerate(turns):
            for token in turn.completion.token_ids:
                yield events.token(choice, token)
            yield events.end(choice, turn)
        yield events.close(turns)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://here/v1", api_key="k", http_client=httpx.Client(transport=server), max_retries=0)


def async_client_of(server: Server) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=server)
    return openai.AsyncOpenAI(base_url="http://here/v1", api_key="k", http_client=http, max_retries=0)


def langchain_of(server: Server, **options: Any) -> ChatOpenAI:
    made = {"http_client": httpx.Client(transport=server), "http_async_client": httpx.AsyncClient(transport=server)}
    return ChatOpenAI(model="m", base_url="http://here/v1", api_key="k", max_retries=0, **made, **options)


def spelled(message: Any) -> tuple[str, list[tuple[str, Any]]]:
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    return message.content or "", calls


def expected(turn: ResponseTurn) -> tuple[str, list[tuple[str, Any]]]:
    return turn.message.content, [(call.name, dict(call.arguments)) for call in turn.message.tool_calls if call.error is None]


@pytest.mark.parametrize("text", SAYINGS.values(), ids=SAYINGS)
@pytest.mark.parametrize("more", [{}, {"stream": False}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}], ids=repr)
def test_openai_package_reads_whole_turn(chat: Chat, text: str, more: Any) -> None:
    server = Server(chat, text)
    sync = client_of(server).chat.completions.create(model="m", messages=[USER], tools=[ADD], **more)
    later = asyncio.run(async_client_of(server).chat.completions.create(model="m", messages=[USER], tools=[ADD], **more))
    assert sync == later
    assert [spelled(choice.message) for choice in sync.choices] == [expected(server.turn)] * more.get("n", 1)


@pytest.mark.parametrize("text", SAYINGS.values(), ids=SAYINGS)
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}], ids=repr)
def test_openai_stream_helper_adds_up_to_turn(chat: Chat, text: str, more: Any) -> None:
    server = Server(chat, text)
    asked: Any = {"model": "m", "messages": [USER], "tools": [ADD], "stream_options": {"include_usage": True}, **more}
    plain = client_of(server).chat.completions.create(**{**asked, "stream_options": openai.omit})
    with client_of(server).chat.completions.stream(**asked) as stream:
        events = [event.type for event in stream]
        done = stream.get_final_completion()

    async def hear() -> Any:
        async with async_client_of(server).chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_completion()

    assert "chunk" in events
    for found in (done, asyncio.run(hear())):
        assert [spelled(choice.message) for choice in found.choices] == [expected(server.turn)] * more.get("n", 1)
        assert [choice.finish_reason for choice in found.choices] == [choice.finish_reason for choice in plain.choices]
        assert found.usage == plain.usage
        if "logprobs" in more:
            assert [(choice.logprobs and choice.logprobs.content) for choice in found.choices] == [
                (choice.logprobs and choice.logprobs.content) for choice in plain.choices
            ]


def test_openai_stream_helper_raises_for_cut_turn(chat: Chat) -> None:
    asked: Any = {"model": "m", "messages": [USER]}
    with client_of(Server(chat, "Hello", "length")).chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        with pytest.raises(openai.LengthFinishReasonError):  # as with OpenAI's own server
            stream.get_final_completion()
        assert stream.current_completion_snapshot.choices[0].message.content == "Hello"


@pytest.mark.parametrize("text", SAYINGS.values(), ids=SAYINGS)
def test_openai_message_sent_back_is_the_turn(chat: Chat, text: str) -> None:
    server = Server(chat, text)
    client = client_of(server)
    message = client.chat.completions.create(model="m", messages=[USER]).choices[0].message
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls or ()]
    for said in (message, message.model_dump(exclude_none=True), message.model_dump()):
        client.chat.completions.create(model="m", messages=[USER, said, *results, USER])
        assert server.asked[-1].messages[1].tool_calls == tuple(
            call for call in server.turn.message.tool_calls if call.error is None
        )
        assert server.asked[-1].messages[1].content == server.turn.message.content
        assert server.asked[-1].messages[1].thought == server.turn.message.thought


@pytest.mark.parametrize("text", SAYINGS.values(), ids=SAYINGS)
@pytest.mark.parametrize("streams", [False, True])
def test_langchain_reads_turn_and_sends_it_back(chat: Chat, text: str, streams: bool) -> None:
    server = Server(chat, text)
    model = langchain_of(server, stream_usage=True).bind_tools([ADD])
    heard: list[Any] = [*model.stream([HumanMessage("x")])] if streams else [model.invoke([HumanMessage("x")])]
    message: Any = heard[0]
    for chunk in heard[1:]:
        message += chunk
    content, calls = expected(server.turn)
    assert (message.content, [(call["name"], call["args"]) for call in message.tool_calls]) == (content, calls)
    assert message.usage_metadata["total_tokens"] == len(PROMPT) + len(server.turn.completion.token_ids)
    assert isinstance(message, AIMessageChunk if streams else AIMessage)
    model.invoke([HumanMessage("x"), message, *(ToolMessage("3", tool_call_id=call["id"]) for call in message.tool_calls)])
    said = server.asked[-1].messages
    assert (said[1].content, [(call.name, dict(call.arguments)) for call in said[1].tool_calls]) == (content, calls)
    assert [one.content for one in said[2:]] == ["3"] * len(calls)


def test_langchain_reads_async_turns_with_logprobs(chat: Chat) -> None:
    server = Server(chat, "Hello")

    async def hear() -> tuple[Any, str]:
        model = langchain_of(server, logprobs=True, top_logprobs=2)
        return await model.ainvoke("x"), "".join([str(chunk.content) async for chunk in model.astream("x")])

    message, streamed = asyncio.run(hear())
    assert message.content == streamed == "Hello"
    assert len(message.response_metadata["logprobs"]["content"]) == len(server.turn.completion.token_ids)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add"}}]},
        {"role": "assistant", "content": [], "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": ""}}]},
        {"role": "assistant"},
        {"role": "assistant", "content": [{"type": "text", "text": ""}]},
    ],
    ids=repr,
)
def test_request_assistant_message_may_lack_content(chat: Chat, message: Any) -> None:
    server = Server(chat, "Yes")
    results: Any = [{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "3"}]}]
    told = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, message]
    client_of(server).chat.completions.create(model="m", messages=[*told, *results * ("tool_calls" in message)])
    user, assistant, *rest = server.asked[-1].messages
    assert (user.content, assistant.content) == ("ab", "")
    assert [one.content for one in rest] == ["3"] * len(assistant.tool_calls)


def test_openai_error_names_the_field(chat: Chat) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client_of(Server(chat, "x")).chat.completions.create(model="m", messages=[USER], extra_body={"best_of": 3})
    assert (raised.value.param, raised.value.code) == ("best_of", "unsupported_parameter")
