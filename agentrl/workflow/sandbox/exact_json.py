"""Values as exact text, for the arguments and the return value of a call. The encoding is the same inside and outside the
sandbox.

None, booleans, integers, finite floats, strings, lists and dicts with string keys are plain JSON. Other values get a tag:
`{"$tuple": [...]}`, `$set`, `$frozenset`, `$dict` (a list of pairs), `$float` (nan, inf, -inf), `$int` (hex, for a long
integer), `$bytes` (hex), `$complex`, `$fraction`, `$decimal`, `$type` (a built-in type, by name), `$range`, `$deque`,
`$iterator` (its remaining items), and `$keys`, `$values`, `$items` of a dict.

An object of a subclass (a Counter, a named tuple, an IntEnum) is encoded as its base class, with the methods of the base class.
For any other object only the truth value is encoded (`$object`). It is decoded as an `Opaque`, which equals only itself. So a
value cannot bring code out of a sandbox, such as an `__eq__` that always returns True.

This file also runs inside and imports only the standard library.
"""

import json
import math
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

MAX_DEPTH = 200
MAX_CHARACTERS = 1 << 20
"""The maximum length of an encoded value, in characters. The process inside checks it to report the reason, and the host
enforces it.
"""
MAX_ITEMS = 100_000
"""The maximum number of items of an encoded iterator. If an iterator has more, only its truth value is encoded."""
LONG = 1 << 64


class Opaque:
    """An object of which only the truth value is known."""

    __slots__ = ("_truth",)

    def __init__(self, truth: bool) -> None:
        self._truth = truth

    def __bool__(self) -> bool:
        return self._truth


def encode(value: object) -> str:
    """Encode a value as text. Raise ValueError if `value` nests deeper than 200 levels, or contains itself. If the `__bool__`
    of an object in `value` raises an exception, this exception is passed on.
    """
    return json.dumps(_tag(value, 0), allow_nan=False)


def decode(text: str) -> Any:
    """Decode text, which may be untrusted.

    Building a set of maliciously chosen numbers may take extremely long. So values from model-written code are decoded in a
    process that can be killed (`judging.code_judge`). Raise ValueError if `encode` cannot have written this text.
    """
    try:
        return _untag(json.loads(text, parse_constant=_refuse_constant), 0)
    except (TypeError, RecursionError, AttributeError) as error:
        raise ValueError(f"not plain data: {error}") from error


def holds_opaque(text: str) -> bool:
    """Return whether an encoded value contains an object of which only the truth value is encoded."""
    return '{"$object":' in text  # in a string the quotation marks are escaped


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
    if kind in _LIST_TAG_OF:
        return {_LIST_TAG_OF[kind]: [_tag(item, depth) for item in value]}
    if kind is set or kind is frozenset:
        return {f"${kind.__name__}": sorted((_tag(item, depth) for item in value), key=json.dumps)}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _tag(item, depth) for key, item in value.items()}
        return {"$dict": [[_tag(key, depth), _tag(item, depth)] for key, item in value.items()]}
    return _tag_other(value, kind, depth)


def _tag_other(value: Any, kind: type, depth: int) -> Any:
    if kind is type and any(value is candidate for candidate in _TYPES.values()):
        return {"$type": value.__name__}
    for base, plain_copy in _PLAIN_COPIES.items():
        if issubclass(kind, base):
            return _tag(plain_copy(value), depth)
    if issubclass(kind, complex):
        return {"$complex": [_tag(complex.real.__get__(value), depth), _tag(complex.imag.__get__(value), depth)]}
    if issubclass(kind, _loaded_type("fractions", "Fraction")):
        return {"$fraction": [_tag(value.numerator, depth), _tag(value.denominator, depth)]}
    if issubclass(kind, decimal := _loaded_type("decimal", "Decimal")):
        return {"$decimal": decimal.__str__(value)}
    if issubclass(kind, deque := _loaded_type("collections", "deque")):
        return {"$deque": [_tag(item, depth) for item in deque.__iter__(value)]}
    if kind is range:
        return {"$range": [_tag(part, depth) for part in (value.start, value.stop, value.step)]}
    return _tag_iterator(value, kind, depth)


def _tag_iterator(value: Any, kind: type, depth: int) -> Any:
    """Encode an object without a plain form: an iterator's items, or any other object's truth value."""
    if hasattr(kind, "__next__") and not (hasattr(kind, "__bool__") or hasattr(kind, "__len__")):
        items = list(islice(value, MAX_ITEMS + 1))
        if len(items) <= MAX_ITEMS:
            return {"$iterator": [_tag(item, depth) for item in items]}
    return {"$object": bool(value)}


def _loaded_type(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, ())


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
    if len(data) != 1 or tag not in _READERS or type(data[tag]) is not _READERS[tag][0]:
        raise ValueError(f"{tag!r:.40} is not a known tag, or its value has another type")
    return _READERS[tag][1](_untag(data[tag], depth + 1))


def _complex(parts: list[Any]) -> complex:
    real, imaginary = parts
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError("a complex number needs two floats")
    return complex(real, imaginary)


def _fraction(parts: list[Any]) -> Any:
    from fractions import Fraction

    numerator, denominator = parts
    if type(numerator) is not int or type(denominator) is not int or denominator < 1:
        raise ValueError("a fraction needs two integers, and the second must be above 0")
    return Fraction(numerator, denominator)


def _decimal(text: str) -> Any:
    from decimal import Decimal, InvalidOperation

    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"{text!r:.40} is not a decimal number") from error


def _deque(items: list[Any]) -> Any:
    from collections import deque

    return deque(items)


def _type(name: str) -> type:
    if name not in _TYPES:
        raise ValueError(f"{name!r:.40} is not the name of a known type")
    return _TYPES[name]


def _special_float(text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"{text!r:.40} is not a special float")
    return float(text)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, object, type, type(None))
}
_LIST_TAG_OF: dict[type, str] = {
    tuple: "$tuple",
    type({}.keys()): "$keys",
    type({}.values()): "$values",
    type({}.items()): "$items",
}
_PLAIN_COPIES: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    bytearray: lambda value: bytes(bytearray.__getitem__(value, slice(None))),
    list: lambda value: list.__getitem__(value, slice(None)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
}
"""The function that copies an object, by the object's base class. It uses the methods of the base class and ignores those of a
subclass.
"""
_READERS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "$tuple": (list, tuple),
    "$set": (list, set),
    "$frozenset": (list, frozenset),
    "$dict": (list, dict),
    "$keys": (list, lambda keys: dict.fromkeys(keys).keys()),
    "$values": (list, lambda values: dict(enumerate(values)).values()),
    "$items": (list, lambda pairs: dict(pairs).items()),
    "$float": (str, _special_float),
    "$int": (str, lambda text: int(text, 16)),
    "$bytes": (str, bytes.fromhex),
    "$complex": (list, _complex),
    "$fraction": (list, _fraction),
    "$decimal": (str, _decimal),
    "$type": (str, _type),
    "$range": (list, lambda parts: range(*parts)),
    "$deque": (list, _deque),
    "$iterator": (list, iter),
    "$object": (bool, Opaque),
}
"""For each tag, the type of the tagged JSON data and the function that builds the value from that data."""
