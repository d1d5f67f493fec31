"""Tool calls from untrusted JSON, which is bounded before it is decoded.

Every format of `tool_formats` reads through here, so that the same limits hold for all of them. Strings may contain
raw line breaks: models write code that way.
"""

import json
from collections import Counter
from json.decoder import JSONDecodeError, JSONDecoder
from typing import Any

from agentrl.workflow.trajectory import UNFINISHED, ToolCall

MAX_CHARACTERS = 524_288
"""Length of a call: what a tool takes at most (see `agent.refusal`) fits in, however its characters are escaped."""

MAX_NESTING = 64
"""Objects and arrays within each other in one tool call; whatever stores and sends a call recurses over them."""

MAX_DIGITS = 4300
"""The most digits of an integer: Python's own default limit."""

TOO_LONG = f"more than {MAX_CHARACTERS} characters, which a call may have at most"


class Unreadable(Exception):
    """A call that cannot be read.

    Args:
        why: the reason that the model is told.
        end: the end of its text, as far as it was read: reading goes on there.
    """

    def __init__(self, why: str, end: int) -> None:
        super().__init__(why)
        self.why = why
        self.end = end


class _Keys:
    """Takes the pairs of each object, and remembers the first key that stands twice in one."""

    def __init__(self) -> None:
        self.twice: str | None = None

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs) and self.twice is None:
            self.twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        return mapping

    @property
    def why(self) -> str:
        """The reason that the model is told."""
        return "" if self.twice is None else duplicate_key_message(self.twice)


def duplicate_key_message(key: str) -> str:
    """Return the message to the model about a key that it gave twice."""
    return f"the key {json.dumps(key[:100])} stands twice in one object; give it once"


def decode_json(text: str) -> tuple[Any, str]:
    """Return the value of an untrusted JSON text, and why it cannot be accepted; empty if it can.

    Raises:
        ValueError: the text is not JSON, or is longer than a call may be.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(TOO_LONG)
    keys = _Keys()
    try:
        value = json.loads(text, object_pairs_hook=keys, parse_int=parse_digits, strict=False)
        why = describe_json_error(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no valid JSON: {error}") from error
    return value, why or keys.why


def describe_json_error(value: Any) -> str:
    """Return why a decoded value cannot be accepted; empty if it can.

    Raises:
        ValueError: it cannot be written back (NaN, 1e999, half a surrogate pair), and so not stored either.
    """
    if nesting(value) > MAX_NESTING:
        return f"a call may nest {MAX_NESTING} objects and arrays within each other, not more"
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return ""


def scan_json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a place of a text, and where it ends.

    Raises:
        Unreadable: there is no acceptable value.
    """
    window = text[at : at + MAX_CHARACTERS + 1]
    keys = _Keys()
    try:
        value, length = JSONDecoder(object_pairs_hook=keys, parse_int=parse_digits, strict=False).raw_decode(window)
        why = TOO_LONG if length > MAX_CHARACTERS else describe_json_error(value) or keys.why
    except JSONDecodeError as error:
        cut = error.msg.startswith("Unterminated") or error.pos >= len(window.rstrip())
        why = f"no valid JSON: {error}" if not cut else TOO_LONG if len(window) > MAX_CHARACTERS else UNFINISHED
        raise Unreadable(why, at + (len(window) if cut else error.pos)) from error
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"no valid JSON: {error}", at + len(window)) from error
    if why:
        raise Unreadable(why, at + length)
    return value, at + length


def parse_digits(digits: str) -> int:
    """Return the integer of these digits.

    Raises:
        ValueError: there are too many digits.
    """
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number may have {MAX_DIGITS} digits, not more")
    return int(digits)


def nesting(value: Any) -> int:
    """Return the nesting depth of objects and arrays, counted level by level, without recursion."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def read_arguments(name: str, arguments: object) -> ToolCall:
    """Return the call of the tool of that name; an unreadable one unless `arguments` is an object, a string of one, or null."""
    why = ""
    arguments = {} if arguments is None else arguments
    if isinstance(arguments, str):
        try:
            arguments, why = decode_json(arguments)
        except ValueError as error:
            return unreadable_call(f'"arguments" must be an object; they are a string, and it holds {error}')
    if why or not isinstance(arguments, dict):
        return unreadable_call(why or f'"arguments" must be an object, not {type(arguments).__name__}')
    return ToolCall(name, arguments)


def make_call(name: object, arguments: object, end: int) -> ToolCall:
    """Return the call of that name with these arguments, whose text ends there.

    Raises:
        Unreadable: they do not make a call.
    """
    if not isinstance(name, str) or not name:
        raise Unreadable('a call is an object with a "name" and "arguments"', end)
    call = read_arguments(name, arguments)
    if call.error is not None:
        raise Unreadable(call.error, end)
    return call


def unreadable_call(why: str) -> ToolCall:
    """Return a call that could not be read, with the reason for the model."""
    return ToolCall("", {}, error=why)


def dump_json(value: object) -> str:
    """Return the value as JSON, as models write it.

    Raises:
        ValueError: JSON cannot express it (NaN).
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
