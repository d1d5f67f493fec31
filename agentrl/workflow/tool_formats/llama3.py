"""llama3: a turn that is an object, `{"name": ..., "parameters": {...}}`, or several with `; ` between them. For Llama 3.

`<|python_tag|>` may precede the first object, and text may precede that tag. If there are no "parameters", "arguments" are
used. A turn that begins with an object without a name is an answer.
"""

import re
from collections.abc import Sequence

from agentrl.workflow.call_json import Unreadable, dump_json, make_call, scan_json
from agentrl.workflow.tool_formats import Schema, ToolFormat, nothing_after
from agentrl.workflow.trajectory import UNFINISHED, ToolCall

MARK = "<|python_tag|>"
_HOW = f'after {MARK} there must be {{"name": ..., "parameters": {{...}}}}'
_OBJECT = re.compile(r"\s*+(?=\{)")
_NEXT = re.compile(r"\s*+(?:;\s*+)?(?=\{)")


def _read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
    end = at + len(MARK) if text.startswith(MARK, at) else at
    match = _OBJECT.match(text, end)
    if match is None:
        raise Unreadable(UNFINISHED if nothing_after(text, end) else _HOW, end)
    calls: list[ToolCall] = []
    while match is not None:
        value, end = scan_json(text, match.end())
        calls.append(_call(value, end))
        match = _NEXT.match(text, end)
    return tuple(calls), end


def _call(value: dict[str, object], end: int) -> ToolCall:
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise Unreadable('a call must be an object with a "name" and "parameters"', end)
    return make_call(value["name"], value.get("parameters", value.get("arguments", {})), end)


def _write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
    text = "; ".join(dump_json({"name": call.name, "parameters": dict(call.arguments)}) for call in calls)
    return f"{content}{MARK}{text}" if content else text


llama3 = ToolFormat(
    name="llama3",
    begins=re.compile(r'<\|python_tag\|>|\A[\s\x1c-\x1f]*+(?=\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:)'),
    certain=re.compile(r"<\|python_tag\|>\s*+\{"),
    read=_read,
    write=_write,
    marks=(MARK,),
    json=True,
    ends=("<|eom_id|>",),
)
