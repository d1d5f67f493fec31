"""mistral_args: each call after its mark, `[TOOL_CALLS]NAME[ARGS]{...}`. Mistral Small 3.2, Magistral, Devstral and later.

An id between name and arguments, `[CALL_ID]...`, is passed over. In a name `&`, `[` and white space are written as in HTML.
"""

import re
from collections.abc import Sequence
from html import unescape

from agentrl.workflow.call_json import Unreadable, made, scanned, spelled
from agentrl.workflow.tool_formats import Schema, ToolFormat, after
from agentrl.workflow.trajectory import UNFINISHED, ToolCall

MARK, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"\s*+([^\s\[]++)(?:\[CALL_ID\][A-Za-z0-9]*+)?\[ARGS\]\s*+")
_BEGUN = re.compile(r"\s*+[^\s\[]*+(?:\[[A-Za-z0-9_\]]*+)?\Z")
_UNSPELLED = re.compile(r"[&\[\s]")


def _read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
    begin = at + len(MARK)
    opens = _NAME.match(text, begin)
    if opens is None:
        begun = _BEGUN.match(text, begin) is not None
        raise Unreadable(UNFINISHED if begun else f"after {MARK} stand a name, {ARGUMENTS} and {{...}}", begin)
    if not text.startswith("{", opens.end()):
        raise Unreadable(UNFINISHED if opens.end() == len(text) else f"after {ARGUMENTS} stands an object", opens.end())
    arguments, end = scanned(text, opens.end())
    return (made(unescape(opens[1]), arguments, end),), end


def _write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
    return after(content, "".join(map(_spelled, calls)))


def _spelled(call: ToolCall) -> str:
    name = _UNSPELLED.sub(lambda letter: f"&#{ord(letter[0])};", call.name)
    return f"{MARK}{name}{ARGUMENTS}{spelled(dict(call.arguments))}"


mistral_args = ToolFormat(
    name="mistral_args", begins=re.compile(re.escape(MARK)), read=_read, write=_write, marks=(MARK, ARGUMENTS)
)
