"""named: the tool's name in the tag, and its arguments as JSON inside: `<tool_call name="...">{...}</tool_call>`.

An empty tag means no arguments. In a name `"`, `&`, `<` and `>` are escaped as in HTML.
"""

import re
from collections.abc import Sequence
from html import escape, unescape

from agentrl.workflow.call_json import Unreadable, decode_json, dump_json, make_call
from agentrl.workflow.tool_formats import Schema, ToolFormat, append_calls
from agentrl.workflow.trajectory import UNFINISHED, ToolCall

CALL, END_CALL = "<tool_call name=", "</tool_call>"
_OPENS = re.compile(f'{CALL}"([^"<>]*+)"\\s*+>')


def _read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
    close = text.find(END_CALL, at)
    end = len(text) if close < 0 else close + len(END_CALL)
    opens = _OPENS.match(text, at, end)
    if opens is None:
        raise Unreadable(f'a call must begin with {CALL}"NAME">' if close >= 0 else UNFINISHED, end)
    inside = text[opens.end() : close if close >= 0 else end]
    try:
        arguments, why = decode_json(inside) if inside.strip() else ({}, "" if close >= 0 else UNFINISHED)
    except ValueError as error:
        raise Unreadable(str(error) if close >= 0 else UNFINISHED, end) from error
    if why:
        raise Unreadable(why, end)
    return (make_call(unescape(opens[1]), arguments, end),), end


def _write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
    return append_calls(content, "\n".join(map(_spell_call, calls)))


def _spell_call(call: ToolCall) -> str:
    arguments = dump_json(dict(call.arguments)).replace(END_CALL, END_CALL.replace("/", "\\/"))
    return f'{CALL}"{escape(call.name)}">\n{arguments}\n{END_CALL}'


named = ToolFormat(name="named", begins=re.compile(CALL), read=_read, write=_write, marks=(CALL,), json=True)
