"""`/v1/responses`: OpenAI's Responses API. A response is complete or a stream of typed events.

The `input` of a request is a list of items. Consecutive items of the assistant (its reasoning, its message, its calls) are one
turn. A response depends only on its turn and on its request's id and time. So a repeated request gets the same bytes.

A request may name an earlier response (`previous_response_id`) or its items (`item_reference`). The messages of these responses
and items come from the rows of the same attempt.

The functions in a tool of type `namespace` are offered as `NAMESPACE__NAME`, and a call has both names again. Hosted tools such
as `web_search` cannot run here. Such tools are left out, and `Ask.not_applied` names them, like all fields that have no effect.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.workflow.chat.grammar import ANY_TOOL, NO_CONSTRAINT, Constraint
from agentrl.workflow.chat.turn_stream import TextPiece
from agentrl.workflow.dialects import (
    Ask,
    Recorded,
    RecordedResponse,
    ReplyHead,
    RequestError,
    ResponseTurn,
    chat_completions,
    find_none,
)
from agentrl.workflow.dialects.fields import Fields, clean_tree, load_object
from agentrl.workflow.dialects.reply_text import TurnText, call_id, count_thought, is_cut_off, readable_calls, sent_messages
from agentrl.workflow.dialects.request_parts import (
    MAX_COUNT,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_PARTS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    check_tool,
    function_schema,
    identity_of,
    in_order,
    list_not_applied,
    read_arguments,
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

PATH, COUNT_PATH = "/v1/responses", "/v1/responses/input_tokens"
RESPONSE_ID = "resp_"
HONOURED = frozenset(
    {
        *("model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "temperature", "top_p", "stream"),
        *("previous_response_id", "include", "return_token_ids", "top_logprobs", "text", "parallel_tool_calls"),
    }
)
"""The fields of a request that have an effect. `tool_choice`, `include` and `text` have one only with some values."""
USUAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
}
"""For some fields, the values that request nothing."""
REFUSED = {"background": (False,), "conversation": (), "prompt": ()}
"""The refused fields, each with the values that are accepted nevertheless. If these fields were ignored, a request would have
another meaning.
"""
FIELD_NAMES = (
    ("tool", "tool_choice"),
    ("schema", "text.format"),
    ("strict", "tools[].strict"),
    ("one_call", "parallel_tool_calls"),
)
"""The fields of the request for each part of a `Constraint`."""
ECHOED = ("tool_choice", "parallel_tool_calls", "max_output_tokens")
"""The fields that a response repeats, besides `metadata` and `tools`."""
OFFERED_TOOLS = ("function", "namespace")
MAX_ECHO = 64 * 1024
NAMESPACE_MARK = "__"
INSTRUCTIONS = "instructions"
"""The key in `Ask.kept` for the number of characters of `instructions` at the start of the system message."""
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ITEM_ID = re.compile(r"(rs|msg|fc)_([0-9a-f]{32})(?:_([0-9]{1,4}))?")

Names = Mapping[str, tuple[str, str]]
"""For the functions in namespaces: the offered name -> the namespace and the name in it."""


def read(body: bytes, recorded: Recorded = find_none, max_ids: int = 0) -> Ask:
    """Parse the request.

    Args:
        body: the body, as JSON.
        recorded: finds the responses that the request names by their ids.
        max_ids: not used, because no prompt is a list of ids.

    Raises:
        RequestError: the request is invalid, or names an unknown response (status 400). The message names the field.
    """
    fields = Fields(load_object(body))
    for name, accepted in REFUSED.items():
        if fields.has(name) and fields.values[name] not in accepted:
            raise fields.error(name, "it is not supported; send the input itself", "unsupported_parameter")
    tools, names, left_out = _tools(fields)
    previous = fields.text("previous_response_id", MAX_NAME).removeprefix(RESPONSE_ID)
    include = {value for value in fields.array("include", MAX_PARTS) if isinstance(value, str)}
    instructions, reader = fields.text("instructions"), _InputReader(names, recorded)
    return Ask(
        messages=_messages(fields, previous, instructions, reader),
        model=fields.text("model", MAX_NAME),
        tools=tools,
        max_tokens=fields.integer("max_output_tokens", 1, MAX_COUNT),
        asked=read_sampling(fields, "temperature", "top_p"),
        stream=fields.flag("stream"),
        logprobs=LOGPROBS in include,
        top_logprobs=fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0,
        token_ids=fields.flag("return_token_ids"),
        identity=identity_of(PATH, fields.values),
        constraint=_constraint(fields, tools) or NO_CONSTRAINT,
        not_applied=(*left_out, *list_not_applied(fields, HONOURED, USUAL)),
        prompt_field="input",
        previous=previous or reader.referenced,
        kept={INSTRUCTIONS: len(instructions)} if instructions else {},
        wire={
            "names": names,
            "encrypted": ENCRYPTED in include,
            "previous": fields.text("previous_response_id"),
            "echo": _echo(fields),
        },
    )


def _echo(fields: Fields) -> dict[str, Any]:
    """Return the values of the request that its response repeats. A value of more than `MAX_ECHO` characters is left out. So
    are hosted tools, which are not offered and may contain credentials.
    """
    offered = [tool for tool in fields.objects("tools", MAX_TOOLS) if tool.values.get("type") in OFFERED_TOOLS]
    tools = [_tool_echo(tool) for tool in offered]
    values = {name: fields.values.get(name) for name in ECHOED} | {"tools": tools}
    values["metadata"] = dict(fields.object("metadata").values)
    present = {name: value for name, value in values.items() if value is not None}
    return {name: clean_tree(fields, name, value) for name, value in present.items() if len(json.dumps(value)) <= MAX_ECHO}


def _tool_echo(tool: Fields) -> dict[str, Any]:
    """Return a tool as a response repeats it. The SDK's types require every field of a function."""
    defaults = {"parameters": None, "strict": False} if tool.values.get("type") == "function" else {}
    return {**defaults, **tool.values}


