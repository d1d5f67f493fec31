"""Files of traces: what an exporter would post, one JSON document, one a line, or protobuf; compressed with gzip or not."""

from collections.abc import Iterator
from pathlib import Path

from agentrl.workflow.errors import DatasetError
from agentrl.workflow.spans import Span
from agentrl.workflow.spans.otlp import JSON, PROTOBUF, Bounds, OtlpError, decode, inflated

LARGEST = Bounds(bytes=256 * 2**20, spans=200_000, values=5_000_000, fields=20_000_000)
"""Of a file."""
_GZIP = b"\x1f\x8b"


def read_traces(path: Path) -> list[Span]:
    """The spans of a file.

    Raises:
        DatasetError: it cannot be read, or holds no traces; the line is named.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST.bytes + 1)
    except OSError as error:
        raise DatasetError(f"Cannot read the traces {str(path)!r}: {error.strerror}.", "Check the path.") from error
    if len(data) > LARGEST.bytes:
        raise DatasetError(f"{str(path)!r} has more than {LARGEST.bytes} bytes.", "Split it, and import the parts.")
    found: list[Span] = []
    for where, each in _documents(path, data):
        try:
            found += each
        except OtlpError as error:
            raise DatasetError(f"{where} is no export of traces: {error}.", "OTLP is read, as JSON or protobuf.") from None
        if len(found) > LARGEST.spans:
            raise DatasetError(f"{str(path)!r} has more than {LARGEST.spans} spans.", "Split it, and import the parts.")
    return found


def _documents(path: Path, data: bytes) -> Iterator[tuple[str, Iterator[Span]]]:
    """Each document of the file by its place, decoded as its spans are asked for."""
    named = repr(str(path))
    if data[:2] == _GZIP:
        data = _inflated(path, data)
    if data.lstrip()[:1] != b"{":
        yield named, _spans(data, PROTOBUF)
        return
    lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if len(lines) > 1 and lines[0][1].rstrip()[-1:] == b"}" and lines[1][1].lstrip()[:1] == b"{":
        for number, line in lines:
            yield f"Line {number} of {named}", _spans(line, JSON)
    else:
        yield named, _spans(data, JSON)


def _spans(data: bytes, kind: str) -> Iterator[Span]:
    yield from decode(data, kind, bounds=LARGEST)


def _inflated(path: Path, data: bytes) -> bytes:
    try:
        return inflated(data, "gzip", LARGEST.bytes)
    except OtlpError as error:
        raise DatasetError(f"{str(path)!r} cannot be read: {error}.", "Is it the right file?") from None
