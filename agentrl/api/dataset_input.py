"""Datasets that are passed as Python values. Each one is written once to a JSON-lines file, which is named by the hash of its
content.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.api.store import write_once
from agentrl.workflow.datasets import Dataset
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.settings import Settings
from agentrl.workflow.trajectory import Task

MAX_ROWS = 10_000_000
REFERENCES = ("answer", "reference")
EXAMPLE = 'Write {"question": "What is 2 + 3?", "answer": "5"}, or {"messages": [...], "reference": ...}.'


def name_of(dataset: Any, what: str, where: Settings) -> str | None:
    """Return the config's name for a dataset. Rows are written to a file, and the file's path is the name. Raise DatasetError
    if `dataset` has another type, it is empty, or a row cannot be written.

    Args:
        dataset: a name, a path, rows as mappings or Tasks, a Hugging Face dataset, or a DataFrame.
        what: "train" or "val", a part of the file's name.
        where: the settings with the data folder.

    Returns:
        The name or path; None for a `Dataset` object.
    """
    if isinstance(dataset, str | Path):
        return str(dataset)
    if isinstance(dataset, Dataset):
        return None
    lines = [_line(number, row) for number, row in enumerate(_read(dataset, what))]
    if not lines:
        raise DatasetError(f"The {what}_dataset is empty.", EXAMPLE)
    text = "\n".join(lines) + "\n"
    file = where.root / "datasets" / f"{what}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    write_once(file, text)
    return str(file)


def has_references(file: Path) -> bool:
    """Return True if at least one row of the file has a reference answer."""
    with file.open(encoding="utf-8") as lines:
        return any(json.loads(line).get(name) is not None for line in lines for name in REFERENCES)


def _read(dataset: Any, what: str) -> Iterator[Any]:
    rows, number = iter(_rows(dataset)), 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            message = f"The {what}_dataset raised after {format_count(number, 'row')}: {type(error).__name__}: {error}."
            raise DatasetError(message, "Nothing was submitted. Fix the dataset, and pass it again.") from error
        if number == MAX_ROWS:
            message = f"The {what}_dataset has more than {MAX_ROWS} rows."
            raise DatasetError(message, "Pass fewer rows: itertools.islice(rows, 1000).")
        number += 1
        yield row


def _rows(dataset: Any) -> Iterable[Any]:
    if hasattr(dataset, "to_dict") and hasattr(dataset, "columns"):  # a DataFrame
        return list(dataset.to_dict("records"))
    if isinstance(dataset, Mapping) or not isinstance(dataset, Iterable):
        message = f"A dataset is a name, a path, or rows, not {type(dataset).__name__!r}"
        splits = f", of which it has several: {', '.join(map(str, islice(dataset, 8)))}" if isinstance(dataset, Mapping) else ""
        raise DatasetError(f"{message}{splits}.", EXAMPLE)
    return dataset


def _line(number: int, row: Any) -> str:
    """Return the row as a line of JSON."""
    if isinstance(row, Task):
        messages = [{"role": message.role, "content": message.content} for message in row.messages]
        row = {**row.metadata, "messages": messages, "reference": row.reference or None}
    if not isinstance(row, Mapping):
        raise DatasetError(f"Row {number} is a {type(row).__name__}, not a mapping.", EXAMPLE)
    fields = {str(key): value for key, value in row.items()}
    if not any(name in fields for name in REFERENCES):
        fields["reference"] = None
    texts = []
    for key, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise DatasetError(f"Row {number} has no value for {key!r}: it is {value}.", "Set a value, or remove the row.")
        try:
            texts.append(f"{_dump(key)}: {_dump(value)}")
        except (TypeError, ValueError, RecursionError) as error:
            raise DatasetError(f"Row {number}, {key!r:.60} cannot be written as JSON: {error}.", EXAMPLE) from error
    return f"{{{', '.join(texts)}}}"


def _dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=plain)
    text.encode()  # refuses half of a surrogate pair
    return text


def plain(value: Any) -> Any:
    """Convert a value of numpy, pandas or a similar library to a JSON value. Raise TypeError if that is impossible."""
    for name in ("tolist", "item", "isoformat"):
        if callable(getattr(value, name, None)):
            return getattr(value, name)()
    raise TypeError(f"JSON has no type for {type(value).__name__}")
