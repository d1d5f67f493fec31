"""`/v1/messages`: Anthropic's Messages API. A response is complete or a stream of typed events.

A response depends only on its turn and on its request's id and time. So a repeated request gets the same bytes.

The tools that the client runs are offered. The API's own tools (`web_search_20250305`, ...) cannot run here. Such tools are
left out, and `Ask.not_applied` names them, like all fields that have no effect. Clients move `cache_control` from block to
block between their requests, so it is never part of a message.

A request may continue a message by its id (`thread`). The messages and the tools before it come from the rows of the same
attempt.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.workflow.chat.grammar import ANY_TOOL, NO_CONSTRAINT, Constraint
from agentrl.workflow.chat.turn_stream import TextPiece
from agentrl.workflow.dialects import Ask, Recorded, RecordedResponse, ReplyHead, RequestError, ResponseTurn, find_none
from agentrl.workflow.dialects.fields import Fields, clean_tree, load_object
from agentrl.workflow.dialects.reply_text import TurnText, call_id, is_cut_off, readable_calls, sent_messages
from agentrl.workflow.dialects.request_parts import (
    MAX_COUNT,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_PARTS,
    MAX_STOP,
    MAX_STOPS,
    MAX_TOOLS,
    check_tool,
    function_schema,
    identity_of,
    in_order,
    list_not_applied,
    read_encoded,
    read_format,
    read_sampling,
    result_place,
    strict_tools,
    unsupported_part,
)
from agentrl.workflow.tool_formats import Schema
from agentrl.workflow.trajectory import Message, ToolCall

if TYPE_CHECKING:
    from agentrl.workflow.chat.rendering import Chat

PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
HONOURED = frozenset(
    {
        *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "temperature", "top_p"),
        *("top_k", "stream", "return_token_ids", "thread", "output_config"),
    }
)
"""The fields of a request that have an effect. `tool_choice` has one only with some values."""
USUAL: Mapping[str, tuple[Any, ...]] = {"thinking": ({"type": "disabled"},)}
"""For some fields, the values that request nothing."""
FIELD_NAMES = (
    ("tool", "tool_choice"),
    ("schema", "output_config.format"),
    ("strict", "tools[].strict"),
    ("one_call", "tool_choice.disable_parallel_tool_use"),
)
"""The fields of the request for each part of a `Constraint`."""
BILLING = "x-anthropic-billing-header:"
"""The beginning of a system block of Claude Code that changes from request to request. The block is left out."""
MESSAGE_ID = "msg_"
NOT_FOUND = "thread_not_found"
"""The error code after which the SDK sends the complete conversation again."""
KINDS = {
    **{400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"},
}
"""The API's error type for an HTTP status. Other statuses from 500 on have `api_error`, the rest `invalid_request_error`."""


def read(body: bytes, recorded: Recorded = find_none, max_ids: int = 0) -> Ask:
    """Parse the request.

    Args:
        body: the body, as JSON.
        recorded: finds the response that the request continues.
        max_ids: not used, because no prompt is a list of ids.

    Raises:
        RequestError: the request is invalid (status 400). The message names the invalid field.
    """
    fields = Fields(load_object(body))
    tools, left_out = _tools(fields)
    previous, response = _find_previous(fields, recorded)
    if response is not None:
        tools = response.tools
    return Ask(
        messages=_messages(fields, previous, response),
        model=fields.text("model", MAX_NAME),
        tools=tools,
        max_tokens=fields.integer("max_tokens", 1, MAX_COUNT),
        stop=fields.texts("stop_sequences", MAX_STOPS, MAX_STOP) if fields.values.get("stop_sequences") else (),
        asked=read_sampling(fields, "temperature", "top_p", "top_k"),
        stream=fields.flag("stream"),
        token_ids=fields.flag("return_token_ids"),
        identity=identity_of(PATH, fields.values),
        constraint=_constraint(fields, tools, response) or NO_CONSTRAINT,
        not_applied=(*left_out, *_not_applied(fields, response)),
        previous=previous,
    )


