"""lfm2: all calls between marks, `<|tool_call_start|>[name(arg=1), ...]<|tool_call_end|>`. For LFM2 and LFM2.5.

The list is Python, as in `pythonic`. If the prompt asks for JSON, the list is `[{"name": ..., "arguments": {...}}, ...]`. In
both forms, text may contain raw line breaks.
"""

import re
from collections.abc import Sequence

from agentrl.workflow.tool_formats import Schema, ToolFormat, append_calls
from agentrl.workflow.tool_formats.mistral import read_call_list, skip_end
from agentrl.workflow.tool_formats.pythonic import CallReader, check_length, read_list, spell_list
from agentrl.workflow.trajectory import ToolCall

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
_JSON = re.compile(r"\s*+(?=\[\s*+\{|\{)")
_LIST = re.compile(r"\s*+(?=\[)")
_HOW = f"after {START} there must be a list, [name(arg=1), ...]"


def _read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
    begin = at + len(START)
    if (json := _JSON.match(text, begin)) is not None:
        calls, end = read_call_list(text, json.end(), _HOW)
        return calls, skip_end(text, end, END)
    opens = _LIST.match(text, begin)
    if opens is None:
        raise CallReader(text, begin, _HOW).wrong()
    calls, end = read_list(text, opens.end())
    return check_length(calls, at, skip_end(text, end, END))


def _write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
    return append_calls(content, f"{START}{spell_list(calls)}{END}")


lfm2 = ToolFormat(
    name="lfm2",
    begins=re.compile(re.escape(START)),
    certain=re.compile(re.escape(START) + r"\s*+[\[{]"),
    read=_read,
    write=_write,
    marks=("<|tool_list_start|>",),
    json=True,
)
