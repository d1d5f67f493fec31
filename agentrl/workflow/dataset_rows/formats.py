"""Readers for files of rows: JSON lines, CSV, Parquet, Arrow. Each reader yields one row at a time, and refuses rows that are
too large.

Text is UTF-8, with or without a byte-order mark, and lines end with LF or CRLF. All values of a CSV file are text. Columns of
bytes, such as images, are left out. NaN becomes null, and a date becomes ISO text.
"""

import codecs
import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from agentrl.workflow.dataset_rows.json_objects import MAX_COLUMNS, read_object
from agentrl.workflow.errors import DatasetError

MAX_ROW_BYTES = 8_000_000
MAX_DEPTH = 32
"""The maximum number of nested levels of lists and structures in a column."""
BATCH_ROWS = 256
"""The number of rows that are decoded at once. It is small, because a compressed file may store one large value that every row
has.
"""
SKIPPED_BYTES = 1 << 20


class SourceRow(NamedTuple):
    """A row of a dataset: its columns, or the reason why the row cannot be read.

    Args:
        label: the prefix of the row's permanent key, `LABEL/NUMBER`.
        number: the row's number, counted from 1: the line in a text file, the row in another file.
        where: the unit of the number: `line`, or `train.parquet, row`.
    """

    label: str
    number: int
    where: str
    values: dict[str, Any] | None
    problem: str = ""

    @property
    def place(self) -> str:
        """The position of the row, for messages: `line 7`, `train.parquet, row 7`."""
        return f"{self.where} {self.number}"

    def columns(self) -> dict[str, Any]:
        """Return the columns. Raise ValueError if the row cannot be read; the message says why."""
        if self.values is None:
            raise ValueError(self.problem)
        return self.values


Reader = Callable[[Path, str, str], Iterator[SourceRow]]


def read_rows(path: Path, label: str = "", where: str = "") -> Iterator[SourceRow]:
    """Yield the rows of a file. The file's suffix, in lower or upper case, selects the reader (`READERS`). `label` is the
    prefix of the rows' keys. In messages, a row is called `where`, then "line" or "row", then the row's number. Raise
    DatasetError if the file does not exist, it does not have the format of its suffix, or the suffix is unknown.
    """
    suffix = path.suffix.lower()
    if suffix not in READERS:
        hint = f"Write its rows as {', '.join(READERS)}."
        if suffix == ".json":
            hint += f" With jq: jq -c '.[]' {path.name} > {path.stem}.jsonl"
        raise DatasetError(f"Unknown format of the dataset {str(path)!r}.", hint)
    unit = "row" if suffix in (".parquet", ".arrow") else "line"
    try:
        check_regular(path)
        yield from READERS[suffix](path, label, where + unit)
    except OSError as error:
        if error.strerror is None:  # pyarrow's, of a file that is damaged
            raise _arrow_error(path, error) from error
        reason = error.strerror
        raise DatasetError(f"Cannot read the dataset {str(path)!r}: {reason}.", "Check the path.") from error


def check_regular(path: Path) -> None:
    """Raise DatasetError for a pipe or device, which may have no end or block."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DatasetError(f"Cannot read the dataset {str(path)!r}: it is a pipe or a device.", "Write its rows into a file.")


def parse_json_lines(lines: Iterable[bytes], label: str = "", where: str = "line") -> Iterator[SourceRow]:
    """Yield the object of each line that is not blank."""
    for number, raw in enumerate(lines, start=1):
        line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        if len(line) > MAX_ROW_BYTES:
            yield SourceRow(label, number, where, None, _size_problem(len(line)))
        elif line.strip():
            try:
                yield SourceRow(label, number, where, read_object(line))
            except ValueError as error:
                yield SourceRow(label, number, where, None, str(error))


def _read_json_lines(path: Path, label: str, where: str) -> Iterator[SourceRow]:
    with path.open("rb") as file:
        yield from parse_json_lines(_bounded_lines(file), label, where)


def _bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines that the file has now."""
    end = os.fstat(file.fileno()).st_size  # a writer may append as fast as this reads
    while file.tell() < end and (line := file.readline(MAX_ROW_BYTES + 1)):
        yield line
        while len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            line = b"x" * (MAX_ROW_BYTES + 1) if len(rest := file.readline(SKIPPED_BYTES)) == SKIPPED_BYTES else rest
            if not rest or rest.endswith(b"\n"):
                break


