"""The parser of a sampled turn: its thought, its tool calls and its content. Parsing never fails, and its time is linear in the
length of the text.

`<think>...</think>` at the beginning is the thought. The tool format (`tool_formats`) finds the calls in the text after it. The
remaining text is the content. A call that cannot be parsed has an `error` for the model to read, and its text stays in the
content, so no text of the model is lost. These calls cannot be parsed:

- a text that the format would not write, or an object with a duplicate key;
- a call that is longer or deeper, or has longer numbers, than the limits of `call_json` allow. The limits are checked before
    decoding, because large values would be slow to compare or to store;
- a call that begins inside an unclosed `<think>`. Inside a closed thought, the text of a call is only thought;
- a call that the end of the turn cuts off (`UNCLOSED`, `UNFINISHED`);
- with `offered_only`, a call of a tool that was not offered. If no tool was offered, all text is content and there are no
    calls.

Small models often leave the tags out, and would then never learn to call tools. So in every format that writes JSON, a turn is
also a call if its content is one JSON object, bare or in a code fence. The object must begin with "name" or "type", name an
offered tool and have arguments. Such a call is `loose`. With `strict`, such a content stays text.
"""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from agentrl.workflow.call_json import Unreadable, decode_json, read_arguments, unreadable_call
from agentrl.workflow.tool_formats import Schema, ToolFormat
from agentrl.workflow.tool_formats.hermes import hermes
from agentrl.workflow.trajectory import Message, ToolCall

MAX_CALLS = 1000
"""The most calls in one turn. All text after the last of them becomes one unreadable call."""

THINK, END_THINK = "<think>", "</think>"
_THINK = re.compile(THINK)
_FENCED = re.compile(r"```[A-Za-z_]*+\s*+(\{.*\})\s*```", re.DOTALL)
LOOSE_BEGINS = r'\A[\s\x1c-\x1f]*+(?:```[A-Za-z_]*+\s*+)?\{\s*+"(?:name|type)"\s*+:'
"""A pattern for the beginning of a content that may be a loose call."""

IN_THOUGHT = f"a call inside a {THINK} that is not closed is not made; write {END_THINK} first, then the call"
NOT_OFFERED = "the tool {!r} was not offered; its call is not made"
TOO_MANY = f"a turn may have {MAX_CALLS} calls, not more; what follows them was not read"


def parse_text(
    text: str,
    tool_format: ToolFormat = hermes,
    tools: Sequence[Schema] = (),
    thinking: bool | None = None,
    offered_only: bool = False,
    strict: bool = False,
) -> Message:
    """Return the assistant's message in a sampled text. The text does not include its end-of-turn token.

    A call that cannot be parsed becomes `ToolCall("", {}, error=...)`, and its text stays in the content or in the thought.

    Args:
        thinking: whether the prompt ended inside a thought. None: assume so if the text closes a thought that it did not open.
        offered_only: whether only calls of `tools` are calls. The text of any other call then stays in the content.
        strict: whether a bare JSON object is text instead of a call.
    """
    thought, rest = _split_thought(text.replace("\0", "\ufffd"), tool_format, thinking)
    if offered_only and not tools:
        return Message("assistant", (rest or "").strip(), thought=thought.strip())
    offered = {str(tool["function"]["name"]) for tool in tools} if offered_only else None
    calls = [] if rest is not None else _lost_calls(thought, tool_format)
    content = _content(rest or "", tool_format, tools, calls, offered)
    loose = None if calls or strict or not tool_format.json else _loose_call(content.strip(), tools)
    if loose is not None:
        content, calls = "", [loose]
    return Message("assistant", content.strip(), thought=thought.strip(), tool_calls=tuple(calls))


def _loose_call(content: str, tools: Sequence[Schema]) -> ToolCall | None:
    """Return the call if the content is one JSON object with an offered tool's name and arguments, else None."""
    if re.match(LOOSE_BEGINS, content) is None:
        return None
    fenced = _FENCED.fullmatch(content)
    text = fenced[1] if fenced else content
    try:
        value, why = decode_json(text)
    except ValueError:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    offered = [tool["function"].get("name") for tool in tools if isinstance(tool.get("function"), Mapping)]
    if why or arguments is None or value.get("name") not in offered:
        return None
    call = read_arguments(value["name"], arguments)
    return replace(call, loose=True) if call.error is None else None


def _content(
    text: str, tool_format: ToolFormat, tools: Sequence[Schema], calls: list[ToolCall], offered: Set[str] | None
) -> str:
    """Return the text without its calls, which are appended to `calls`."""
    pieces, at = [], 0
    think, call = _THINK.search(text), tool_format.begins.search(text)
    while (think or call) and len(calls) <= MAX_CALLS:
        if call is None or (think and think.start() < call.start()):
            assert think is not None
            close = text.find(END_THINK, think.end())
            end = len(text) if close < 0 else close + len(END_THINK)
            calls += _lost_calls(text[think.start() :], tool_format) if close < 0 else []
            pieces.append(text[at:end])
        else:
            new_calls, end = _read_calls(text, call.start(), tool_format, tools, MAX_CALLS - len(calls))
            new_calls = _check_offered(new_calls, offered)
            calls += new_calls
            pieces.append(text[at : end if new_calls[-1].error is not None else call.start()])
        at = end
        # Where none was found none follows: it is not looked for again.
        think = _THINK.search(text, at) if think and think.start() < at else think
        call = tool_format.begins.search(text, at) if call and call.start() < at else call
    return "".join([*pieces, text[at:]])


def _read_calls(
    text: str, at: int, tool_format: ToolFormat, tools: Sequence[Schema], max_calls: int
) -> tuple[tuple[ToolCall, ...], int]:
    """Return the calls that begin at the index `at`, or one unreadable call, and the index at which their text ends."""
    try:
        calls, end = tool_format.read(text, at, tools)
    except Unreadable as error:
        return (unreadable_call(error.why if max_calls > 0 else TOO_MANY),), max(error.end, at + 1)
    return (calls if 0 < len(calls) <= max_calls else (unreadable_call(TOO_MANY),)), end


def _check_offered(calls: tuple[ToolCall, ...], offered: Set[str] | None) -> tuple[ToolCall, ...]:
    """Return the calls or, if one names a tool that was not offered, one unreadable call: they share one text."""
    others = [call.name for call in calls if offered is not None and call.error is None and call.name not in offered]
    return (unreadable_call(NOT_OFFERED.format(others[0][:100])),) if others else calls


def _split_thought(text: str, tool_format: ToolFormat, thinking: bool | None) -> tuple[str, str | None]:
    """Split the text into the thought and the text after it. The second is None if the thought has no end.

    Some templates open `<think>` in the generation prompt. Then only the closing tag was sampled.
    """
    opened = text.lstrip().startswith(THINK)
    if not opened and not (_closes_thought(text, tool_format) if thinking is None else thinking):
        return "", text
    thought, end, rest = text.partition(END_THINK)
    return thought.lstrip().removeprefix(THINK) if opened else thought, rest if end else None


def _closes_thought(text: str, tool_format: ToolFormat) -> bool:
    begins = tool_format.begins.search(text)
    return END_THINK in (text[: begins.start()] if begins else text)


def _lost_calls(thought: str, tool_format: ToolFormat) -> list[ToolCall]:
    """Return one unreadable call in place of all calls in a thought without an end; empty if it contains no calls."""
    return [unreadable_call(IN_THOUGHT)] if (tool_format.certain or tool_format.begins).search(thought) else []
