"""Objects of JSON that a database can hold: finite numbers, no endless nesting."""

import json
import math
from typing import Any

MAX_DIGITS = 4300
"""The most digits of an integer that Python reads from text."""


def read_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object of one line.

    Raises:
        ValueError: the line holds no object, or one that cannot be stored.
    """
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite, parse_int=_whole)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read (nested too deeply)") from error
    if not isinstance(row, dict):
        raise ValueError(f"must be an object, not {kind_of(row)}")
    return row


def kind_of(value: object) -> str:
    """Return JSON's name for the type of a value."""
    return {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


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
