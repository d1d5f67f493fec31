"""Traces: reads the spans of a file, and groups spans by rollout.

A file contains exporter requests as one JSON document, as one JSON document per line, or as protobuf, with or without gzip. The
key of a rollout is the rollout id, or else the conversation id, or else the trace id.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from agentrl.workflow.errors import DatasetError
from agentrl.workflow.spans import Span, span_names
from agentrl.workflow.spans.otlp import JSON, PROTOBUF, Bounds, OtlpError, decode, inflated
from agentrl.workflow.spans.span_annotations import episode_named, named

TRACE_FILE_BOUNDS = Bounds(bytes=256 * 2**20, spans=200_000, values=5_000_000, fields=20_000_000)
_GZIP = b"\x1f\x8b"


def read_traces(path: Path) -> list[Span]:
    """Return the spans of a file. Raise DatasetError if the file cannot be read or is not an export of traces; for a file with
    one document per line, the error names the line.
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
    return ((number, line) for number, line in enumerate(io.BytesIO(data), 1) if line.strip())


def _spans(data: bytes, kind: str) -> Iterator[Span]:
    yield from decode(data, kind, bounds=TRACE_FILE_BOUNDS)


def _inflated(path: Path, data: bytes) -> bytes:
    try:
        return inflated(data, "gzip", TRACE_FILE_BOUNDS.bytes)
    except OtlpError as error:
        raise DatasetError(f"{str(path)!r} cannot be read: {error}.", "Is it the right file?") from None


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one rollout, ordered by start time. `key` is the rollout's id."""

    key: str
    spans: tuple[Span, ...]

    def told(self, name: str) -> str:
        """Return the first non-empty value of the attribute `name` in the spans and their resources; empty if there is none."""
        return next((str(value) for span in self.spans if (value := span.attributes.get(name, span.resource.get(name)))), "")

    @property
    def error(self) -> str | None:
        """The error of the first span that failed and has no parent; None if there is no such span."""
        return next((span.error or "error" for span in self.spans if not span.parent_id and span.error is not None), None)


def traces_of(spans: Sequence[Span]) -> list[Trace]:
    """Group the spans into rollouts. The rollouts, and the spans of each, are ordered by start time; spans with the same start
    time stay in the given order.

    A span without a rollout id gets the first rollout id in its trace; if there is none, the first conversation id; else the
    trace is a rollout. A span that was exported twice is used once. If a rollout has several attempts,
    only the spans of the attempt that began last and the spans without an attempt are used.
    """
    unique: dict[tuple[str, str], Span] = {}
    for span in spans:
        unique.setdefault((span.trace_id, span.span_id), span)
    ordered = sorted(unique.values(), key=lambda span: span.start)
    keys = _first_per_trace(ordered, episode_named)
    for trace, talk in _first_per_trace(ordered, lambda span: _of(span, span_names.CONVERSATION)).items():
        keys.setdefault(trace, talk)
    attempts = _first_per_trace(ordered, _attempt)
    attempts_by_key: dict[str, dict[str, list[Span]]] = {}
    for span in ordered:
        key = episode_named(span) or keys.get(span.trace_id) or span.trace_id
        attempts_by_key.setdefault(key, {}).setdefault(_attempt(span) or attempts.get(span.trace_id, ""), []).append(span)
    traces = [Trace(key, tuple(_of_last(some))) for key, some in attempts_by_key.items()]
    return sorted(traces, key=lambda trace: trace.spans[0].start)


def _first_per_trace(spans: Sequence[Span], read: Callable[[Span], str]) -> dict[str, str]:
    """Return, for each trace, the first non-empty value that `read` returns for its spans."""
    values: dict[str, str] = {}
    for span in spans:
        if value := read(span):
            values.setdefault(span.trace_id, value)
    return values


def _of_last(attempts: Mapping[str, list[Span]]) -> list[Span]:
    """Return the spans of the attempt that began last, and the spans without an attempt."""
    with_attempt = [some for attempt, some in attempts.items() if attempt]
    last = max(reversed(with_attempt), key=lambda some: some[0].start) if with_attempt else []
    return sorted([*last, *attempts.get("", [])], key=lambda span: span.start)


def _attempt(span: Span) -> str:
    return next((value for name in span_names.ATTEMPT if (value := _of(span, name))), "")


def _of(span: Span, name: str) -> str:
    return named(span.attributes if name in span.attributes else span.resource, name)