def _read_csv(path: Path, label: str, where: str, delimiter: str = ",") -> Iterator[SourceRow]:
    csv.field_size_limit(MAX_ROW_BYTES)
    with path.open("rb") as file:
        reader = csv.reader(_text_lines(path, file), delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            _check_columns(path, names)
            _check_delimiter(path, names, delimiter)
            line = reader.line_num + 1
            for fields in reader:
                if fields:
                    yield SourceRow(label, line, where, *_csv_values(names, fields))
                line = reader.line_num + 1
        except csv.Error as error:
            message, hint = f"{str(path)!r}, line {reader.line_num}: not CSV ({error}).", "Close its quotes."
            if "new-line character" in str(error):
                message = f"{str(path)!r}, line {reader.line_num}: a line ends with CR alone."
                hint = f"Convert it: tr '\\r' '\\n' < {path.name} > lf-{path.name}"
            raise DatasetError(message, hint) from error


def _text_lines(path: Path, file: BinaryIO) -> Iterator[str]:
    for number, raw in enumerate(_bounded_lines(file), start=1):
        if len(raw) > MAX_ROW_BYTES:
            raise DatasetError(f"{str(path)!r}, line {number}: {_size_problem(len(raw))}.", "Remove the row.")
        try:
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            yield line.removesuffix(b"\r\n").decode() + "\n" if line.endswith(b"\r\n") else line.decode()
        except UnicodeDecodeError as error:
            message = f"{str(path)!r}, line {number}: not UTF-8 (byte {error.start + 1})."
            source = "UTF-16" if raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "WINDOWS-1252"
            raise DatasetError(message, f"Convert it: iconv -f {source} -t UTF-8 {path.name} > utf8-{path.name}") from error


def _csv_values(names: list[str], fields: list[str]) -> tuple[dict[str, Any] | None, str]:
    size = sum(map(len, fields))
    if size > MAX_ROW_BYTES:
        return None, _size_problem(size)
    if len(fields) != len(names):
        return None, f"has {len(fields)} fields, and the header {len(names)}"
    return dict(zip(names, fields, strict=True)), ""


def _check_columns(path: Path, names: list[str]) -> None:
    """Raise DatasetError if there is no column or too many, or if a name is empty or occurs twice."""
    if not names:
        raise DatasetError(f"{str(path)!r} names no columns.", "Write the names of its columns into its first row.")
    repeated = next((name for name in names if names.count(name) > 1), None) if len(names) <= MAX_COLUMNS else None
    if len(names) > MAX_COLUMNS:
        raise DatasetError(f"{str(path)!r} has {len(names)} columns; at most {MAX_COLUMNS} are read.", "Leave some out.")
    if not all(name.strip() for name in names):
        raise DatasetError(f"{str(path)!r} has a column without a name.", "Write the names of its columns into its first row.")
    if repeated is not None:
        raise DatasetError(f"{str(path)!r} has two columns called {repeated!r}.", "Rename one.")


def _check_delimiter(path: Path, names: list[str], delimiter: str) -> None:
    """Raise DatasetError if a character other than the delimiter separates the columns."""
    if len(names) == 1 and (mark := next((mark for mark in ";\t|" if mark in names[0]), "")):
        separator = f"it has {mark!r} where the separator {delimiter!r} is expected"
        message = f"{str(path)!r} has only one column, {names[0]!r:.200}: {separator}."
        raise DatasetError(message, "Separate its columns by commas, or by tabs in a file called .tsv.")


def _read_parquet(path: Path, label: str, where: str) -> Iterator[SourceRow]:
    import pyarrow  # slow to import, and only such files need it
    from pyarrow import parquet

    with path.open("rb") as source:
        try:
            with parquet.ParquetFile(source, pre_buffer=False) as file:
                names = _readable_columns(path, file.schema_arrow)
                yield from _decode(file.iter_batches(BATCH_ROWS, columns=names), names, label, where)
        except pyarrow.ArrowException as error:
            raise _arrow_error(path, error) from error


def _read_arrow(path: Path, label: str, where: str) -> Iterator[SourceRow]:
    import pyarrow

    with path.open("rb") as source:
        try:
            with pyarrow.ipc.open_stream(source) as stream:
                names = _readable_columns(path, stream.schema)
                yield from _decode((batch.select(names) for batch in stream), names, label, where)
        except pyarrow.ArrowException as error:
            raise _arrow_error(path, error) from error


def _arrow_error(path: Path, error: Exception) -> DatasetError:
    reason = " ".join(str(error).split())[:300].rstrip(".")
    return DatasetError(f"{str(path)!r} is not {path.suffix[1:]} that can be read: {reason}.", "Write the file again.")


def _readable_columns(path: Path, schema: Any) -> list[str]:
    _check_columns(path, list(schema.names))
    if deep := next((field.name for field in schema if _depth(field.type) > MAX_DEPTH), ""):
        raise DatasetError(f"{str(path)!r}: the column {deep!r} nests more than {MAX_DEPTH} levels.", "Leave it out.")
    return [field.name for field in schema if not _holds_bytes(field.type)]


def _depth(kind: Any) -> int:
    """Return the number of nested levels of a type. Counting stops just above the maximum."""
    level, depth = [kind], 0
    while level and depth <= MAX_DEPTH:
        level = [node.field(number).type for node in level for number in range(node.num_fields)]
        depth += 1
    return depth


def _holds_bytes(kind: Any) -> bool:
    from pyarrow import types

    is_bytes = bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))
    return is_bytes or any(_holds_bytes(kind.field(number).type) for number in range(kind.num_fields))


