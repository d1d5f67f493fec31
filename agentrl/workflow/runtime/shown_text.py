"""Prepares values and texts of models, tools and users for display: cleaned, shortened and on one line."""

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

# A terminal's title or link ends, and soon: of one without an end only the beginning is removed.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]{0,500}(?:\x07|\x1b\\)|[ -/]*[0-~])")
# Control characters but \t and \n; marks that turn the direction of text; invisible characters, and line ends of other systems;
# half surrogate pairs.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\u00ad\u180e\u200b\u2028\u2029\u2060-\u2064\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)
CELL_CHARS = 60
MAX_DEPTH = 100
"""The most nested levels of a value that are shown. Deeper values become `...`."""
MAX_BITS = 10_000
"""The most bits of an integer that is written in decimal. Python writes integers of at most 4300 digits."""
MAX_DIGITS = 300
"""The most digits of a Postgres number that is written as a number. No float has more digits."""

Line = tuple[str, str]
"""A text of one or more lines, and the name of its style in rich."""


def clean(text: str) -> str:
    """Remove terminal escapes from the text, and replace other control characters by U+FFFD."""
    return _CONTROLS.sub("\ufffd", _ESCAPES.sub("", text.replace("\r\n", "\n")))


def one_line(text: str, limit: int = CELL_CHARS) -> str:
    """Return the cleaned text on one line of at most `limit` characters."""
    flat = " ".join(clean(text[: 4 * limit + 1000]).split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def cell(value: Any) -> str:
    """Return a value as a short text on one line."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return one_line(str(plain(value)))
        case float():
            return f"{value:.4g}"
        case datetime():
            return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
        case bytes() | memoryview():
            return f"<{len(value)} bytes>"
        case dict() | list():
            return one_line(json.dumps(plain(value), ensure_ascii=False))
        case _:
            return one_line(str(value))


def plain(value: Any, depth: int = 0) -> Any:
    """Convert a value to JSON types: times to ISO 8601, bytes to hex, NaN and infinity to null, long numbers to text."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if value.bit_length() <= MAX_BITS else hex(value)
        case float():
            return value if math.isfinite(value) else None
        case datetime():
            return value.astimezone(UTC).isoformat()
        case bytes() | memoryview():
            return bytes(value).hex()
        case Mapping() | list() | tuple() if depth >= MAX_DEPTH:
            return "..."
        case Mapping():
            return {str(key): plain(item, depth + 1) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, depth + 1) for item in value]
        case Decimal():  # Postgres' type of a sum
            return _plain_number(value)
        case _:
            return str(value)


def _plain_number(value: Decimal) -> int | float | str | None:
    if not value.is_finite():
        return None
    if value.adjusted() > MAX_DIGITS:
        return str(value)
    return int(value) if value == value.to_integral_value() else float(value)


def format_count(number: int, noun: str) -> str:
    """Return the number with the noun in singular or plural: `1 call`, `2 calls`."""
    return f"{number} {noun}{'s' * (number != 1)}"
