"""Values cut to a size that a page can show, each with what was left out."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

SHOWN_CHARS = 20_000
"""The most characters of a text in an answer."""
LISTED_CHARS = 2000
"""The most characters of a text in a row of a list."""
MAX_DEPTH = 40
"""The deepest value that is shown as one."""


def cut_rows(rows: Iterable[Mapping[str, Any]], most: int = LISTED_CHARS) -> list[Mapping[str, Any]]:
    """Return the rows, long values cut; a row that lost something says in `cut` of which column, and how many characters it
    has.
    """
    return [_cut_row(row, most) for row in rows]


def cut_texts(row: Mapping[str, Any], most: int = LISTED_CHARS) -> dict[str, Any]:
    """Return the row, only its long texts cut; `cut` as `cut_rows` says it."""
    cut = {name: len(value) for name, value in row.items() if isinstance(value, str) and len(value) > most}
    return {**row, **{name: row[name][:most] for name in cut}, **({"cut": cut} if cut else {})}


def _cut_row(row: Mapping[str, Any], most: int) -> Mapping[str, Any]:
    parts = {name: cut_value(value, most) for name, value in row.items() if isinstance(value, str | dict | list)}
    cut = {name: size for name, (_, size) in parts.items() if size is not None}
    return {**row, **{name: parts[name][0] for name in cut}, "cut": cut} if cut else row


def cut_value(value: Any, most: int = SHOWN_CHARS) -> tuple[Any, int | None]:
    """Return a value of JSON's kinds as it is, and None; a larger one as the beginning of its text, and how many characters it
    has.
    """
    if isinstance(value, str):
        return value[:most], len(value) if len(value) > most else None
    if not isinstance(value, dict | list):
        return value, None
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):
        return "(not shown: nested too deep, or a number is too long)", 0
    shallow = len(text) <= most and _depth(text) <= MAX_DEPTH
    return (value, None) if shallow else (text[:most], len(text))


def _depth(text: str) -> int:
    """About how deep a value's text nests: brackets in texts count too."""
    deepest = depth = 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        deepest = max(deepest, depth)
    return deepest