def _find_previous(fields: Fields, recorded: Recorded) -> tuple[str, RecordedResponse | None]:
    """Return the request id of the message that the request continues, and that response; ("", None) without one."""
    thread = fields.object("thread")
    if thread.text("type", MAX_NAME) != "continue":
        return "", None
    previous = thread.text("previous_message_id", MAX_NAME).removeprefix(MESSAGE_ID)
    if (response := recorded(previous)) is None:
        raise thread.error("previous_message_id", "this API key has no message with this id", NOT_FOUND)
    for name in ("system", "tools"):
        if fields.has(name):
            raise fields.error(name, "it cannot change within a conversation; leave it out")
    return previous, response


def _not_applied(fields: Fields, response: RecordedResponse | None) -> Iterator[str]:
    yield from list_not_applied(fields, HONOURED, USUAL)
    if response is not None and fields.object("tool_choice").values.get("type") == "none":  # a thread keeps its tools
        yield "tool_choice"
    output = fields.object("output_config")
    yield from (f"output_config.{name}" for name in list_not_applied(output, frozenset({"format"}), {}))


def _constraint(fields: Fields, tools: Sequence[Schema], response: RecordedResponse | None) -> Constraint:
    """Return what the request requires of the turn."""
    choice = fields.object("tool_choice")
    tool = ""
    match choice.text("type", MAX_NAME):
        case "any":
            tool = check_tool(fields, ANY_TOOL, tools)
        case "tool":
            tool = check_tool(fields, choice.text("name", MAX_NAME), tools)
        case "" | "auto" | "none":
            pass
        case kind:
            raise choice.error("type", f"{kind[:40]!r} is not supported: auto, any, tool or none", "unsupported_value")
    strict = () if tool or not tools or response else strict_tools(fields.objects("tools", MAX_TOOLS))
    form = fields.object("output_config")
    schema = read_format(form, "format") if form.has("format") else ""
    return Constraint(tool, schema, strict, choice.flag("disable_parallel_tool_use") and bool(tools), FIELD_NAMES)


def _tools(fields: Fields) -> tuple[tuple[Schema, ...], list[str]]:
    """Return the offered tools, and the types of the API's own tools."""
    tools: list[Schema] = []
    hosted: dict[str, None] = {}
    for tool in fields.objects("tools", MAX_TOOLS):
        if (kind := tool.text("type", MAX_NAME)) not in ("", "custom"):
            hosted[f"tools[{kind}]"] = None
            continue
        values = {"name": tool.values.get("name"), "description": tool.values.get("description")}
        tools.append(function_schema(tool, values | {"parameters": tool.object("input_schema").values}))
    return (() if fields.object("tool_choice").values.get("type") == "none" else tuple(tools)), list(hosted)


# messages


def _messages(fields: Fields, previous: str, response: RecordedResponse | None) -> tuple[Message, ...]:
    """Return the complete conversation. If the request continues a response, it begins with the response's conversation."""
    system = "\n\n".join(text for text in _texts(fields, "system") if not text.startswith(BILLING))
    messages = [Message("system", system)] if system else []
    calls: dict[str, tuple[int, str]] = {}
    if response is not None:
        messages = sent_messages(response)
        calls = {_call_id(previous, number): (number, call.name) for number, call in enumerate(messages[-1].tool_calls)}
    if not fields.values.get("messages"):
        raise fields.error("messages", "at least one message is needed")
    for message in fields.objects("messages", MAX_MESSAGES):
        match message.text("role", MAX_NAME):
            case "assistant":
                turn, ids = _turn(message)
                messages.append(turn)
                numbered = enumerate(zip(ids, turn.tool_calls, strict=True))
                calls |= {name: (number, call.name) for number, (name, call) in numbered}
            case "user":
                messages += _user(message, calls)
            case "system":  # between other messages, where many templates refuse one
                messages.append(Message("user", "\n\n".join(_texts(message, "content"))))
            case _:
                raise message.error("role", "it must be one of user, assistant")
    return tuple(messages)


def _blocks(fields: Fields, name: str) -> Iterator[Fields]:
    """Yield the blocks of a field. A text is one block."""
    if isinstance(value := fields.values.get(name), str):
        yield Fields({"type": "text", "text": value}, f"{fields.at}{name}.")
    elif value is not None:
        yield from fields.objects(name, MAX_PARTS)


