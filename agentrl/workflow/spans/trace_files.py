"""Reads files of traces. A file has exporter requests as one JSON document, as one JSON document per line, or as protobuf, with
or without gzip.
"""

import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from agentrl.workflow.errors import DatasetError
from agentrl.workflow.spans import Span
from agentrl.workflow.spans.otlp import JSON, PROTOBUF, Bounds, OtlpError, decode, inflated

TRACE_FILE_BOUNDS = Bounds(bytes=256 * 2**20, spans=200_000, values=5_000_000, fields=20_000_000)
"""The limits of a file."""
_GZIP = b"\x1f\x8b"


def read_traces(path: Path) -> list[Span]:
    """Return the spans of a file.

    Raises:
        DatasetError: the file cannot be read or has no traces; the message names the line.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait for who writes into it
        raise DatasetError(f"{str(path)!r} is not a file, but a folder, a pipe or a device.", "Write the traces into a file.")
    try:
        with path.open("rb") as file:
            data = file.read(TRACE_FILE_BOUNDS.bytes + 1)
    except OSError as error:
        raise DatasetError(f"Cannot read the traces {str(path)!r}: {error.strerror}.", "Check the path.") from error
    if len(data) > TRACE_FILE_BOUNDS.bytes:
        raise DatasetError(f"{str(path)!r} has more than {TRACE_FILE_BOUNDS.bytes} bytes.", "Split it, and import the parts.")
    spans: list[Span] = []
    for count, (where, decoded) in enumerate(_documents(path, data), 1):
        try:
            spans += decoded
        except OtlpError as error:
            raise DatasetError(f"{where} is not an export of traces: {error}.", "Pass OTLP as JSON or protobuf.") from None
        if len(spans) > TRACE_FILE_BOUNDS.spans or count > TRACE_FILE_BOUNDS.spans:
            message = f"{str(path)!r} has more than {TRACE_FILE_BOUNDS.spans} spans, or lines."
            raise DatasetError(message, "Split it, and import the parts.")
    return spans


def _documents(path: Path, data: bytes) -> Iterator[tuple[str, Iterator[Span]]]:
    """Yield the place of each document in the file, and an iterator that decodes the document's spans when they are read."""
    quoted = repr(str(path))
    if data[:2] == _GZIP:
        data = _inflated(path, data)
    if data.lstrip()[:1] != b"{":
        yield quoted, _spans(data, PROTOBUF)
        return
    first = [line.strip() for _, line in islice(_lines(data), 2)]
    if len(first) > 1 and first[0][-1:] == b"}" and first[1][:1] == b"{":
        for number, line in _lines(data):
            yield f"Line {number} of {quoted}", _spans(line, JSON)
    else:
        yield quoted, _spans(data, JSON)


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not empty, with its number. Lines are read one at a time, because there may be a hundred million
    of them.
    """
    return ((number, line) for number, line in enumerate(io.BytesIO(data), 1) if line.strip())


def _spans(data: bytes, kind: str) -> Iterator[Span]:
    yield from decode(data, kind, bounds=TRACE_FILE_BOUNDS)


def _inflated(path: Path, data: bytes) -> bytes:
    try:
        return inflated(data, "gzip", TRACE_FILE_BOUNDS.bytes)
    except OtlpError as error:
        raise DatasetError(f"{str(path)!r} cannot be read: {error}.", "Is it the right file?") from None