def _constraint(fields: Fields, tools: Sequence[Schema]) -> Constraint:
    """Return what the request requires of the turn."""
    strict = strict_tools(tool for tool in fields.objects("tools", MAX_TOOLS) if tool.values.get("type") == "function")
    one_call = fields.values.get("parallel_tool_calls") is False and bool(tools)
    fields.flag("parallel_tool_calls")
    tool = _required_tool(fields, tools)
    return Constraint(
        tool, read_format(fields.object("text"), "format"), () if tool or not tools else strict, one_call, FIELD_NAMES
    )


def _required_tool(fields: Fields, tools: Sequence[Schema]) -> str:
    choice = fields.values.get("tool_choice")
    if choice in (None, "auto", "none"):
        return ""
    if choice == "required":
        return check_tool(fields, ANY_TOOL, tools)
    function = fields.object("tool_choice") if isinstance(choice, dict) else None
    if function is not None and function.text("type", MAX_NAME) == "function":
        return check_tool(fields, function.text("name", MAX_NAME), tools)
    raise fields.error("tool_choice", "it must be auto, none, required, or an object with a function", "unsupported_value")


# tools


def _tools(fields: Fields) -> tuple[tuple[Schema, ...], Names, list[str]]:
    """Return the offered tools, the names of the functions in namespaces, and the types of hosted tools."""
    tools: list[Schema] = []
    names: dict[str, tuple[str, str]] = {}
    hosted: dict[str, None] = {}
    for tool in fields.objects("tools", MAX_TOOLS):
        match tool.text("type", MAX_NAME):
            case "function":
                tools.append(_function(tool, ""))
            case "namespace":
                namespace = tool.text("name", MAX_NAME)
                for function in tool.objects("tools", MAX_TOOLS):
                    schema = _function(function, namespace)
                    names[schema["function"]["name"]] = (namespace, function.text("name", MAX_NAME))
                    tools.append(schema)
            case kind:
                hosted[f"tools[{kind}]"] = None
        if len(tools) > MAX_TOOLS:
            raise fields.error("tools", f"it has more than {MAX_TOOLS} functions")
    return (() if fields.values.get("tool_choice") == "none" else tuple(tools)), names, list(hosted)