def _texts(fields: Fields, name: str) -> Iterator[str]:
    """Yield the texts of a field that may contain only text."""
    for block in _blocks(fields, name):
        if (kind := block.text("type", MAX_NAME)) != "text":
            raise unsupported_part(block, kind)
        yield block.text("text")


def _user(message: Fields, calls: Mapping[str, tuple[int, str]]) -> list[Message]:
    """Return the tool results in the order of their calls, and then the user's text."""
    results: dict[int, Message] = {}
    texts: list[str] = []
    for block in _blocks(message, "content"):
        match block.text("type", MAX_NAME):
            case "text":
                texts.append(block.text("text"))
            case "tool_result":
                if (name := block.text("tool_use_id", MAX_NAME)) not in calls:
                    raise block.error("tool_use_id", "no earlier assistant message has a call with this id")
                number, tool = calls[name]
                results[result_place(number, len(results))] = Message("tool", _result(block), name=tool)
            case kind:
                raise unsupported_part(block, kind)
    if not (results or texts):
        raise message.error("content", "it is missing")
    return in_order(results) + ([Message("user", "\n\n".join(texts))] if texts else [])


def _result(block: Fields) -> str:
    """Return the text of a tool result. A failed one says so, because chat templates have no field for it."""
    text = "\n".join(_texts(block, "content"))
    return f"Error: {text}" if block.flag("is_error") and not text.lower().startswith("error") else text


def _turn(message: Fields) -> tuple[Message, list[str]]:
    """Return the message of an assistant, and the ids of its calls."""
    texts, thoughts, ids, calls = list[str](), list[str](), list[str](), list[ToolCall]()
    for block in _blocks(message, "content"):
        match block.text("type", MAX_NAME):
            case "text":
                texts.append(block.text("text"))
            case "thinking":
                thoughts.append(block.text("thinking"))
            case "redacted_thinking":
                thoughts.append(read_encoded(block, "data"))
            case "tool_use":
                if not (name := block.text("name", MAX_NAME)):
                    raise block.error("name", "it is missing")
                ids.append(block.text("id", MAX_NAME))
                calls.append(ToolCall(name, dict(clean_tree(block, "input", block.object("input").values))))
            case kind:
                raise unsupported_part(block, kind)
    return Message("assistant", "".join(texts).strip(), "".join(thoughts).strip(), tuple(calls)), ids


# responses


def whole(ask: Ask, turns: Sequence[ResponseTurn], head: ReplyHead, chat: "Chat") -> dict[str, Any]:
    """Return the complete response, a `Message`, with its turn."""
    (turn,) = turns
    reply = _message(ask, head) | {"content": _content(turn, head.request_id), **_end(ask, turn, chat)}
    reply["usage"] |= {"output_tokens": len(turn.completion.token_ids)}
    ids = {"prompt_token_ids": list(head.prompt_ids), "token_ids": list(turn.completion.token_ids)} if ask.token_ids else {}
    return reply | ids


def count(tokens: int) -> dict[str, Any]:
    """Return the response with the number of tokens of a request."""
    return {"input_tokens": tokens}


def _message(ask: Ask, head: ReplyHead) -> dict[str, Any]:
    usage = {
        **{"input_tokens": len(head.prompt_ids) - head.cached_tokens, "cache_creation_input_tokens": 0},
        **{"cache_read_input_tokens": head.cached_tokens, "output_tokens": 0},
    }
    fields = {"id": f"{MESSAGE_ID}{head.request_id}", "type": "message", "role": "assistant", "model": ask.model}
    return fields | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}


def _content(turn: ResponseTurn, request_id: str) -> list[dict[str, Any]]:
    message, blocks = turn.message, list[dict[str, Any]]()
    if message.thought:
        blocks.append({"type": "thinking", "thinking": message.thought, "signature": request_id})
    if message.content or not (blocks or readable_calls(message)):
        blocks.append({"type": "text", "text": message.content})
    return blocks + [_tool_use(call, request_id, number) for number, call in enumerate(readable_calls(message))]


def _call_id(request_id: str, number: int) -> str:
    return f"toolu_{call_id(request_id, 0, number).removeprefix('call_')}"


