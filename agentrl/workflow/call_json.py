"""Parses tool calls from untrusted JSON."""

import json
from collections import Counter
from json.decoder import JSONDecodeError, JSONDecoder
from typing import Any

from agentrl.workflow.trajectory import UNFINISHED, ToolCall

MAX_CHARACTERS = 524_288
"""The most characters of one tool call.

The limit leaves room for the longest arguments that a tool accepts (see `agent.refusal`), even if every character is escaped.
"""

MAX_NESTING = 64
"""The most levels of objects and arrays in one tool call. The code that stores and sends calls recurses over them."""

MAX_DIGITS = 4300
"""The most digits of an integer; the same as Python's default limit."""

TOO_LONG = f"more than {MAX_CHARACTERS} characters, which a call may have at most"


class Unreadable(Exception):
    """A call that cannot be parsed. `why` is for the model. Parsing continues at the index `end`."""

    def __init__(self, why: str, end: int) -> None:
        super().__init__(why)
        self.why = why
        self.end = end


class _Keys:
    """A hook for the JSON decoder that remembers the first key that occurs twice in one object."""

    def __init__(self) -> None:
        self.twice: str | None = None

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs) and self.twice is None:
            self.twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        return mapping

    @property
    def why(self) -> str:
        """The error message for the model if a key occurs twice; else empty."""
        return "" if self.twice is None else duplicate_key_message(self.twice)


def duplicate_key_message(key: str) -> str:
    """Return the error message for the model about a key that occurs twice in one object."""
    return f"the key {json.dumps(key[:100])} stands twice in one object; give it once"


def decode_json(text: str) -> tuple[Any, str]:
    """Decode an untrusted JSON text. Raise ValueError if the text is not JSON, or has more than `MAX_CHARACTERS` characters.

    Returns:
        The value, and the reason why it is refused. The reason is empty if the value is accepted.
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
    """Return the reason why a decoded value is refused; empty if the value is accepted. Raise ValueError if the value cannot be
    encoded as JSON again (NaN, 1e999, half a surrogate pair), so it cannot be stored.
    """
    if nesting(value) > MAX_NESTING:
        return f"a call may nest {MAX_NESTING} objects and arrays within each other, not more"
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return ""


def scan_json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at index `at` of the text, and the index of its end. Raise Unreadable if no value
    begins at `at`.
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
    """Convert the digits to an integer. Raise ValueError if there are more than `MAX_DIGITS` digits."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number may have {MAX_DIGITS} digits, not more")
    return int(digits)


def nesting(value: Any) -> int:
    """Return the nesting depth of objects and arrays. The function counts level by level, without recursion."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def read_arguments(name: str, arguments: object) -> ToolCall:
    """Return a call with these arguments: an object, a string with one, or null. Any other value becomes an `error`."""
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
    """Return the call of the tool `name` with these arguments. `end` is the index at which the text of the call ends. The
    exception carries it. Raise Unreadable if the name or the arguments are invalid.
    """
    if not isinstance(name, str) or not name:
        raise Unreadable('a call must be an object with a "name" and "arguments"', end)
    call = read_arguments(name, arguments)
    if call.error is not None:
        raise Unreadable(call.error, end)
    return call


def unreadable_call(why: str) -> ToolCall:
    """Return a call that stands for text that could not be parsed. Its `error` is the reason, which the model reads."""
    return ToolCall("", {}, error=why)


def dump_json(value: object) -> str:
    """Return the value as JSON, in the form that models write. Raise ValueError if JSON cannot express the value (NaN)."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def json_key(value: object) -> str:
    """Return a text that is equal for equal JSON values. The order of an object's keys has no influence. 1, 1.0 and true are
    different values. NaN equals itself.
    """
    return json.dumps(value, sort_keys=True)
