"""The official clients of each dialect behind one interface, so that one test runs with all of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import anthropic
import openai

SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALCULATOR = ("calculator", "Computes.", SCHEMA)
Tool = tuple[str, str, Mapping[str, Any]]


@dataclass(frozen=True)
class ClientTurn:
    """What a client read: the text, the calls as (id, name, arguments), and the items that go back with the history."""

    text: str
    calls: Sequence[tuple[str, str, Any]]
    items: Sequence[Any]


class DialectClient(Protocol):
    """One dialect, spoken by its official client."""

    path: ClassVar[str]
    streams_end: ClassVar[bytes]
    "The last bytes of a complete stream."

    def body(self, history: Sequence[Any], tools: Sequence[Tool] = (), **more: Any) -> dict[str, Any]:
        """The body of a request, as the client writes it."""

    def ask(self, url: str, key: str, history: Sequence[Any], stream: bool = False, **more: Any) -> ClientTurn:
        """The turn, as the client reads it."""

    def user(self, text: str) -> Any:
        """A user's message."""

    def results(self, calls: Sequence[Any], texts: Sequence[str]) -> list[Any]:
        """The results of calls."""

    def text_of(self, document: Any) -> str:
        """The text of a complete response."""

    def error_of(self, document: Any) -> str:
        """The message of an error, whose shape is checked."""


@contextmanager
def openai_client(url: str, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        yield client


@contextmanager
def anthropic_client(url: str, key: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client


def _openai_error(document: Any) -> str:
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    return str(document["error"]["message"])


class ChatDialect:
    """Chat completions."""

    path = "/v1/chat/completions"
    streams_end = b"data: [DONE]\n\n"

    def body(self, history: Sequence[Any], tools: Sequence[Tool] = (), **more: Any) -> dict[str, Any]:
        offered = [
            {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
            for name, text, schema in tools
        ]
        return {"model": "m", "messages": list(history), **({"tools": offered} if tools else {}), **more}

    def ask(self, url: str, key: str, history: Sequence[Any], stream: bool = False, **more: Any) -> ClientTurn:
        with openai_client(url, key) as client:
            body = self.body(history, **more)
            if stream:
                with client.chat.completions.stream(**body) as events:
                    said: Any = events.get_final_completion().choices[0].message
            else:
                said = client.chat.completions.create(**body).choices[0].message
        calls = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in said.tool_calls or ()]
        kept = said.model_dump(exclude_none=True, exclude={"parsed": True, "tool_calls": {"__all__": {"index": True}}})
        return ClientTurn(said.content or "", calls, [kept])

    def user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def results(self, calls: Sequence[Any], texts: Sequence[str]) -> list[Any]:
        return [
            {"role": "tool", "tool_call_id": call[0], "content": text}
            for call, text in reversed(list(zip(calls, texts, strict=True)))
        ]

    def text_of(self, document: Any) -> str:
        return str(document["choices"][0]["message"]["content"])

    def error_of(self, document: Any) -> str:
        return _openai_error(document)


class ResponsesDialect:
    """OpenAI's Responses."""

    path = "/v1/responses"
    streams_end = b"\n\n"

    def body(self, history: Sequence[Any], tools: Sequence[Tool] = (), **more: Any) -> dict[str, Any]:
        offered = [
            {"type": "function", "name": name, "description": text, "parameters": schema, "strict": False}
            for name, text, schema in tools
        ]
        if "max_tokens" in more:
            more["max_output_tokens"] = more.pop("max_tokens")
        return {"model": "m", "input": list(history), "store": False, **({"tools": offered} if tools else {}), **more}

    def ask(self, url: str, key: str, history: Sequence[Any], stream: bool = False, **more: Any) -> ClientTurn:
        with openai_client(url, key) as client:
            body = self.body(history, **more)
            if stream:
                with client.responses.stream(**body) as events:
                    numbers = [event.sequence_number for event in events]
                    said: Any = events.get_final_response()
                assert numbers == list(range(len(numbers)))
            else:
                said = client.responses.create(**body)
        items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in said.output]
        calls = [(item.call_id, item.name, json.loads(item.arguments)) for item in said.output if item.type == "function_call"]
        return ClientTurn(said.output_text, calls, items)

    def user(self, text: str) -> Any:
        return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}

    def results(self, calls: Sequence[Any], texts: Sequence[str]) -> list[Any]:
        return [
            {"type": "function_call_output", "call_id": call[0], "output": text}
            for call, text in reversed(list(zip(calls, texts, strict=True)))
        ]

    def text_of(self, document: Any) -> str:
        return "".join(part["text"] for item in document["output"] if item["type"] == "message" for part in item["content"])

    def error_of(self, document: Any) -> str:
        return _openai_error(document)