def _tool_use(call: ToolCall, request_id: str, number: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": _call_id(request_id, number), "name": call.name, "input": call.arguments}


def _end(ask: Ask, turn: ResponseTurn, chat: "Chat") -> dict[str, Any]:
    """Return the reason why the turn ended, and the stop sequence that ended it."""
    if is_cut_off(turn):
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if readable_calls(turn.message):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    text = chat.decode(turn.completion.token_ids) if ask.stop else ""
    sequence = min((stop for stop in ask.stop if stop in text), key=text.find, default=None)
    return {"stop_reason": "stop_sequence" if sequence else "end_turn", "stop_sequence": sequence}


class MessageEvents:
    """The builder of the events of a streamed response. The caller calls `begin`, `token` for each token, `end` and `close`."""

    def __init__(self, ask: Ask, head: ReplyHead, chat: "Chat") -> None:
        self._ask, self._head, self._chat = ask, head, chat
        self._text = TurnText(chat, ask, head.prompt_ids)
        self._open = ""  # the kind of the block that is being written
        self._blocks = 0

    def begin(self) -> bytes:
        """Return the first event, which has the message without content."""
        return _event("message_start", message=_message(self._ask, self._head))

    def token(self, choice: int, token: int) -> bytes:
        """Return the events for the next token."""
        return b"".join(self._piece(piece) for piece in self._text.take(token))

    def end(self, choice: int, turn: ResponseTurn) -> bytes:
        """Return the events for the remaining text, for the calls and for the end of the turn."""
        events = [self._piece(piece) for piece in self._text.rest(turn.message)]
        if not (self._blocks or self._open or readable_calls(turn.message)):
            events.append(self._begin_block("content"))
        events.append(self._end_block())
        for number, call in enumerate(readable_calls(turn.message)):
            block = _tool_use(call, self._head.request_id, number)
            text = json.dumps(call.arguments, ensure_ascii=False, default=dict)
            delta = {"type": "input_json_delta", "partial_json": text}
            events.append(_event("content_block_start", index=self._blocks, content_block=block | {"input": {}}))
            events.append(_event("content_block_delta", index=self._blocks, delta=delta))
            events.append(_event("content_block_stop", index=self._blocks))
            self._blocks += 1
        usage = {"output_tokens": len(turn.completion.token_ids)}
        events.append(_event("message_delta", delta=_end(self._ask, turn, self._chat), usage=usage))
        return b"".join(events)

    def close(self, turns: Sequence[ResponseTurn]) -> bytes:
        """Return the last event."""
        return _event("message_stop")

    def _piece(self, piece: TextPiece) -> bytes:
        events = b""
        if self._open != piece.kind:
            events = self._end_block() + self._begin_block(piece.kind)
        delta = {"type": "text_delta", "text": piece.text}
        if piece.kind == "thought":
            delta = {"type": "thinking_delta", "thinking": piece.text}
        return events + _event("content_block_delta", index=self._blocks, delta=delta)

    def _begin_block(self, kind: str) -> bytes:
        self._open = kind
        empty = {"type": "thinking", "thinking": "", "signature": ""} if kind == "thought" else {"type": "text", "text": ""}
        return _event("content_block_start", index=self._blocks, content_block=empty)

    def _end_block(self) -> bytes:
        if not self._open:
            return b""
        events = b""
        if self._open == "thought":  # clients send a thought back only with its signature
            delta = {"type": "signature_delta", "signature": self._head.request_id}
            events = _event("content_block_delta", index=self._blocks, delta=delta)
        self._open, self._blocks = "", self._blocks + 1
        return events + _event("content_block_stop", index=self._blocks - 1)


def stream(ask: Ask, head: ReplyHead, chat: "Chat") -> MessageEvents:
    """Return the builder of a streamed response."""
    return MessageEvents(ask, head, chat)


def _event(kind: str, **values: Any) -> bytes:
    text = json.dumps({"type": kind, **values}, ensure_ascii=False, separators=(",", ":"), default=dict)
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), text.encode("utf-8", "replace"))


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the body of an error response."""
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"details": {"error_code": error.code}} if error.code == NOT_FOUND else {}
    return {"type": "error", "error": {"type": kind, "message": str(error), **details}}


def error_event(document: Mapping[str, Any]) -> bytes:
    """Return the event that ends a stream after an error. `document` is the body of the error response."""
    return _event("error", **{name: value for name, value in document.items() if name != "type"})