def _function(tool: Fields, namespace: str) -> Schema:
    values = {name: tool.values.get(name) for name in ("name", "description", "parameters")}
    if namespace:
        values["name"] = f"{namespace}{NAMESPACE_MARK}{tool.text('name', MAX_NAME)}"
    return function_schema(tool, values)


# input


def _messages(fields: Fields, previous: str, instructions: str, reader: "_InputReader") -> tuple[Message, ...]:
    """Return the complete conversation."""
    value = fields.values.get("input")
    items = [Fields({"role": "user", "content": fields.text("input")})] if isinstance(value, str) else []
    items = items or list(fields.objects("input", MAX_MESSAGES))
    if not items:
        raise fields.error("input", "at least one item is needed")
    if previous:
        if (response := reader.find(previous)) is None:
            message = "this API key has no response with this id"
            raise fields.error("previous_response_id", message, "previous_response_not_found")
        reader.continue_from(previous, response)
    for item in items:
        reader.take(item)
    messages = reader.messages()
    return _with_one_system_message((*([Message("system", instructions)] if instructions else []), *messages))


class _InputReader:
    """The reader that turns the items of a request into messages. Consecutive items of the assistant become one turn.

    Args:
        names: the names of the functions in namespaces.
        recorded: finds the responses that the request names by their ids.

    Attributes:
        referenced: the request id of the last response of which an item is named; empty without one.
    """

    def __init__(self, names: Names, recorded: Recorded) -> None:
        self.referenced = ""
        self._recorded = recorded
        self._responses: dict[str, RecordedResponse | None] = {}
        self._named: set[tuple[str, str, int]] = set()
        self._offered = {name: offered for offered, name in names.items()}
        self._messages: list[Message] = []
        self._turn: Message | None = None
        self._results: dict[int, Message] = {}
        self._calls: dict[str, tuple[int, str]] = {}

    def find(self, request_id: str) -> RecordedResponse | None:
        """Return the earlier response to the request of that id; None if there is no such response.

        It is looked up once, because a request may name many items of a long conversation.
        """
        if request_id not in self._responses:
            self._responses[request_id] = self._recorded(request_id)
        return self._responses[request_id]

    def continue_from(self, request_id: str, response: RecordedResponse) -> None:
        """Begin with the conversation of an earlier response. The instructions of its request are left out, as in the API."""
        self._messages += sent_messages(response)
        length, first = response.kept.get(INSTRUCTIONS), self._messages[0]
        if length and first.role == "system":
            rest = first.content[int(length) :].removeprefix("\n\n")
            self._messages[:1] = [Message("system", rest)] if rest else []
        for number, call in enumerate(self._messages[-1].tool_calls):
            self._calls[call_id(request_id, 0, number)] = (number, call.name)

    def take(self, item: Fields) -> None:
        """Add the next input item of a Responses request to the messages.

        Raises:
            RequestError: the item is invalid (status 400).
        """
        match item.text("type", MAX_NAME) or "message":
            case "message":
                self._take_message(item)
            case "reasoning":
                self._add(thought=_thought(item).strip())
            case "function_call":
                name = item.text("name", MAX_NAME)
                if not name:
                    raise item.error("name", "it is missing")
                name = self._offered.get((item.text("namespace", MAX_NAME), name), name)
                self._add(call=ToolCall(name, read_arguments(item)), call_id=item.text("call_id", MAX_NAME))
            case "function_call_output":
                self._take_result(item)
            case "item_reference":
                self._take_reference(item)
            case kind:
                raise item.error("type", f"{kind[:40]!r} is not supported", "unsupported_value")

    def messages(self) -> tuple[Message, ...]:
        """Return the messages of all items."""
        self._end_turn()
        return tuple(self._messages)

    def _take_message(self, item: Fields) -> None:
        role = item.text("role", MAX_NAME)
        if role == "assistant":
            self._add(content=_text(item, "content").strip())
            return
        if role not in ("user", "system", "developer"):
            raise item.error("role", "it must be one of user, system, developer, assistant")
        self._end_turn()
        self._messages.append(Message("user" if role == "user" else "system", _text(item, "content")))

    def _take_result(self, item: Fields) -> None:
        name = item.text("call_id", MAX_NAME)
        if name not in self._calls:
            raise item.error("call_id", "no earlier function_call has this id")
        number, tool = self._calls[name]
        self._results[result_place(number, len(self._results))] = Message("tool", _text(item, "output"), name=tool)

    def _take_reference(self, item: Fields) -> None:
        """Add an item of an earlier response, which the request names by the item's id."""
        match = _ITEM_ID.fullmatch(item.text("id", MAX_NAME))
        response = self.find(match[2]) if match else None
        if match is None or response is None:
            raise item.error("id", "this API key has no item with this id", "item_not_found")
        self.referenced = match[2]
        message, number = response.messages[-1], int(match[3] or 0)
        place = (match[1], match[2], number if match[1] == "fc" else 0)
        if place in self._named:  # a small request could otherwise become a huge prompt
            raise item.error("id", "the input has this item twice")
        self._named.add(place)
        calls = readable_calls(message)
        if match[1] == "rs":
            self._add(thought=message.thought)
        elif match[1] == "msg":
            self._add(content=message.content)
        elif number < len(calls):
            self._add(call=calls[number], call_id=call_id(match[2], 0, number))
        else:
            raise item.error("id", "this API key has no item with this id", "item_not_found")

    def _add(self, thought: str = "", content: str = "", call: ToolCall | None = None, call_id: str = "") -> None:
        """Add a part to the assistant's turn. A turn has its parts in this order, so an earlier part begins another turn."""
        turn = self._turn
        if (
            turn is None
            or self._results
            or (turn.tool_calls and call is None)
            or (turn.content and (thought or content))
            or (turn.thought and thought)
        ):
            self._end_turn()
            turn = Message("assistant", "")
        calls = turn.tool_calls if call is None else (*turn.tool_calls, call)
        self._turn = replace(turn, thought=turn.thought or thought, content=turn.content or content, tool_calls=calls)
        if call is not None:
            self._calls[call_id] = (len(calls) - 1, call.name)

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._messages.append(self._turn)
        self._messages += in_order(self._results)
        self._turn, self._results = None, {}


