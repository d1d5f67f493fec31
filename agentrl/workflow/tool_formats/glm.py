"""glm: a tag for each key and value, `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`. GLM 4.x.

If the tool's schema says that a value is text, the value is plain text. Otherwise it is JSON if it can be parsed, else text, as
in `qwen_coder`. A text that would be parsed as another value is written in JSON's quotes.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape, unescape
from typing import Any

from agentrl.workflow.call_json import Unreadable, duplicate_key_message
from agentrl.workflow.tool_formats import Schema, ToolFormat, append_calls, skip_mark
from agentrl.workflow.tool_formats.qwen_coder import Kinds, argument_kinds, make_bounded_call, read_value, spell_value
from agentrl.workflow.trajectory import UNFINISHED, ToolCall

CALL, END_CALL = "<tool_call>", "</tool_call>"
END_VALUE = "</arg_value>"
_NAME = re.compile(r"<tool_call>\s*+([^\s<>{]++)\s*+(?=<)")
_KEY = re.compile(r"<arg_key>([^<>]*+)</arg_key>\s*+<arg_value>")
_SPACE = re.compile(r"\s*+")
_HOW = f"a call must be {CALL}NAME, <arg_key>KEY</arg_key><arg_value>VALUE{END_VALUE} for each argument, {END_CALL}"


def _read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
    name = _NAME.match(text, at)
    if name is None:
        raise _wrong(text, at)
    kinds, end = argument_kinds(unescape(name[1]), tools), name.end()
    arguments: dict[str, Any] = {}
    while (key := _KEY.match(text, end)) is not None:
        close = text.find(END_VALUE, key.end())
        if close < 0:
            raise Unreadable(UNFINISHED, len(text))
        word, end = unescape(key[1]), close + len(END_VALUE)
        if word in arguments:
            raise Unreadable(duplicate_key_message(word), skip_mark(text, end, END_CALL))
        arguments[word] = read_value(text[key.end() : close], kinds.get(word, frozenset()), _stands_alone, end)
        space = _SPACE.match(text, end)
        end = space.end() if space else end
    if not text.startswith(END_CALL, end):
        raise _wrong(text, end)
    end += len(END_CALL)
    return (make_bounded_call(unescape(name[1]), arguments, at, end),), end


def _wrong(text: str, at: int) -> Unreadable:
    end = skip_mark(text, at, END_CALL)
    return Unreadable(_HOW, end) if text.endswith(END_CALL, at, end) else Unreadable(UNFINISHED, end)


def _stands_alone(text: str) -> bool:
    return END_VALUE not in text


def _write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
    return append_calls(content, "\n".join(_spell_call(call, argument_kinds(call.name, tools)) for call in calls))


def _spell_call(call: ToolCall, kinds: Mapping[str, Kinds]) -> str:
    pairs = (
        f"<arg_key>{escape(key, quote=False)}</arg_key>\n"
        f"<arg_value>{spell_value(value, kinds.get(key, frozenset()), _stands_alone, (END_VALUE,))}{END_VALUE}\n"
        for key, value in call.arguments.items()
    )
    return f"{CALL}{escape(call.name, quote=False)}\n{''.join(pairs)}{END_CALL}"


glm = ToolFormat(
    name="glm",
    begins=re.compile(CALL),
    certain=re.compile(r"<tool_call>\s*+[^\s<>{]++\s*+<arg_key>"),
    read=_read,
    write=_write,
    marks=(CALL, "<arg_key>"),
)
