"""mistral: all calls in one list, `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`. For Mistral 7B v0.3 to Small 3.1.

Other keys of an object, such as "id", are ignored. The newer form is `mistral_args`.
"""

import re
from collections.abc import Sequence

from agentrl.workflow.call_json import Unreadable, make_call, scan_json, spell_json
from agentrl.workflow.tool_formats import Schema, ToolFormat, append_calls, nothing_after
from agentrl.workflow.trajectory import UNFINISHED, ToolCall

MARK = "[TOOL_CALLS]"
_LIST = re.compile(r"\s*+(?=\[)")
_HOW = f'after {MARK} stands a list, [{{"name": ..., "arguments": {{...}}}}]'


def _read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
    begin = at + len(MARK)
    found = _LIST.match(text, begin)
    if found is None or text.startswith(MARK, found.end()):
        raise Unreadable(UNFINISHED if nothing_after(text, begin) else _HOW, begin)
    value, end = scan_json(text, found.end())
    if not value or not all(isinstance(item, dict) for item in value):
        raise Unreadable(_HOW, end)
    return tuple(make_call(item.get("name"), item.get("arguments", {}), end) for item in value), end


def _write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
    said = spell_json([{"name": call.name, "arguments": dict(call.arguments)} for call in calls])
    return append_calls(content, f"{MARK} {said}")


mistral = ToolFormat(name="mistral", begins=re.compile(re.escape(MARK)), read=_read, write=_write, marks=(MARK,), json=True)
