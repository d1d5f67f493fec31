"""qwen_coder: a tag for each argument, `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

For Qwen3-Coder. If the tool's schema says that a value is text, the value is plain text. Otherwise it is JSON if it can be
parsed, else text. A text that would be parsed as another value is written in JSON's quotes. Line breaks next to the tags do not
belong to the value. The outer tags may be missing. A `</parameter>` may be missing too: the value then ends before a line that
opens a parameter, or before the end of the call.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape, unescape
from typing import Any

from agentrl.workflow.call_json import (
    MAX_CHARACTERS,
    TOO_LONG,
    Unreadable,
    decode_json,
    describe_json_error,
    dump_json,
    duplicate_key_message,
    make_call,
)
from agentrl.workflow.tool_formats import Schema, ToolFormat, append_calls, nothing_after, skip_mark
from agentrl.workflow.trajectory import UNFINISHED, ToolCall

CALL, END_CALL = "<tool_call>", "</tool_call>"
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
_TAGS = (END_PARAMETER, END_FUNCTION)
_FUNCTION = re.compile(r"(?:<tool_call>\s*+)?<function=([^<>\n]++)>\s*+")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*+)>")
_ENDS_VALUE = re.compile(r"</parameter>|\n(?=<parameter=[^<>\n]++>)|(?=</function>\s*+(?:</tool_call>|\Z))")
_END = re.compile(r"</function>(?:\s*+</tool_call>)?")
_BEGUN_CALL = re.compile(r"(?:<tool_call>\s*+)?(?:<[a-z=]*+[^<>\n]*+)?\Z")
_SPACE = re.compile(r"\s*+")
_CONSTANTS = {"True": True, "False": False, "None": None}
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
_HOW = "a call must be <tool_call><function=NAME>, <parameter=KEY>VALUE</parameter> for each argument, </function></tool_call>"

Kinds = frozenset[str]
"""The JSON types that the schema allows for a value; empty if they are unknown."""


def _read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
    opens = _FUNCTION.match(text, at)
    if opens is None:
        raise _explain_wrong(text, at, at + 1)
    name, end = unescape(opens[1]), opens.end()
    kinds = argument_kinds(name, tools)
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(text, end)) is not None:
        closes_value = _ENDS_VALUE.search(text, parameter.end())
        if closes_value is None:
            raise Unreadable(UNFINISHED, len(text))
        key, end = unescape(parameter[1]), closes_value.end()
        if key in arguments:
            raise Unreadable(duplicate_key_message(key), skip_mark(text, end, END_CALL))
        value = text[parameter.end() : closes_value.start()].removeprefix("\n").removesuffix("\n")
        arguments[key] = read_value(value, kinds.get(key, frozenset()), _stands_alone, end)
        space = _SPACE.match(text, end)
        end = space.end() if space else end
    closes = _END.match(text, end)
    if closes is None:
        raise _explain_wrong(text, end, end)
    return (make_bounded_call(name, arguments, at, closes.end()),), closes.end()


def _explain_wrong(text: str, at: int, read: int) -> Unreadable:
    if _BEGUN_CALL.match(text, at) or nothing_after(text, at):
        return Unreadable(UNFINISHED, len(text))
    return Unreadable(_HOW, skip_mark(text, read, END_CALL))


def _stands_alone(text: str) -> bool:
    """Return True if the text contains nothing that would end the value too early."""
    return _ENDS_VALUE.search(f"\n{text}\n") is None


def make_bounded_call(name: str, arguments: dict[str, Any], at: int, end: int) -> ToolCall:
    """Return the call that the text has from index `at` to `end`. Raise Unreadable if it exceeds the limits."""
    try:
        why = TOO_LONG if end - at > MAX_CHARACTERS else describe_json_error(arguments)
    except ValueError as error:
        raise Unreadable(str(error), end) from error
    if why:
        raise Unreadable(why, end)
    return make_call(name, arguments, end)


def read_value(text: str, kinds: Kinds, stands_alone: Callable[[str], bool], end: int) -> Any:
    """Return the value of a text between tags. The format `glm` uses this function too. Raise Unreadable if the value is JSON
    that exceeds the limits.

    Args:
        kinds: the JSON types that the value may have.
        stands_alone: a function that returns True for a text that needs no quotes between these tags.
        end: the index at which parsing continues if the value is refused.
    """
    value = _value(text, kinds, stands_alone)
    if isinstance(value, Unreadable):
        raise Unreadable(value.why, end)
    return value


def _value(text: str, kinds: Kinds, stands_alone: Callable[[str], bool]) -> Any:
    """Return the value of a text between the tags, or an error object if the text is JSON that exceeds the limits."""
    try:
        value, why = (_CONSTANTS[text], "") if text in _CONSTANTS else decode_json(text)
    except ValueError:
        return text
    if isinstance(value, str):
        return text if _is_plain(value, kinds, stands_alone) else value
    kind = _KINDS[type(value)]
    if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds) and "string" in kinds:
        return text
    return Unreadable(why, 0) if why else value


def _is_plain(text: str, kinds: Kinds, stands_alone: Callable[[str], bool]) -> bool:
    return stands_alone(text) and "\0" not in text and _value(text, kinds, stands_alone) == text


def spell_value(value: Any, kinds: Kinds, stands_alone: Callable[[str], bool], tags: Sequence[str]) -> str:
    """Return a text that is parsed back to the value. The text contains none of the closing `tags`."""
    if isinstance(value, str) and _is_plain(value, kinds, stands_alone):
        return value
    quoted = dump_json(value)
    for tag in tags:
        quoted = quoted.replace(tag, tag.replace("/", "\\/"))
    return quoted


def argument_kinds(name: str, tools: Sequence[Schema]) -> Mapping[str, Kinds]:
    """Return the JSON types of the tool's arguments, by name. Arguments without types in the schema are left out."""
    kinds: dict[str, Kinds] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            for key, schema in (properties if isinstance(properties, Mapping) else {}).items():
                kinds[key] = _types(schema)
    return kinds


def _types(schema: object) -> Kinds:
    if not isinstance(schema, Mapping):
        return frozenset()
    type_names = schema.get("type")
    listed = [type_names] if isinstance(type_names, str) else type_names if isinstance(type_names, list) else []
    more = schema.get("anyOf")
    inner = [_types(option) for option in more] if isinstance(more, list) else []
    return frozenset(kind for kind in listed if isinstance(kind, str)).union(*inner) if all(inner) else frozenset()


def _write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
    return append_calls(content, "\n".join(_spell_call(call, argument_kinds(call.name, tools)) for call in calls))


def _spell_call(call: ToolCall, kinds: Mapping[str, Kinds]) -> str:
    lines = (
        f"<parameter={_escape_name(key)}>\n{spell_value(value, kinds.get(key, frozenset()), _stands_alone, _TAGS)}\n"
        f"{END_PARAMETER}\n"
        for key, value in call.arguments.items()
    )
    return f"{CALL}\n<function={_escape_name(call.name)}>\n{''.join(lines)}{END_FUNCTION}\n{END_CALL}"


def _escape_name(name: str) -> str:
    return escape(name, quote=False).replace("\n", "&#10;")


qwen_coder = ToolFormat(
    name="qwen_coder",
    begins=re.compile(f"{CALL}|<function="),
    certain=re.compile(r"<function=[^<>\n]"),
    read=_read,
    write=_write,
    marks=(CALL, "<function="),
)
