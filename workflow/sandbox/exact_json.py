"""Plain data as text, exactly: what goes into a call and what comes out of it, read the same inside and outside.

None, truth values, whole numbers, finite floats, strings, lists and dicts with string keys are themselves in JSON. What JSON
cannot tell apart has a tag: `{"$tuple": [...]}`, `$set`, `$frozenset`, `$dict` (a list of pairs), `$float` (nan, inf, -inf),
`$int` (hex, where it is long), `$bytes` (hex). Types are exact: an object of any other type, a subclass of one of these too,
is refused, so that nothing which came out of a sandbox brings its own `__eq__` along.

This file also runs inside: it imports only the standard library.
"""

import json
import math
from typing import Any

MAX_DEPTH = 200
MAX_CHARACTERS = 1 << 20
"""Length of the text of one value handed out; checked inside, for the reason, and outside, where it counts."""
LONG = 1 << 64


def encode(value: object) -> str:
    """The text of plain data.

    Raises:
        TypeError: something in it is no plain data.
        ValueError: it nests deeper than 200 levels (or contains itself).
    """
    return json.dumps(_tag(value, 0), allow_nan=False)


def decode(text: str) -> Any:
    """The data of a text; whoever wrote it.

    To build a set of somebody's numbers may take for ever: what model-written code gave is decoded where one may be killed
    (`judging.code_judge`).

    Raises:
        ValueError: it is no text of `encode`.
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
