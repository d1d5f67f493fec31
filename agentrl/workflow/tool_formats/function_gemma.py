"""function_gemma: `<start_function_call>call:NAME{key:<escape>text<escape>,other:1}<end_function_call>`. For FunctionGemma.

Text is between `<escape>` marks, or in quotes if it contains such a mark. Numbers, lists, true, false and null are as in JSON.
Keys that are not identifiers are written as text. `brace_format` creates this format and that of Gemma 4, which has other
marks.
"""

import re
from collections.abc import Sequence
from typing import Any

from agentrl.workflow.call_json import dump_json
from agentrl.workflow.tool_formats import Schema, ToolFormat, append_calls
from agentrl.workflow.tool_formats.mistral import skip_end
from agentrl.workflow.tool_formats.pythonic import CallReader, check_length
from agentrl.workflow.trajectory import ToolCall

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def brace_format(name: str, start: str, end: str, quote: str, ends: tuple[str, ...]) -> ToolFormat:
    """Create the format of a family that writes calls in this form with its own marks.

    Args:
        start, end: the marks before and after a call.
        quote: the mark before and after a text.
        ends: special tokens that end a turn with calls.
    """
    how = f"a call must be {start}call:NAME{{key:{quote}text{quote}}}{end}"

    def read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
        reader = CallReader(text, at + len(start), how, quote)
        call = reader.braced_call()
        return check_length((call,), at, skip_end(text, reader.at, end))

    def write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
        written = (f"{start}call:{call.name}{_spell_value(dict(call.arguments), quote)}{end}" for call in calls)
        return append_calls(content, "".join(written))

    return ToolFormat(
        name=name,
        begins=re.compile(re.escape(start)),
        certain=re.compile(re.escape(start) + r"\s*+call:"),
        read=read,
        write=write,
        marks=(start,),
        ends=ends,
    )


def _spell_value(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{_spell_key(key, quote)}:{_spell_value(item, quote)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(_spell_value(item, quote) for item in value)}]"
    if isinstance(value, str) and quote not in value and "\0" not in value:
        return f"{quote}{value}{quote}"
    return dump_json(value).replace(quote[0], f"\\u{ord(quote[0]):04x}") if isinstance(value, str) else dump_json(value)


def _spell_key(key: str, quote: str) -> str:
    return key if _KEY.fullmatch(key) else _spell_value(key, quote)


function_gemma = brace_format(
    "function_gemma", "<start_function_call>", "<end_function_call>", "<escape>", ("<start_function_response>",)
)