def _with_one_system_message(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Join the system messages at the beginning, and make later ones messages of the user.

    Clients send their instructions in several messages, and many templates accept only one system message.
    """
    count = next((number for number, message in enumerate(messages) if message.role != "system"), len(messages))
    joined = [Message("system", "\n\n".join(message.content for message in messages[:count]))] if count else []
    later = [Message("user", message.content) if message.role == "system" else message for message in messages[count:]]
    return (*joined, *later)


def _text(item: Fields, name: str) -> str:
    """Return the text of a field that is a text or a list of parts."""
    if not isinstance(item.values.get(name), list):
        return item.text(name)
    return "".join(_parts(item, name))


def _parts(item: Fields, name: str) -> Iterator[str]:
    for part in item.objects(name, MAX_PARTS):
        kind = part.text("type", MAX_NAME)
        if kind not in (*TEXT_PARTS, "refusal"):
            raise unsupported_part(part, kind)
        yield part.text("refusal" if kind == "refusal" else "text")


def _thought(item: Fields) -> str:
    """Return the text of a reasoning item. Some clients send it back only as `encrypted_content`."""
    for name in ("content", "summary"):
        if text := _text(item, name):
            return text
    return read_encoded(item, "encrypted_content")


# responses


def whole(ask: Ask, turns: Sequence[ResponseTurn], head: ReplyHead, chat: "Chat") -> dict[str, Any]:
    """Return the complete response, a `Response`, with its turn."""
    (turn,) = turns
    items = _items(ask, turn, head.request_id, chat)
    status = "incomplete" if is_cut_off(turn) else "completed"
    more: dict[str, Any] = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut_off(turn) else {}
    if ask.token_ids:
        more |= {"prompt_token_ids": list(head.prompt_ids), "token_ids": list(turn.completion.token_ids)}
    return _response(ask, head, status) | {"output": items, "usage": _usage(head, turn, chat), **more}


def _response(ask: Ask, head: ReplyHead, status: str) -> dict[str, Any]:
    return {
        **{"id": RESPONSE_ID + head.request_id, "object": "response", "created_at": head.created, "status": status},
        **{"model": ask.model, "output": [], "error": None, "incomplete_details": None, "instructions": None, "metadata": {}},
        **{"parallel_tool_calls": True, "previous_response_id": ask.wire.get("previous") or None},
        **{"reasoning": {"effort": None, "summary": None}, "store": True, "temperature": ask.asked.get("temperature")},
        **{"text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": ask.asked.get("top_p")},
        **{"truncation": "disabled", "usage": None, "max_output_tokens": None},
        **ask.wire.get("echo", {}),
    }


def _usage(head: ReplyHead, turn: ResponseTurn, chat: "Chat") -> dict[str, Any]:
    prompt, sampled = len(head.prompt_ids), len(turn.completion.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": head.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": count_thought(turn, chat)},
        "total_tokens": prompt + sampled,
    }


def _items(ask: Ask, turn: ResponseTurn, request_id: str, chat: "Chat") -> list[dict[str, Any]]:
    message = turn.message
    items = []
    if message.thought:
        items.append(_reasoning(ask, message.thought, request_id))
    if message.content or not (message.thought or readable_calls(message)):
        logprobs = _logprobs(ask, turn, chat) if ask.logprobs else []
        items.append(_message(message.content, request_id, logprobs))
    return items + [_call(ask, call, request_id, number) for number, call in enumerate(readable_calls(message))]


def _reasoning(ask: Ask, text: str, request_id: str) -> dict[str, Any]:
    encrypted = base64.b64encode(text.encode()).decode() if ask.wire.get("encrypted") else None
    content = [{"type": "reasoning_text", "text": text}]
    fields = {"type": "reasoning", "id": f"rs_{request_id}", "status": None}
    return fields | {"summary": [], "content": content, "encrypted_content": encrypted}


def _message(text: str, request_id: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {"type": "message", "id": f"msg_{request_id}", "role": "assistant", "status": "completed", "content": [part]}


def _call(ask: Ask, call: ToolCall, request_id: str, number: int) -> dict[str, Any]:
    namespace, name = ask.wire.get("names", {}).get(call.name, ("", call.name))
    item = {
        **{"type": "function_call", "id": f"fc_{request_id}_{number}", "call_id": call_id(request_id, 0, number)},
        **{"name": name, "arguments": json.dumps(call.arguments, ensure_ascii=False), "status": "completed"},
    }
    return item | ({"namespace": namespace} if namespace else {})


def _logprobs(ask: Ask, turn: ResponseTurn, chat: "Chat") -> list[dict[str, Any]]:
    """Return the logprobs of the turn's tokens in the API's format.

    They are natural logprobs over the whole vocabulary, at the sampling temperature.
    """
    others = turn.completion.top or ((),) * len(turn.completion.token_ids)
    return [
        _logprob(token, logprob, chat) | {"top_logprobs": [_logprob(*one, chat) for one in top[: ask.top_logprobs]]}
        for token, logprob, top in zip(turn.completion.token_ids, turn.completion.logprobs, others, strict=True)
    ]


def _logprob(token: int, logprob: float, chat: "Chat") -> dict[str, Any]:
    spelled = chat.bytes_of(token)
    return {"token": chat.decode([token]), "logprob": logprob, "bytes": [] if spelled is None else list(spelled)}


class ResponseEvents:
    """The builder of the events of a streamed response. The caller calls `begin`, `token` for each token, `end` and `close`."""

    def __init__(self, ask: Ask, head: ReplyHead, chat: "Chat") -> None:
        self._ask, self._head, self._chat = ask, head, chat
        self._text = TurnText(chat, ask, head.prompt_ids)
        self._open = ""  # the kind of the item that is being written
        self._written = ""
        self._items = self._events = 0

    def begin(self) -> bytes:
        """Return the first events, which carry the response without output."""
        response = _response(self._ask, self._head, "in_progress")
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def token(self, choice: int, token: int) -> bytes:
        """Return the events for the next token."""
        return b"".join(self._piece(piece) for piece in self._text.take(token))

    def end(self, choice: int, turn: ResponseTurn) -> bytes:
        """Return the events for the remaining text and for the calls."""
        events = [self._piece(piece) for piece in self._text.rest(turn.message)]
        if not (self._items or self._open or readable_calls(turn.message)):
            events.append(self._begin_item("content"))
        logprobs = _logprobs(self._ask, turn, self._chat) if self._ask.logprobs else []
        events.append(self._end_item(logprobs))
        for number, call in enumerate(readable_calls(turn.message)):
            item = _call(self._ask, call, self._head.request_id, number)
            place = {"output_index": self._items, "item_id": item["id"]}
            begun = item | {"arguments": "", "status": "in_progress"}
            events.append(self._event("response.output_item.added", output_index=self._items, item=begun))
            events.append(self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]))
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **place, **done))
            events.append(self._event("response.output_item.done", output_index=self._items, item=item))
            self._items += 1
        return b"".join(events)

    def close(self, turns: Sequence[ResponseTurn]) -> bytes:
        """Return the last event, which carries the complete response."""
        kind = "response.incomplete" if is_cut_off(turns[0]) else "response.completed"
        return self._event(kind, response=whole(self._ask, turns, self._head, self._chat))

    def _piece(self, piece: TextPiece) -> bytes:
        events = b""
        if self._open != piece.kind:
            events = self._end_item() + self._begin_item(piece.kind)
        self._written += piece.text
        if piece.kind == "thought":
            return events + self._event("response.reasoning_text.delta", **self._place(), delta=piece.text)
        return events + self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=[])

    def _place(self) -> dict[str, Any]:
        kind = "rs" if self._open == "thought" else "msg"
        return {"item_id": f"{kind}_{self._head.request_id}", "output_index": self._items, "content_index": 0}

    def _begin_item(self, kind: str) -> bytes:
        self._open, self._written = kind, ""
        if kind == "thought":
            item = _reasoning(self._ask, "", self._head.request_id) | {"content": [], "encrypted_content": None}
            return self._event("response.output_item.added", output_index=self._items, item=item)
        item = _message("", self._head.request_id) | {"content": [], "status": "in_progress"}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._event("response.output_item.added", output_index=self._items, item=item) + self._event(
            "response.content_part.added", **self._place(), part=part
        )

    def _end_item(self, logprobs: Sequence[Any] = ()) -> bytes:
        if not self._open:
            return b""
        if self._open == "thought":
            item = _reasoning(self._ask, self._written, self._head.request_id)
            events = self._event("response.reasoning_text.done", **self._place(), text=self._written)
        else:
            item = _message(self._written, self._head.request_id, logprobs)
            done = {"text": self._written, "logprobs": list(logprobs)}
            events = self._event("response.output_text.done", **self._place(), **done)
            events += self._event("response.content_part.done", **self._place(), part=item["content"][0])
        events += self._event("response.output_item.done", output_index=self._items, item=item)
        self._open, self._items = "", self._items + 1
        return events

    def _event(self, kind: str, **values: Any) -> bytes:
        self._events += 1
        return _format_event(kind, {"type": kind, "sequence_number": self._events - 1, **values})


def stream(ask: Ask, head: ReplyHead, chat: "Chat") -> ResponseEvents:
    """Return the builder of a streamed response."""
    return ResponseEvents(ask, head, chat)


def _format_event(kind: str, values: Mapping[str, Any]) -> bytes:
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), default=dict)
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), text.encode("utf-8", "replace"))


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the body of an error response."""
    return chat_completions.error_body(error)


def error_event(document: Mapping[str, Any]) -> bytes:
    """Return the event that ends a stream after an error. `document` is the body of the error response.

    It has the fields of the event `error`, and the object that SDKs look for.
    """
    error = document.get("error")
    fields = {name: error.get(name) for name in ("code", "message", "param")} if isinstance(error, dict) else {}
    return _format_event("error", {"type": "error", **fields, "error": error})


def count(tokens: int) -> dict[str, Any]:
    """Return the response with the number of tokens of a request."""
    return {"object": "response.input_tokens", "input_tokens": tokens}
