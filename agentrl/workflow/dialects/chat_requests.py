"""Parses a request of `/v1/chat/completions`.

`request_fields` says which fields have an effect, are accepted without effect, or are refused with the API's error. A client
may send fields of earlier responses (`reasoning`, calls, ids) back with the history.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from agentrl.workflow.chat.grammar import ANY_TOOL, NO_CONSTRAINT, Constraint
from agentrl.workflow.chat.template_options import check_options
from agentrl.workflow.dialects import Ask, Recorded, find_none
from agentrl.workflow.dialects.fields import Fields, clean_tree, load_object
from agentrl.workflow.dialects.request_fields import CALL, CALL_FUNCTION, FUNCTION, MESSAGE, PART, REQUEST, STREAM_OPTIONS, TOOL
from agentrl.workflow.dialects.request_parts import (
    MAX_CALLS,
    MAX_CHOICES,
    MAX_COUNT,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_PARTS,
    MAX_STOP,
    MAX_STOPS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    check_tool,
    function_schema,
    identity_of,
    in_order,
    read_arguments,
    read_format,
    read_sampling,
    result_place,
    strict_tools,
    unsupported_part,
)
from agentrl.workflow.errors import ModelError
from agentrl.workflow.tool_formats import Schema
from agentrl.workflow.trajectory import Message, ToolCall

PATH = "/v1/chat/completions"
FIELD_NAMES = (
    ("tool", "tool_choice"),
    ("schema", "response_format"),
    ("strict", "tools[].function.strict"),
    ("one_call", "parallel_tool_calls"),
)
"""The fields of the request for each part of a `Constraint`."""
ROLES = ("system", "developer", "user", "assistant", "tool")


def read(body: bytes, recorded: Recorded = find_none, max_ids: int = 0) -> Ask:
    """Parse the request.

    Args:
        body: the body, as JSON.
        recorded: not used, because a request contains its complete conversation.
        max_ids: not used, because no prompt is a list of ids.

    Raises:
        RequestError: the request is invalid (status 400). The message names the invalid field.
    """
    fields = Fields(load_object(body))
    REQUEST.check(fields)
    count = fields.integer("n", 1, MAX_CHOICES) or 1
    stream = fields.flag("stream")
    logprobs, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if top and not logprobs:
        raise fields.error("top_logprobs", "it needs logprobs: true")
    tools = _tools(fields)
    return Ask(
        messages=_messages(fields),
        model=fields.text("model", MAX_NAME),
        tools=tools,
        template_options=_template_options(fields),
        max_tokens=_most_tokens(fields),
        stop=fields.texts("stop", MAX_STOPS, MAX_STOP) if fields.values.get("stop") not in (None, [], "") else (),
        count=count,
        asked=read_sampling(fields, "temperature", "top_p", "min_p", "top_k", "seed"),
        stream=stream,
        include_usage=_includes_usage(fields, stream),
        logprobs=logprobs,
        top_logprobs=top,
        token_ids=fields.flag("return_token_ids"),
        identity=identity_of(PATH, fields.values),
        constraint=_constraint(fields, tools) or NO_CONSTRAINT,
        not_applied=REQUEST.names_not_applied(fields),
    )


def _template_options(fields: Fields) -> dict[str, Any]:
    options = fields.object("chat_template_kwargs").values
    try:
        check_options(options)
    except ModelError as error:
        raise fields.error("chat_template_kwargs", error.message.rstrip(".")) from error
    return dict(clean_tree(fields, "chat_template_kwargs", options))


def _most_tokens(fields: Fields) -> int | None:
    limits = [fields.integer(name, 1, MAX_COUNT) for name in ("max_tokens", "max_completion_tokens")]
    return min((value for value in limits if value is not None), default=None)


def _includes_usage(fields: Fields, stream: bool) -> bool:
    if not fields.has("stream_options"):
        return False
    options = fields.object("stream_options")
    if not stream:
        raise fields.error("stream_options", "it needs stream: true")
    STREAM_OPTIONS.check(options)
    return options.flag("include_usage")


# tools


def _tools(fields: Fields) -> tuple[Schema, ...]:
    """Return the offered tools, in the form that chat templates take."""
    tools = tuple(_tool(tool) for tool in fields.objects("tools", MAX_TOOLS))
    return () if fields.values.get("tool_choice") == "none" else tools


def _constraint(fields: Fields, tools: tuple[Schema, ...]) -> Constraint:
    """Return what the request requires of the turn."""
    functions = [tool.object("function") for tool in fields.objects("tools", MAX_TOOLS)] if tools else []
    one_call = fields.values.get("parallel_tool_calls") is False and bool(tools)
    fields.flag("parallel_tool_calls")
    constraint = Constraint(
        _required_tool(fields, tools), read_format(fields, "response_format"), strict_tools(functions), one_call, FIELD_NAMES
    )
    return replace(constraint, strict=()) if constraint.tool else constraint


def _required_tool(fields: Fields, tools: tuple[Schema, ...]) -> str:
    choice = fields.values.get("tool_choice")
    if choice in (None, "auto", "none"):
        return ""
    if choice == "required":
        return check_tool(fields, ANY_TOOL, tools)
    if isinstance(choice, dict) and (name := fields.object("tool_choice").object("function").text("name", MAX_NAME)):
        return check_tool(fields, name, tools)
    raise fields.error("tool_choice", "it must be auto, none, required, or an object with a function", "unsupported_value")


def _tool(tool: Fields) -> Schema:
    if tool.text("type", MAX_NAME) != "function":
        raise tool.error("type", "only tools of type function are supported")
    TOOL.check(tool)
    if not tool.has("function"):
        raise tool.error("function", "it is missing")
    function = tool.object("function")
    FUNCTION.check(function)
    values = {name: value for name, value in function.values.items() if name in FUNCTION.honoured and name != "strict"}
    return function_schema(function, values)


# messages


def _messages(fields: Fields) -> tuple[Message, ...]:
    if not fields.values.get("messages"):
        raise fields.error("messages", "at least one message is needed")
    messages: list[Message] = []
    results: dict[int, Message] = {}
    calls: dict[str, tuple[int, str]] = {}
    for message in fields.objects("messages", MAX_MESSAGES):
        role = message.text("role", MAX_NAME)
        if role not in ROLES:
            raise message.error("role", f"it must be one of {', '.join(ROLES)}")
        MESSAGE.check(message)
        if role == "tool":
            place, result = _result(message, calls, len(results))
            results[place] = result
            continue
        messages += in_order(results)
        results = {}
        if role == "assistant":
            reply, ids = _turn(message)
            messages.append(reply)
            calls |= {name: (number, call.name) for number, (name, call) in enumerate(zip(ids, reply.tool_calls, strict=True))}
        else:
            messages.append(Message("user" if role == "user" else "system", _content(message)))
    return (*messages, *in_order(results))


def _result(message: Fields, calls: Mapping[str, tuple[int, str]], answered: int) -> tuple[int, Message]:
    """Return the position of a tool result, which is the number of its call, and the message of the result."""
    name = message.text("tool_call_id", MAX_NAME)
    if name not in calls:
        raise message.error("tool_call_id", "no earlier assistant message has a call with this id")
    number, tool = calls[name]
    return result_place(number, answered), Message("tool", _content(message), name=tool)


def _turn(message: Fields) -> tuple[Message, list[str]]:
    """Return the message of an assistant, and the ids of its calls."""
    thought = message.text("reasoning") or message.text("reasoning_content")
    content = _content(message) if message.has("content") else message.text("refusal")
    ids, calls = [], []
    for call in message.objects("tool_calls", MAX_CALLS):
        if call.text("type", MAX_NAME) not in ("", "function"):
            raise call.error("type", "only function calls are supported")
        CALL.check(call)
        function = call.object("function")
        CALL_FUNCTION.check(function)
        name = function.text("name", MAX_NAME)
        if not name:
            raise function.error("name", "it is missing")
        ids.append(call.text("id", MAX_NAME))
        calls.append(ToolCall(name, read_arguments(function)))
    return Message("assistant", content.strip(), thought.strip(), tuple(calls)), ids


def _content(message: Fields) -> str:
    """Return the text of a message, which may be split into parts."""
    content = message.values.get("content")
    if isinstance(content, list):
        return "".join(_parts(message))
    if content is None:
        raise message.error("content", "it is missing")
    return message.text("content")


def _parts(message: Fields) -> Iterator[str]:
    for part in message.objects("content", MAX_PARTS):
        kind = part.text("type", MAX_NAME)
        if kind not in ("text", "refusal"):
            raise unsupported_part(part, kind)
        PART.check(part)
        yield part.text("text" if kind == "text" else "refusal")
