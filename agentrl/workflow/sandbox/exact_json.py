"""Plain data as exact text: the arguments and the value of a call, read the same inside and outside.

None, booleans, integers, finite floats, strings, lists and dicts with string keys are written as plain JSON. Values that JSON
cannot tell apart get a tag: `{"$tuple": [...]}`, `$set`, `$frozenset`, `$dict` (a list of pairs), `$float` (nan, inf, -inf),
`$int` (hex, where it is long), `$bytes` (hex). Types are exact: an object of any other type, even of a subclass of these, is
refused, so that nothing that comes out of a sandbox brings its own `__eq__` along.

This file also runs inside: it imports only the standard library.
"""

import json
import math
from typing import Any

MAX_DEPTH = 200
MAX_CHARACTERS = 1 << 20
"""The most characters of one value handed out; checked inside, to give a reason, and outside, where it is enforced."""
LONG = 1 << 64


def encode(value: object) -> str:
    """Encodes plain data as text.

    Raises:
        TypeError: something in `value` is not plain data.
        ValueError: `value` nests deeper than 200 levels (or contains itself).
    """
    return json.dumps(_tag(value, 0), allow_nan=False)


def decode(text: str) -> Any:
    """Decodes text, trusted or not.

    Building a set of numbers that somebody chose may take for ever: values of model-written code are decoded in a process that
    may be killed (`judging.code_judge`).

    Raises:
        ValueError: `encode` writes no such text.
    """
    try:
        return _untag(json.loads(text, parse_constant=_refuse_constant), 0)
    except (TypeError, RecursionError, AttributeError) as error:
        raise ValueError(f"no plain data: {error}") from error


def _tag(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"data nest deeper than {MAX_DEPTH} levels")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -LONG < value < LONG else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": value.hex()}
    return _tag_collection(value, kind, depth + 1)


def _tag_collection(value: Any, kind: type, depth: int) -> Any:
    if kind is list:
        return [_tag(item, depth) for item in value]
    if kind is tuple:
        return {"$tuple": [_tag(item, depth) for item in value]}
    if kind is set or kind is frozenset:
        return {f"${kind.__name__}": sorted((_tag(item, depth) for item in value), key=json.dumps)}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _tag(item, depth) for key, item in value.items()}
        return {"$dict": [[_tag(key, depth), _tag(item, depth)] for key, item in value.items()]}
    raise TypeError(f"{kind.__name__} is no plain data")


def _untag(data: Any, depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise ValueError("data nest too deep")
    if type(data) is list:
        return [_untag(item, depth + 1) for item in data]
    if type(data) is not dict:
        return data
    tag = next(iter(data), "")
    if not tag.startswith("$"):
        return {key: _untag(item, depth + 1) for key, item in data.items()}
    if len(data) != 1 or tag not in _READERS or type(data[tag]) is not (list if tag in _LIST_TAGS else str):
        raise ValueError(f"{tag!r:.40} is no tag, or holds something else")
    return _READERS[tag](_untag(data[tag], depth + 1))


def _special_float(text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"{text!r:.40} is no special float")
    return float(text)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


_LIST_TAGS = ("$tuple", "$set", "$frozenset", "$dict")
_READERS: dict[str, Any] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$float": _special_float,
    "$int": lambda text: int(text, 16),
    "$bytes": bytes.fromhex,
}
