"""olmo3: calls as lines of Python between tags, `<function_calls>name(arg=1)</function_calls>`. For OLMo 3.

Each line is parsed like a call in a list of `pythonic`. `line_format` creates this format and those of other families that
write such lines. The closing tag may be missing at the end of a turn.
"""

import re
from collections.abc import Sequence

from agentrl.workflow.tool_formats import Schema, ToolFormat, append_calls, nothing_after
from agentrl.workflow.tool_formats.mistral import skip_end
from agentrl.workflow.tool_formats.pythonic import CallReader, check_length, spell_call
from agentrl.workflow.trajectory import ToolCall


def line_format(name: str, start: str, end: str, marks: tuple[str, ...]) -> ToolFormat:
    """Create the format of a family that writes the calls of a turn as lines of Python between two marks.

    A call may be inside of `print(...)`. `marks` are the marks that identify a template of this family.
    """
    how = f"between {start} and {end} each line is a call, name(arg=1)"

    def read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
        reader = CallReader(text, at + len(start), how)
        calls: list[ToolCall] = []
        while not calls or not (skip_end(text, reader.at, end) > reader.at or nothing_after(text, reader.at)):
            calls.append(reader.printed_call())
        return check_length(tuple(calls), at, skip_end(text, reader.at, end))

    def write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
        lines = "\n".join(map(spell_call, calls))
        return append_calls(content, f"{start}\n{lines}\n{end}")

    begins = re.compile(re.escape(start))
    return ToolFormat(name=name, begins=begins, read=read, write=write, marks=marks)


olmo3 = line_format("olmo3", "<function_calls>", "</function_calls>", ("<function_calls>",))
