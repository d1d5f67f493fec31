"""JSON objects that a database can store: with finite numbers and limited nesting."""

import codecs
import json
import math
from collections import Counter
from typing import Any

MAX_DIGITS = 4300
"""The maximum number of digits of an integer that Python parses."""
MAX_COLUMNS = 1000
MAX_LEVELS = 200
"""The maximum number of nested levels of lists and objects. Python's encoder raises RecursionError somewhere below 1000."""
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_object(line: bytes) -> dict[str, Any]:
    """Parse one line as a JSON object. Raise ValueError if the line is not a JSON object, or the object cannot be stored."""
    try:
        row = _decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        hint = ", but UTF-16: convert it with iconv -f UTF-16 -t UTF-8" if line.startswith(_UTF16) else ""
        raise ValueError(f"not UTF-8 (byte {error.start + 1}){hint}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read (nested too deeply)") from error
    if not isinstance(row, dict):
        raise ValueError(f"must be an object, not {kind_of(row)}")
    if len(row) > MAX_COLUMNS:
        raise ValueError(f"has {len(row)} columns; at most {MAX_COLUMNS} are read")
    if line.count(b"[") + line.count(b"{") > MAX_LEVELS and _is_deep(row):
        raise ValueError(f"nested more than {MAX_LEVELS} levels")
    return row


def kind_of(value: object) -> str:
    """Return the name of a value's JSON type."""
    return {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {name!r:.80} stands twice in one object")
    return values


def _is_deep(row: dict[str, Any]) -> bool:
    level: list[Any] = [row]
    depth = 0
    while level and depth <= MAX_LEVELS:
        nested = (container.values() if isinstance(container, dict) else container for container in level)
        level = [value for values in nested for value in values if isinstance(value, dict | list)]
        depth += 1
    return depth > MAX_LEVELS


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a valid JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is too large; write it as text")
    return int(text)


_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole).decode
