"""mistral: all calls in one list, `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`. For Mistral 7B v0.3 to Small 3.1.

`mistral_args` is the newer form. `list_format` creates this format and those of other families that write a JSON list after a
mark.
"""

import re
from collections.abc import Sequence
from typing import Any

from agentrl.workflow.call_json import Unreadable, dump_json, make_call, scan_json
from agentrl.workflow.tool_formats import Schema, ToolFormat, append_calls, nothing_after
from agentrl.workflow.trajectory import UNFINISHED, ToolCall

_VALUE = re.compile(r"\s*+(?=[\[{])")


def list_format(name: str, *starts: str, end: str = "", space: str = "", marks: tuple[str, ...] = ()) -> ToolFormat:
    """Create the format of a family that writes all calls of a turn in one JSON list after a mark.

    A single object is read as a list with one call. If there are no "arguments", "parameters" are used. A call may be the value
    of "function" in another object. Other keys, such as "id", are ignored.

    Args:
        starts: the marks with which calls may begin. The first mark is written. The others are recognised only before a "[",
            because they mean something else in other families.
        end: the mark after the list, which may be missing.
        space: the text between the mark and the list.
        marks: the marks that identify a template of this family; empty: the first of `starts`.
    """
    how = f'after {starts[0]} there must be a list, [{{"name": ..., "arguments": {{...}}}}]'
    begins = "|".join([re.escape(starts[0]), *(f"{re.escape(start)}(?=\\s*+\\[)" for start in starts[1:])])

    def read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
        begin = at + len(next(start for start in starts if text.startswith(start, at)))
        match = _VALUE.match(text, begin)
        if match is None or text.startswith(starts, match.end()):
            raise Unreadable(UNFINISHED if nothing_after(text, begin) else how, begin)
        calls, after = read_call_list(text, match.end(), how)
        return calls, skip_end(text, after, end)

    def write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
        values = dump_json([{"name": call.name, "arguments": dict(call.arguments)} for call in calls])
        return append_calls(content, f"{starts[0]}{space}{values}{end}")

    return ToolFormat(
        name=name,
        begins=re.compile(begins),
        certain=re.compile(f"(?:{begins})\\s*+[\\[{{]"),
        read=read,
        write=write,
        marks=marks or starts[:1],
        json=True,
    )


def read_call_list(text: str, at: int, how: str) -> tuple[tuple[ToolCall, ...], int]:
    """Parse the JSON list, or the single object, that begins at index `at`. Return its calls and the index at which it ends.
    `how` is the error message for the model if the value is not a list of calls. Raise Unreadable if the value is not a list of
    calls. No call is returned then, even if some are valid.
    """
    value, end = scan_json(text, at)
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, dict) for item in values):
        raise Unreadable(how, end)
    return tuple(_call(item, end) for item in values), end


def _call(value: dict[str, Any], end: int) -> ToolCall:
    function = value.get("function")
    value = function if isinstance(function, dict) else value
    return make_call(value.get("name"), value.get("arguments", value.get("parameters", {})), end)


def skip_end(text: str, at: int, mark: str) -> int:
    """If only white space precedes the mark, return the index after the mark. Otherwise, return `at`."""
    match = re.compile(r"\s*+" + re.escape(mark)).match(text, at) if mark else None
    return match.end() if match else at


mistral = list_format("mistral", "[TOOL_CALLS]", space=" ")
