"""mistral_args: each call after a mark, `[TOOL_CALLS]NAME[ARGS]{...}`. Mistral Small 3.2, Magistral, Devstral and later.

An id between name and arguments, `[CALL_ID]...`, is ignored. In a name `&`, `[` and white space are escaped as in HTML.
"""

import re
from collections.abc import Sequence
from html import unescape

from agentrl.workflow.call_json import Unreadable, dump_json, make_call, scan_json
from agentrl.workflow.tool_formats import Schema, ToolFormat, append_calls
from agentrl.workflow.trajectory import UNFINISHED, ToolCall

MARK, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"\s*+([^\s\[]++)(?:\[CALL_ID\][A-Za-z0-9]*+)?\[ARGS\]\s*+")
_BEGUN_CALL = re.compile(r"\s*+[^\s\[]*+(?:\[[A-Za-z0-9_\]]*+)?\Z")
_ESCAPED_CHARACTERS = re.compile(r"[&\[\s]")


def _read(text: str, at: int, tools: Sequence[Schema]) -> tuple[tuple[ToolCall, ...], int]:
    begin = at + len(MARK)
    opens = _NAME.match(text, begin)
    if opens is None:
        begun = _BEGUN_CALL.match(text, begin) is not None
        raise Unreadable(UNFINISHED if begun else f"after {MARK} there must be NAME{ARGUMENTS}{{...}}", begin)
    if not text.startswith("{", opens.end()):
        raise Unreadable(UNFINISHED if opens.end() == len(text) else f"after {ARGUMENTS} there must be an object", opens.end())
    arguments, end = scan_json(text, opens.end())
    return (make_call(unescape(opens[1]), arguments, end),), end


def _write(content: str, calls: Sequence[ToolCall], tools: Sequence[Schema]) -> str:
    return append_calls(content, "".join(map(_spell_call, calls)))


def _spell_call(call: ToolCall) -> str:
    name = _ESCAPED_CHARACTERS.sub(lambda letter: f"&#{ord(letter[0])};", call.name)
    return f"{MARK}{name}{ARGUMENTS}{dump_json(dict(call.arguments))}"


mistral_args = ToolFormat(
    name="mistral_args", begins=re.compile(re.escape(MARK)), read=_read, write=_write, marks=(MARK, ARGUMENTS), json=True
)