class MessagesDialect:
    """Anthropic's Messages."""

    path = "/v1/messages"
    streams_end = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def body(self, history: Sequence[Any], tools: Sequence[Tool] = (), **more: Any) -> dict[str, Any]:
        offered = [{"name": name, "description": text, "input_schema": schema} for name, text, schema in tools]
        given = {"max_tokens": 32_000, **more}
        return {"model": "m", "messages": list(history), **({"tools": offered} if tools else {}), **given}

    def ask(self, url: str, key: str, history: Sequence[Any], stream: bool = False, **more: Any) -> ClientTurn:
        with anthropic_client(url, key) as client:
            body = self.body(history, **more)
            if stream:
                with client.messages.stream(**body) as events:
                    said: Any = events.get_final_message()
            else:
                said = client.messages.create(**body, timeout=60)
        calls = [(block.id, block.name, block.input) for block in said.content if block.type == "tool_use"]
        text = "".join(block.text for block in said.content if block.type == "text")
        blocks = [block.model_dump(exclude_none=True, exclude={"parsed_output"}) for block in said.content]
        return ClientTurn(text, calls, [{"role": "assistant", "content": blocks}])

    def user(self, text: str) -> Any:
        return {"role": "user", "content": [{"type": "text", "text": text}]}

    def results(self, calls: Sequence[Any], texts: Sequence[str]) -> list[Any]:
        blocks = [
            {"type": "tool_result", "tool_use_id": call[0], "content": text}
            for call, text in reversed(list(zip(calls, texts, strict=True)))
        ]
        return [{"role": "user", "content": blocks}]

    def text_of(self, document: Any) -> str:
        return "".join(block["text"] for block in document["content"] if block["type"] == "text")

    def error_of(self, document: Any) -> str:
        assert set(document) == {"type", "error"}
        assert document["type"] == "error"
        assert set(document["error"]) == {"type", "message"}
        return str(document["error"]["message"])


class CompletionsDialect:
    """Text completions: the history is the prompt, in pieces."""

    path = "/v1/completions"
    streams_end = b"data: [DONE]\n\n"

    def body(self, history: Sequence[Any], tools: Sequence[Tool] = (), **more: Any) -> dict[str, Any]:
        return {"model": "m", "prompt": "".join(history), "max_tokens": 100, **more}  # it has no tools

    def ask(self, url: str, key: str, history: Sequence[Any], stream: bool = False, **more: Any) -> ClientTurn:
        with openai_client(url, key) as client:
            made: Any = client.completions.create(**self.body(history, **more), stream=stream)
            pieces = made if stream else [made]
            text = "".join(choice.text for piece in pieces for choice in piece.choices)
        return ClientTurn(text, (), [text])

    def user(self, text: str) -> Any:
        return text

    def results(self, calls: Sequence[Any], texts: Sequence[str]) -> list[Any]:
        raise NotImplementedError

    def text_of(self, document: Any) -> str:
        return str(document["choices"][0]["text"])

    def error_of(self, document: Any) -> str:
        return _openai_error(document)


CHAT_DIALECT, RESPONSES, MESSAGES = ChatDialect(), ResponsesDialect(), MessagesDialect()
COMPLETIONS = CompletionsDialect()
CLIENTS: Sequence[DialectClient] = (CHAT_DIALECT, RESPONSES, MESSAGES)
"""The dialects with messages and tools."""
