"""HTML of values for notebooks. Texts of models, tools and users are escaped and shortened."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from typing import Any

MAX_CHARS = 2000
"""The most characters of a text that a notebook shows."""
CELL_CHARS = 120


def text(value: object, max_chars: int = MAX_CHARS) -> str:
    """Return a value as escaped HTML text of at most `max_chars` characters."""
    if isinstance(value, float):
        content = f"{value:.4g}"
    elif isinstance(value, datetime):
        content = f"{value:%Y-%m-%d %H:%M:%S}"
    else:
        content = "" if value is None else str(value)
    content = "".join(char if char.isprintable() or char in "\n\t" else "�" for char in content[: max_chars + 1])
    return escape(content[:max_chars] + ("…" if len(content) > max_chars else ""))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], more: bool = False) -> str:
    """Return an HTML table, with a note if there are more rows."""
    head = "".join(f"<th>{text(column, CELL_CHARS)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell, CELL_CHARS)}</td>' for cell in row)}</tr>" for row in rows)
    rest = "<p>… and more</p>" if more else ""
    return f"<div style='overflow-x:auto'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{rest}"


def folded(summary: str, body: str) -> str:
    """Return a collapsed HTML section, which opens when the reader clicks its summary."""
    return f"<details><summary>{text(summary, CELL_CHARS)}</summary>{body}</details>"


def pre(value: object) -> str:
    """Return a text as preformatted HTML."""
    return f"<pre style='white-space:pre-wrap;margin:0.2em 0 0.6em'>{text(value)}</pre>"
