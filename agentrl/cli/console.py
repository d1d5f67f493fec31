"""The output of commands: data on stdout, and everything else on stderr. On a terminal, rich draws tables; elsewhere, tables
are plain aligned columns.

Texts of models, tools, datasets and users go through `clean`, so terminal escapes and control characters never reach a
terminal. Rich's markup in such texts is never interpreted. `--json` prints one document in ASCII, which needs no cleaning.
"""

import csv
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer

from agentrl.workflow.errors import ConfigError
from agentrl.workflow.runtime.shown_text import Line, cell, clean, one_line, plain

T = TypeVar("T")
MAX_TEXT_WIDTH = 140
"""The most characters on a line of a wrapped text."""
MAX_BRANCH_CHARS = 60
"""The most characters of the lines that connect a node of a tree. Of a deeper node, only the last ones are drawn."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")]


def say(text: str) -> None:
    """Print a remark on stderr."""
    print(clean(text), file=sys.stderr)


def show(text: str) -> None:
    """Print a line of data on stdout and flush it."""
    print(clean(text), flush=True)


def show_wrapped(text: str, command: str = "") -> None:
    """Print a text on stdout, on lines as wide as the terminal, and then a command, which is never divided."""
    width = min(_width(), MAX_TEXT_WIDTH)
    lines = textwrap.wrap(clean(text), width, subsequent_indent="  ", break_on_hyphens=False)
    show_lines((line, "") for line in [*lines, *([f"  {command}"] if command else [])])


def show_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def show_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a header and the rows as comma-separated values on stdout. Lists and objects are written as JSON."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(clean, columns))
    writer.writerows([_csv_value(plain(item)) for item in row] for row in rows)


def _csv_value(item: Any) -> Any:
    text = json.dumps(item, ensure_ascii=False) if isinstance(item, dict | list) else item
    return clean(text) if isinstance(text, str) else text


def check_formats(as_csv: bool, as_json: bool) -> None:
    """Raise ConfigError if two formats were chosen."""
    if as_csv and as_json:
        raise ConfigError("--csv and --json exclude each other.", "Choose one.")


def show_list(columns: Iterable[str], rows: Sequence[Mapping[str, Any]], as_csv: bool) -> None:
    """Print all columns of a list on stdout: as comma-separated values, or as one JSON document. A row has all `columns`."""
    if as_csv:
        names = [*columns]
        show_csv(names, [[row[name] for name in names] for row in rows])
    else:
        show_json(rows)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table on stdout. On a narrow terminal, lines wrap; no column is left out."""
    show_cells([one_line(column) for column in columns], [[cell(value) for value in row] for row in rows])


def show_cells(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print a table like `show_table`. Each cell is a text on one line, and may begin with spaces."""
    if sys.stdout.isatty() and max(map(len, _align_rows(titles, cells))) + len(titles) < console().width:
        _rich_table(titles, cells)
        return
    show_lines((line, "" if index else "bold") for index, line in enumerate(_align_rows(titles, cells)))


def walk_tree(roots: Sequence[T], children: Callable[[T], Sequence[T]]) -> Iterator[tuple[str, T]]:
    """Yield each node of a tree after its parent, as (prefix, node). The prefix is the text to print before the node's name; it
    draws the lines of the tree.
    """
    nodes = [(root, "", "") for root in reversed(roots)]
    while nodes:
        node, branch, below = nodes.pop()
        yield branch[-MAX_BRANCH_CHARS:], node
        lower = children(node)
        for place in reversed(range(len(lower))):
            is_last = place + 1 == len(lower)
            nodes.append((lower[place], below + ("`- " if is_last else "|- "), below + ("   " if is_last else "|  ")))


def show_rows(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], least: Sequence[str] = (), below: Sequence[str] = ()
) -> None:
    """Print a table of the given columns, without those that have no values.

    Args:
        columns: the keys of the columns. A key may be followed by `=` and a shorter title: `sampled_tokens=tokens`.
        least: the keys that may be left out on a narrow terminal, the most important first.
        below: the keys whose values are printed on separate lines below their row.
    """
    columns_in_use = [column for column in columns if any(row[column.partition("=")[0]] not in (None, "") for row in rows)]
    width = _width()
    base = [column for column in columns_in_use if column.partition("=")[0] not in least]
    for key in least:
        wider = [column for column in columns_in_use if column in base or column.partition("=")[0] == key]
        base = wider if _natural_width(rows, wider) <= width else base
    left_out = [column.rpartition("=")[2] for column in columns_in_use if column not in base]
    columns_in_use = base
    titles, cells = [column.rpartition("=")[2] for column in columns_in_use], _cells(rows, columns_in_use)
    notes = [
        [f"    {key}: {one_line(str(row[key]), max(width - 6 - len(key), 20))}" for key in below if row[key]] for row in rows
    ]
    if any(notes):
        head, *lines = _align_rows(titles, cells)
        show_lines([(head, "bold"), *((text, "") for line, more in zip(lines, notes, strict=True) for text in (line, *more))])
    else:
        show_table(titles, cells)
    if left_out:
        say(f"Not shown at {width} columns: {', '.join(left_out)}. --json has all.")


def _width() -> int:
    """Return the width of the output in characters: the width of the terminal or COLUMNS; 100,000 if the output is a file."""
    is_limited = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return shutil.get_terminal_size().columns if is_limited else 100_000


def _cells(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[list[str]]:
    return [[cell(row[column.partition("=")[0]]) for column in columns] for row in rows]


def _natural_width(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> int:
    """Return the width of the table in characters if no line wraps."""
    titles = [column.rpartition("=")[2] for column in columns]
    return max(len(line) for line in _align_rows(titles, _cells(rows, columns)))


def _align_rows(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    padded = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in (titles, *cells)]
    return ["  ".join(row).rstrip() for row in padded]


def show_lines(lines: Iterable[Line]) -> None:
    """Print lines on stdout. On a terminal, they are styled."""
    if not sys.stdout.isatty():
        for text, _ in lines:
            print(clean(text))
        return
    from rich.text import Text

    screen = console()
    for text, style in lines:
        screen.print(Text(clean(text), style=style), soft_wrap=True)


def console(stderr: bool = False) -> Any:
    """Return a rich console that does not interpret markup."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def format_interval(measures: Mapping[str, Any]) -> str:
    """Return `low` and `high` as text, such as `95% Wilson [0.15, 0.85]`; without the method if it is not recorded."""
    whose = f"{measures['interval_by']} " if measures["interval_by"] else ""
    return f"95% {whose}[{cell(measures['low'])}, {cell(measures['high'])}]"


def format_decimals(value: float) -> str:
    """Return the number with three decimals. Numbers from 10,000 on are formatted as in `cell`."""
    return f"{value:.3f}" if abs(value) < 10_000 else cell(value)


def _rich_table(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, title in enumerate(titles):
        numbers = all(_is_number(row[index]) for row in cells)
        table.add_column(Text(title), justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(text) for text in row))
    console().print(table)


def _is_number(text: str) -> bool:
    return text == "-" or re.fullmatch(r"-?[0-9.]+(e[+-]?[0-9]+)?", text) is not None


def format_duration(seconds: float) -> str:
    """Return the duration as `75 s`, `12 min` or `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
