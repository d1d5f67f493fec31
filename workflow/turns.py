"""What a sampled turn says: its thought, its tool calls and the rest. Reading never fails, and is linear in the text.

`<think>...</think>` at its beginning is its thought, each `<tool_call>{json}</tool_call>` a call, the rest its content. A call
is an object with a "name" and "arguments", which are an object or a string that holds one. A call that cannot be read carries
its `error`, which the model is told, and its text stays where it stood, so that nothing the model wrote is lost:

- no JSON, or a key that stands twice in one object, wherever in the call;
- longer, deeper or with longer numbers than the limits below, which are looked at before anything is decoded into a value
  that would be slow to compare or to store;
- one that begins inside of a `<think>` which was not closed. Inside of one that was closed a call is thought, and none;
- one at the end of the turn without its closing tag, if its object is not complete either (`UNCLOSED`). Complete it is a call.
"""

import json
import re
from collections import Counter
from typing import Any

from workflow.trajectory import UNCLOSED, Message, ToolCall

MAX_CALLS = 1000
"""In one turn; what comes after them is one call that cannot be read."""

MAX_CHARACTERS = 524_288
"""Of a call: what a tool takes at most (see `workflow.agent.refusal`) fits in, however its characters are escaped."""

MAX_NESTING = 64
"""Objects and arrays within each other in one tool call; whatever stores and sends a call recurses over them."""

MAX_DIGITS = 4300
"""Of a whole number: Python's own limit, as long as nobody changed it."""

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(f"(?P<thought>{THINK}.*?(?P<end>{END_THINK}|\\Z))|{CALL}(?P<call>.*?)(?P<close>{END_CALL}|\\Z)", re.DOTALL)
_BEGINS = re.compile(f"{CALL}\\s*\\{{")

IN_THOUGHT = f"a call inside a {THINK} that is not closed is not made; write {END_THINK} first, then the call"


def parse_text(text: str) -> Message:
    """The assistant's message that a sampled text (without its end-of-turn token) spells.

    A call that cannot be read becomes `ToolCall("", {}, error=...)` and its text stays in the content, or in the thought.
    """
    thought, rest = _split_thought(text.replace("\0", "\ufffd"))
    calls = [] if rest is not None else _lost(thought)

    def take(block: re.Match[str]) -> str:
        if len(calls) > MAX_CALLS:
            return block.group()
        if block["thought"] is not None:
            calls.extend([] if block["end"] else _lost(block["thought"]))
            return block.group()
        too_many = _unreadable(f"a turn may have {MAX_CALLS} calls, not more; what follows them was not read")
        call = _read_call(block["call"], bool(block["close"])) if len(calls) < MAX_CALLS else too_many
        calls.append(call)
        return block.group() if call.error else ""

    content = _BLOCK.sub(take, rest or "")
    return Message("assistant", content.strip(), thought=thought.strip(), tool_calls=tuple(calls))


def _split_thought(text: str) -> tuple[str, str | None]:
    """Thought and rest; None where the thought has no end.

    Some templates open `<think>` in the generation prompt: then only its end was sampled.
    """
    opened = text.lstrip().startswith(THINK)
    head, _, _ = text.partition(CALL)
    if not opened and END_THINK not in head:
        return "", text
    thought, end, rest = text.partition(END_THINK)
    return thought.lstrip().removeprefix(THINK) if opened else thought, rest if end else None


def _lost(thought: str) -> list[ToolCall]:
    """What the model is told of calls in a thought that has no end; one word for all of them."""
    return [_unreadable(IN_THOUGHT)] if _BEGINS.search(thought) else []


def _read_call(text: str, closed: bool) -> ToolCall:
    try:
        call, why = decoded(text)
    except ValueError as error:
        nested = f"{CALL} inside {CALL}; " if CALL in text else ""
        return _unreadable(f"{nested}{error}" if closed else UNCLOSED)
    if not closed and not isinstance(call, dict):
        return _unreadable(UNCLOSED)  # `12` may be the beginning of `123`
    if why:
        return _unreadable(why)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return _unreadable('a call is an object with a "name" and "arguments"')
    return read_arguments(call["name"], call.get("arguments", {}))


def read_arguments(name: str, arguments: object) -> ToolCall:
    """The call of a tool by that name, its arguments an object or a string that holds one; else an unreadable one."""
    why = ""
    if isinstance(arguments, str):
        try:
            arguments, why = decoded(arguments)
        except ValueError as error:
            return _unreadable(f'"arguments" must be an object; they are a string, and it holds {error}')
    if why or not isinstance(arguments, dict):
        return _unreadable(why or f'"arguments" must be an object, not {type(arguments).__name__}')
    return ToolCall(name, arguments)


def decoded(text: str) -> tuple[Any, str]:
    """The value of a JSON text that somebody else wrote, and why it cannot be taken as it is; empty where it can.

    Raises:
        ValueError: it is none, or longer than a call may be.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"more than {MAX_CHARACTERS} characters, which a call may have at most")
    twice: list[str] = []

    def take(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs) and not twice:
            twice.append(Counter(key for key, _ in pairs).most_common(1)[0][0])
        return made

    try:
        value = json.loads(text, object_pairs_hook=take, parse_int=_whole)
        if _nesting(value) > MAX_NESTING:
            return value, f"a call may nest {MAX_NESTING} objects and arrays within each other, not more"
        # What cannot be written back (NaN, 1e999, half a surrogate pair) cannot be stored either.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no valid JSON: {error}") from error
    return value, f"the key {json.dumps(twice[0][:100])} stands twice in one object; give it once" if twice else ""


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number may have {MAX_DIGITS} digits, not more")
    return int(digits)


def _nesting(value: Any) -> int:
    """How many objects and arrays stand within each other; counted level by level, without recursion."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def _unreadable(why: str) -> ToolCall:
    return ToolCall("", {}, error=why)