def _decode(batches: Iterable[Any], names: list[str], label: str, where: str) -> Iterator[SourceRow]:
    number = 1
    for whole in batches:
        odd = [name for name in names if not _is_plain(whole.schema.field(name).type)]
        for start in range(0, len(whole), BATCH_ROWS):
            batch = whole.slice(start, BATCH_ROWS)
            if (rows := _read_at_once(batch, odd)) is not None:
                yield from map(SourceRow, repeat(label), range(number, number + len(rows)), repeat(where), rows)
            else:
                for offset in range(len(batch)):
                    yield SourceRow(label, number + offset, where, *_read_alone(batch.slice(offset, 1), odd))
            number += len(batch)


def _read_at_once(batch: Any, odd: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return the values of the rows; None if the rows are too large to decode together, or a row cannot be read."""
    if batch.nbytes > MAX_ROW_BYTES:
        return None
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError):
        return None
    for name in odd:
        for values in rows:
            values[name] = plain_value(values[name])
    return rows


def _read_alone(row: Any, odd: Sequence[str]) -> tuple[dict[str, Any] | None, str]:
    """Read a batch of one row. Return its values and an empty text, or None and the reason that the row cannot be read."""
    if row.nbytes > MAX_ROW_BYTES:
        return None, _size_problem(row.nbytes)
    values = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            (value,) = column.to_pylist()
        except UnicodeDecodeError:
            return None, f"{name!r:.80} is not UTF-8"
        except (ValueError, OverflowError):  # Python's dates end with the year 9999
            return None, f"{name!r:.80} has a value that cannot be read as {column.type}"
        values[name] = plain_value(value) if name in odd else value
    return values, ""


def _is_plain(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind) or types.is_boolean(kind))


def plain_value(value: Any) -> Any:
    """Convert a value of Arrow to a JSON value: NaN to null, dates and decimals to text, maps to objects."""
    if isinstance(value, float):
        return value if value == value else None
    if isinstance(value, dict):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal | timedelta) else value


def _size_problem(size: int) -> str:
    return f"the row has more than {min(size, MAX_ROW_BYTES + 1) / 1e6:.0f} MB, which is the limit"


READERS: dict[str, Reader] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
"""A mapping from the suffix of a file to its reader."""
