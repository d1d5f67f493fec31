"""A tool format of somebody's own: `CALL name {...}` at the end of a turn."""

import re
from collections.abc import Sequence

from agentrl.workflow.call_json import dump_json, make_call, scan_json
from agentrl.workflow.tool_formats import Schema, ToolFormat
from agentrl.workflow.trajectory import ToolCall

_CALL = re.compile(r"CALL (\w+) ")


def _read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
    begun = _CALL.match(text, at)
    assert begun is not None
    arguments, end = scan_json(text, begun.end())
    return (make_call(begun[1], arguments, end),), end


def _write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
    return content + "".join(f"CALL {call.name} {dump_json(dict(call.arguments))}" for call in calls)


shouted = ToolFormat(name="shouted", begins=_CALL, read=_read, write=_write)
