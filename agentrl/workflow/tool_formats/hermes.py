"""hermes: each call in tags, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. For Hermes, Qwen 2.5, Qwen 3.

If there are no "arguments", "parameters" are the arguments. A last call without its closing tag is accepted if its object is
complete; otherwise its error is `UNCLOSED`.
"""

import re
from collections.abc import Sequence

from agentrl.workflow.call_json import Unreadable, decode_json, dump_json, read_arguments
from agentrl.workflow.tool_formats import Schema, ToolFormat, append_calls
from agentrl.workflow.trajectory import UNCLOSED, ToolCall

CALL, END_CALL = "<tool_call>", "</tool_call>"


def _read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
    begin = at + len(CALL)
    close = text.find(END_CALL, begin)
    closed = close >= 0
    end = close + len(END_CALL) if closed else len(text)
    return (_call(text[begin : close if closed else end], closed, end),), end


def _call(text: str, closed: bool, end: int) -> ToolCall:
    try:
        call, why = decode_json(text)
    except ValueError as error:
        nested = f"{CALL} inside {CALL}; " if CALL in text else ""
        raise Unreadable(f"{nested}{error}" if closed else UNCLOSED, end) from error
    if not closed and not isinstance(call, dict):
        raise Unreadable(UNCLOSED, end)  # `12` may be the beginning of `123`
    if not why and not (isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"]):
        why = 'a call must be an object with a "name" and "arguments"'
    if why:
        raise Unreadable(why, end)
    tool_call = read_arguments(call["name"], call.get("arguments", call.get("parameters", {})))
    if tool_call.error is not None:
        raise Unreadable(tool_call.error, end)
    return tool_call


def _write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
    return append_calls(content, "\n".join(f"{CALL}\n{_spell_call(call)}\n{END_CALL}" for call in calls))


def _spell_call(call: ToolCall) -> str:
    return dump_json({"name": call.name, "arguments": dict(call.arguments)}).replace(END_CALL, END_CALL.replace("/", "\\/"))


hermes = ToolFormat(
    name="hermes",
    begins=re.compile(CALL),
    certain=re.compile(f"{CALL}\\s*\\{{"),
    read=_read,
    write=_write,
    marks=(CALL,),
    json=True,
)
