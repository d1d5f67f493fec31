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
"""Of the text of one value that is handed out; looked at inside, for the reason, and outside, where it counts."""
LONG = 1 << 64


def encode(value: object) -> str:
    """The text of plain data.

    Raises:
        TypeError: something in it is no plain data.
        ValueError: it nests deeper than 200 levels (or contains itself).
    """
    return json.dumps(_tagged(value, 0), allow_nan=False)


def decode(text: str) -> Any:
    """The data of a text; whoever wrote it.

    To build a set of somebody's numbers may take for ever: what model-written code gave is decoded where one may be killed
    (`judging.code_judge`).

    Raises:
        ValueError: it is no text of `encode`.
    """
    try:
        return _untagged(json.loads(text, parse_constant=_refuse), 0)
    except (TypeError, RecursionError, AttributeError) as error:
        raise ValueError(f"no plain data: {error}") from error


def _tagged(value: Any, depth: int) -> Any:
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
    return _collection(value, kind, depth + 1)


def _collection(value: Any, kind: type, depth: int) -> Any:
    if kind is list:
        return [_tagged(item, depth) for item in value]
    if kind is tuple:
        return {"$tuple": [_tagged(item, depth) for item in value]}
    if kind is set or kind is frozenset:
        return {f"${kind.__name__}": sorted((_tagged(item, depth) for item in value), key=json.dumps)}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _tagged(item, depth) for key, item in value.items()}
        return {"$dict": [[_tagged(key, depth), _tagged(item, depth)] for key, item in value.items()]}
    raise TypeError(f"{kind.__name__} is no plain data")


def _untagged(data: Any, depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise ValueError("data nest too deep")
    if type(data) is list:
        return [_untagged(item, depth + 1) for item in data]
    if type(data) is not dict:
        return data
    tag = next(iter(data), "")
    if not tag.startswith("$"):
        return {key: _untagged(item, depth + 1) for key, item in data.items()}
    if len(data) != 1 or tag not in _READERS or type(data[tag]) is not (list if tag in _LISTED else str):
        raise ValueError(f"{tag!r:.40} is no tag, or holds something else")
    return _READERS[tag](_untagged(data[tag], depth + 1))


def _special(text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"{text!r:.40} is no special float")
    return float(text)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


_LISTED = ("$tuple", "$set", "$frozenset", "$dict")
_READERS: dict[str, Any] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$float": _special,
    "$int": lambda text: int(text, 16),
    "$bytes": bytes.fromhex,
}
