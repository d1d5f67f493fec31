"""deepseek: all calls between marks, each with its arguments in a code fence of JSON. For DeepSeek V3, R1 and its distillates.

A call is `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a line break, the fence and `<｜tool▁call▁end｜>`.

All calls are between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`. The end mark may be missing.

`deepseek_v31` is the newer form. In a name `&`, `<` and `>` are escaped as in HTML.
"""

import re
from collections.abc import Sequence
from html import escape, unescape

from agentrl.workflow.call_json import Unreadable, dump_json, make_call, scan_json
from agentrl.workflow.tool_formats import Schema, ToolFormat, append_calls, nothing_after
from agentrl.workflow.tool_formats.mistral import skip_end
from agentrl.workflow.trajectory import UNFINISHED, ToolCall

START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_NAME = r"([^\s<>{`]++)"


def marked_format(
    name: str, *, before: str = "", between: str, after: str = "", gap: str = "", marks: tuple[str, ...]
) -> ToolFormat:
    """Create the format of a version of DeepSeek.

    Args:
        before: the text of a call before its name.
        between: the text between the name and the arguments.
        after: the text after the arguments.
        gap: the text between two calls.
        marks: the marks that identify the templates of this version, in addition to those of all versions.
    """
    how = f"after {START} stand calls, {CALL}{before}NAME{between}{{...}}{after}{END_CALL}"
    opens_call = re.compile(rf"\s*+{CALL}\s*+{before}{_NAME}\s*+{between.strip()}\s*+")
    closes_call = re.compile(rf"\s*+{after.strip()}\s*+{END_CALL}")
    begun = re.compile(rf"\s*+(?:<[｜▁a-z]{{0,20}}|{CALL}[^{{]{{0,256}})?\Z")

    def read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
        end = at + len(START)
        calls: list[ToolCall] = []
        while (opens := opens_call.match(text, end)) is not None:
            arguments, end = scan_json(text, opens.end())
            calls.append(make_call(unescape(opens[1]), arguments, end))
            closes = closes_call.match(text, end)
            if closes is None:
                break
            end = closes.end()
        if begun.match(text, end) and not (calls and nothing_after(text, end)):
            raise Unreadable(UNFINISHED, len(text))
        if not calls or skip_end(text, end, CALL) > end:
            raise Unreadable(how, end)
        return tuple(calls), skip_end(text, end, END)

    def write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
        written = (
            f"{CALL}{before}{escape(call.name, quote=False)}{between}{dump_json(dict(call.arguments))}{after}{END_CALL}"
            for call in calls
        )
        return append_calls(content, f"{START}{gap.join(written)}{END}")

    return ToolFormat(
        name=name,
        begins=re.compile(START),
        certain=re.compile(rf"{START}\s*+{CALL}"),
        read=read,
        write=write,
        marks=(START, SEPARATOR, *marks),
        json=True,
    )


deepseek = marked_format(
    "deepseek", before=f"function{SEPARATOR}", between="\n```json\n", after="\n```", gap="\n", marks=("```json",)
)
