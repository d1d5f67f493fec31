"""Decodes the requests of an OTLP/HTTP exporter: protobuf or JSON, compressed or not, within limits.

The protobuf reader knows the fields of a span (opentelemetry-proto 1.x) and skips all other fields, as the format requires. It
counts fields, values and spans while it reads, because a parser that builds the whole message first needs 1.4 GiB for 16 MiB of
empty spans.
"""

import base64
import binascii
import json
import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from agentrl.workflow.spans import Event, Span

PROTOBUF, JSON = "application/x-protobuf", "application/json"
MAX_ATTRIBUTES = 512
MAX_EVENTS = 128
MAX_DEPTH = 24
_KNOWN_FIELDS = 16
"""One more than the largest field number that is read."""
_JSON_PARTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[{\[,]', re.DOTALL)  # *+: nothing is kept to go back to


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of an export.

    Args:
        bytes: the maximum number of bytes after decompression.
        spans: the maximum number of spans.
        values: the maximum number of attribute values in the whole export.
        fields: the maximum number of protobuf fields; a field that is read twice counts twice. For JSON, the maximum number of
            objects, lists and members.
    """

    bytes: int = 16 * 2**20
    spans: int = 2000
    values: int = 200_000
    fields: int = 750_000


POSTED = Bounds()
"""The limits of one request of an exporter."""


class OtlpError(ValueError):
    """A request body that is not an export of traces, or exceeds a limit. The error message is the reason, as a phrase."""


def decode(body: bytes, content_type: str, encoding: str = "", bounds: Bounds = POSTED) -> list[Span]:
    """Decode a body, and return its spans. `content_type` is the type of the body. Every type other than JSON is decoded as
    protobuf. `encoding` is the Content-Encoding of the request. Raise OtlpError if the body is not an export of traces, or
    exceeds the limits.
    """
    data = inflated(body, encoding, bounds.bytes)
    kind = content_type.partition(";")[0].strip().lower()
    try:
        return list((_from_json if kind == JSON else _from_protobuf)(data, _Budget(bounds)))
    except OtlpError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, struct.error, RecursionError):
        raise OtlpError("it is not an OTLP export of traces") from None


def inflated(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress the body. Raise OtlpError if the body is not compressed as `encoding` says, or has more than `max_bytes` bytes
    after decompression.
    """
    if encoding not in ("", "identity", "gzip", "deflate"):
        raise OtlpError(f"it is encoded as {encoding[:40]!r}; only gzip is supported")
    if encoding in ("", "identity"):
        return body
    try:
        inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip or zlib, as its head says
        data = inflate.decompress(body, max_bytes + 1)
    except zlib.error:
        raise OtlpError("it is not compressed as declared") from None
    if len(data) > max_bytes or inflate.unconsumed_tail:
        raise OtlpError(f"it has more than {max_bytes} bytes when it is decompressed")
    if not inflate.eof:
        raise OtlpError("the compressed data is truncated")
    return data


# protobuf


def _from_protobuf(data: bytes, budget: "_Budget") -> Iterator[Span]:
    for of_resource in _all(memoryview(data), 1, budget):
        resource = _attributes(_last(of_resource, budget).get(1, b""), 1, budget)
        for scope in _all(of_resource, 2, budget):
            for span in _all(scope, 2, budget):
                budget.spend_span()
                yield _span(span, resource, budget)


def _span(data: Any, resource: Mapping[str, Any], budget: "_Budget") -> Span:
    last = _last(data, budget)
    status = _last(last.get(15, b""), budget)
    return Span(
        trace_id=_id(bytes(_message(last.get(1, b""))).hex(), 32),
        span_id=_id(bytes(_message(last.get(2, b""))).hex(), 16),
        parent_id=_id(bytes(_message(last.get(4, b""))).hex(), 16, empty=True),
        name=_text(last.get(5, b"")),
        start=_whole(last.get(7, 0)),
        end=_whole(last.get(8, 0)),
        attributes=_attributes(data, 9, budget),
        resource=resource,
        events=tuple(_event(event, budget) for event in _few(_all(data, 11, budget))),
        error=_text(status.get(2, b"")) if status.get(3, 0) == 2 else None,
    )


def _event(data: Any, budget: "_Budget") -> Event:
    return Event(_text(_last(data, budget).get(2, b"")), _attributes(data, 3, budget))


def _attributes(data: Any, number: int, budget: "_Budget") -> dict[str, Any]:
    return _named(_pairs(_all(data, number, budget), budget, MAX_DEPTH))


def _pairs(pairs: Iterator[Any], budget: "_Budget", depth: int) -> Iterator[tuple[str, Any]]:
    for pair in pairs:
        last = _last(pair, budget)
        yield _text(last.get(1, b"")), _value(last.get(2, b""), budget, depth)


def _value(data: Any, budget: "_Budget", depth: int) -> Any:
    budget.spend_value(depth)
    number, value = 0, None
    for number, value in _fields(data, budget):  # noqa: B007 - the last of them counts
        pass
    match number:
        case 1:
            return _text(value)
        case 2:
            return bool(value)
        case 3:
            return _signed(value) - 2**64 if _signed(value) >= 2**63 else value
        case 4:
            return _finite(struct.unpack("<d", struct.pack("<Q", value))[0])
        case 5:
            return [_value(item, budget, depth - 1) for item in _all(value, 1, budget)]
        case 6:
            return dict(_pairs(_all(value, 1, budget), budget, depth - 1))
        case 7:
            return base64.b64encode(_message(value)).decode()
    return None


def _fields(data: Any, budget: "_Budget") -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a message."""
    data = _message(data)
    budget.spend_field()  # an empty message is work, too
    place = 0
    while place < len(data):
        budget.spend_field()
        key, place = _varint(data, place, 5)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(data, place, 10)
            yield number, value
            continue
        if wire == 2:
            size, place = _varint(data, place, 5)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise OtlpError("it is not protobuf")
        if place + size > len(data):
            raise OtlpError("it is truncated")
        part, place = data[place : place + size], place + size
        yield number, part if wire == 2 else int.from_bytes(part, "little")


def _message(data: Any) -> memoryview:
    if isinstance(data, int):
        raise OtlpError("it has a number instead of a message")
    return memoryview(data)


def _varint(data: memoryview, place: int, max_bytes: int) -> tuple[int, int]:
    """Decode an integer of at most `max_bytes` bytes. Return the integer and the position after it."""
    value = 0
    for shift, byte in enumerate(data[place : place + max_bytes]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value & (2**64 - 1), place + shift + 1
    raise OtlpError("it is not protobuf, or it is truncated")


def _all(data: Any, number: int, budget: "_Budget") -> Iterator[Any]:
    return (value for field, value in _fields(data, budget) if field == number)


def _last(data: Any, budget: "_Budget") -> dict[int, Any]:
    """Return, for each known field number, the last value in the message."""
    return {number: value for number, value in _fields(data, budget) if number < _KNOWN_FIELDS}


# JSON


def _from_json(data: bytes, budget: "_Budget") -> Iterator[Span]:
    for _ in _JSON_PARTS.finditer(data):  # counted before it is decoded, which takes some hundred bytes for each
        budget.spend_field()
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        raise OtlpError("it is not JSON") from None
    for of_resource in _list(tree, "resourceSpans"):
        resource = _json_attributes(of_resource.get("resource") or {}, budget)
        for scope in _list(of_resource, "scopeSpans"):
            for span in _list(scope, "spans"):
                budget.spend_span()
                yield _json_span(span, resource, budget)


def _json_span(span: Mapping[str, Any], resource: Mapping[str, Any], budget: "_Budget") -> Span:
    events, status = _few(iter(_list(span, "events"))), span.get("status") or {}
    return Span(
        trace_id=_id(str(span.get("traceId", "")).lower(), 32),
        span_id=_id(str(span.get("spanId", "")).lower(), 16),
        parent_id=_id(str(span.get("parentSpanId", "")).lower(), 16, empty=True),
        name=_text(span.get("name", "")),
        start=_whole(span.get("startTimeUnixNano", 0)),
        end=_whole(span.get("endTimeUnixNano", 0)),
        attributes=_json_attributes(span, budget),
        resource=resource,
        events=tuple(Event(_text(event.get("name", "")), _json_attributes(event, budget)) for event in events),
        error=_text(status.get("message", "")) if status.get("code") in (2, "STATUS_CODE_ERROR") else None,
    )


def _json_attributes(node: Mapping[str, Any], budget: "_Budget") -> dict[str, Any]:
    pairs = _list(node, "attributes")
    return _named((_text(pair["key"]), _json_value(pair.get("value") or {}, budget, MAX_DEPTH)) for pair in pairs)


def _json_value(value: Mapping[str, Any], budget: "_Budget", depth: int) -> Any:
    budget.spend_value(depth)
    for kind, content in value.items():
        match kind:
            case "stringValue" | "bytesValue":
                return _text(content)
            case "boolValue":
                return bool(content)
            case "intValue":
                return _signed(content)
            case "doubleValue":
                return _finite(float(content))
            case "arrayValue":
                return [_json_value(item, budget, depth - 1) for item in _list(content, "values")]
            case "kvlistValue":
                pairs = _list(content, "values")
                return {_text(p["key"]): _json_value(p.get("value") or {}, budget, depth - 1) for p in pairs}
    return None


def _list(tree: Any, name: str) -> list[Any]:
    items = tree.get(name) if isinstance(tree, Mapping) else None
    if items is not None and not isinstance(items, list):
        raise OtlpError(f"{name} is not a list")
    return items or []


# both


class _Budget:
    """A counter of the parts of an export. It enforces the limits, so a small body cannot expand without limit."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._spans, self._values, self._fields = bounds.spans, bounds.values, bounds.fields

    def spend_span(self) -> None:
        self._spans -= 1
        if self._spans < 0:
            raise OtlpError(f"there are more than {self._bounds.spans} spans")

    def spend_value(self, depth: int) -> None:
        self._values -= 1
        if depth < 0 or self._values < 0:
            raise OtlpError(f"an attribute is nested too deep, or there are more than {self._bounds.values} values")

    def spend_field(self) -> None:
        self._fields -= 1
        if self._fields < 0:
            raise OtlpError(f"there are more than {self._bounds.fields} fields")


def _few(events: Iterator[Any]) -> list[Any]:
    """Return the events of a span. Raise OtlpError if there are more than `MAX_EVENTS` events."""
    few = list(islice(events, MAX_EVENTS + 1))
    if len(few) > MAX_EVENTS:
        raise OtlpError(f"a span has more than {MAX_EVENTS} events")
    return few


def _named(pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for name, value in pairs:
        attributes[name] = value
        if len(attributes) > MAX_ATTRIBUTES:
            raise OtlpError(f"a span, an event or a resource has more than {MAX_ATTRIBUTES} attributes")
    return attributes


def _text(value: Any) -> str:
    text = str(value, "utf-8", "replace") if isinstance(value, bytes | memoryview) else str(value)
    return text.encode("utf-8", "replace").decode()


def _whole(value: Any) -> int:
    number = _signed(value)
    return number if 0 <= number < 2**63 else 0


def _signed(value: Any) -> int:
    if isinstance(value, str) and len(value) <= 20 and value.lstrip("-").isdecimal():
        return int(value)
    if type(value) is not int or abs(value) >= 2**64:
        raise OtlpError("a value that must be an integer is not an integer")
    return value


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _id(text: str, digits: int, empty: bool = False) -> str:
    if empty and not text.strip("0"):
        return ""
    try:
        whole = len(text) == digits and bool(binascii.unhexlify(text).strip(b"\0"))
    except (binascii.Error, ValueError):
        whole = False
    if not whole:
        raise OtlpError(f"the id of a trace or span is not {digits} hexadecimal digits, or all its digits are 0")
    return text
