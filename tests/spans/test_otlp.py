"""What an exporter of OpenTelemetry posts is read within bounds, whatever it is, and becomes annotations."""

import contextlib
import gzip
import json
import time
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Status, StatusCode

from agentrl.workflow.annotations import Annotation
from agentrl.workflow.spans import Span
from agentrl.workflow.spans.otlp import JSON, POSTED, PROTOBUF, OtlpError, decode
from agentrl.workflow.spans.span_annotations import annotations_of_span, answer, episode_named, read_export

TRACE, SPAN = "ab" * 16, "cd" * 8


def made() -> tuple[bytes, Any]:
    """A real export, and the spans that it is of."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "mine", "agentlightning.rollout_id": "7"}))
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("t")
    told = {"a": 1, "b": [1.5, -2.5], "c": True, "d": "é", "e": -(2**63)}
    with tracer.start_as_current_span("outer", attributes=told), tracer.start_as_current_span("inner") as inner:
        inner.add_event("exception", {"exception.type": "ValueError", "exception.message": "no"})
        inner.set_status(Status(StatusCode.ERROR, "went wrong"))
    spans = kept.get_finished_spans()
    return encode_spans(spans).SerializePartialToString(), spans


def test_decode_reads_protobuf_of_real_exporter() -> None:
    body, spans = made()
    inner, outer = sorted(decode(body, PROTOBUF), key=lambda span: span.name)
    assert outer.attributes == {"a": 1, "b": [1.5, -2.5], "c": True, "d": "é", "e": -(2**63)}
    assert inner.parent_id == outer.span_id == f"{spans[1].context.span_id:016x}"
    assert (inner.error, outer.error, outer.parent_id) == ("went wrong", None, "")
    assert inner.events[0].attributes["exception.type"] == "ValueError"
    assert inner.resource["service.name"] == "mine"
    assert outer.seconds == pytest.approx((spans[1].end_time - spans[1].start_time) / 1e9)
    assert episode_named(inner) == "7"
    for data, encoding in ((gzip.compress(body), "gzip"), (zlib.compress(body), "deflate"), (body, "identity")):
        assert decode(data, f"{PROTOBUF}; charset=utf-8", encoding) == decode(body, PROTOBUF)


def as_json(**changes: Any) -> bytes:
    span = {
        "traceId": TRACE,
        "spanId": SPAN,
        "name": "n",
        "startTimeUnixNano": "5",
        "endTimeUnixNano": 1_000_000_005,
        **changes,
    }
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()


def test_decode_reads_json() -> None:
    values = [
        {"key": "whole", "value": {"intValue": "-3"}},
        {"key": "list", "value": {"arrayValue": {"values": [{"stringValue": "x"}, {"boolValue": False}]}}},
        {"key": "map", "value": {"kvlistValue": {"values": [{"key": "k", "value": {"doubleValue": 0.5}}]}}},
        {"key": "nan", "value": {"doubleValue": "NaN"}},
        {"key": "nothing"},
    ]
    (span,) = decode(as_json(attributes=values, status={"code": 2}, unknown=1), JSON)
    assert span.attributes == {"whole": -3, "list": ["x", False], "map": {"k": 0.5}, "nan": "nan", "nothing": None}
    assert (span.error, span.seconds, span.trace_id) == ("", 1.0, TRACE)


def deep(levels: int) -> Any:
    value: Any = {"stringValue": "x"}
    for _ in range(levels):
        value = {"arrayValue": {"values": [value]}}
    return [{"key": "deep", "value": value}]


def sized(number: int, data: bytes) -> bytes:
    """A field of protobuf."""
    size, length = bytearray(), len(data)
    while length > 127:
        size.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *size, length]) + data


def empty_attributes(count: int) -> bytes:
    """A resource of so many attributes without a name, as protobuf."""
    return sized(1, sized(1, b"\x0a\x00" * count))


def nested(levels: int, text: bytes = b"x") -> bytes:
    """An attribute of lists in lists, as protobuf."""
    value = sized(1, text)
    for _ in range(levels):
        value = sized(5, sized(1, value))
    span = sized(1, bytes.fromhex(TRACE)) + sized(2, bytes.fromhex(SPAN)) + sized(9, sized(1, b"k") + sized(2, value))
    return sized(1, sized(2, sized(2, span)))


MANY = json.dumps(
    {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": TRACE, "spanId": SPAN}] * (POSTED.spans + 1)}]}]}
).encode()
HOSTILE: dict[str, tuple[bytes | Callable[[], bytes], str, str]] = {
    "garbage as protobuf": (b"\xff" * 100, PROTOBUF, ""),
    "a length beyond the end": (b"\x0a\xff\xff\xff\xff\x0f", PROTOBUF, ""),
    "an endless number": (b"\x80" * 50, PROTOBUF, ""),
    "a group": (b"\x0b\x0c", PROTOBUF, ""),
    "half an export": (made()[0][:-7], PROTOBUF, ""),
    "a number where a message belongs": (b"\x0a\x02\x10\x01", PROTOBUF, ""),
    "lists in lists": (nested(200), PROTOBUF, ""),
    "garbage as JSON": (b"{", JSON, ""),
    "a list as JSON": (b'{"resourceSpans": {"a": 1}}', JSON, ""),
    "texts for spans": (as_json(attributes=["a"]), JSON, ""),
    "brackets as JSON": (b"[" * 100_000, JSON, ""),
    "deep JSON": (as_json(attributes=deep(300)), JSON, ""),
    "deeper JSON": (as_json(attributes=deep(50)), JSON, ""),
    "too many values": (as_json(attributes=[{"key": "k", "value": {"arrayValue": {"values": [{}] * 300_000}}}]), JSON, ""),
    "too many attributes": (as_json(attributes=[{"key": str(n)} for n in range(1000)]), JSON, ""),
    "too many events": (as_json(events=[{"name": "e"}] * 1000), JSON, ""),
    "a short id": (as_json(spanId="ab"), JSON, ""),
    "an id of zeros": (as_json(spanId="0" * 16), JSON, ""),
    "an id of other letters": (as_json(traceId="g" * 32), JSON, ""),
    "a number of a million digits": (as_json(attributes=[{"key": "k", "value": {"intValue": "9" * 1_000_000}}]), JSON, ""),
    "too many spans": (MANY, JSON, ""),
    "a number that is a word": (as_json(attributes=[{"key": "k", "value": {"doubleValue": "abc"}}]), JSON, ""),
    "a number that no float holds": (as_json(attributes=[{"key": "k", "value": {"doubleValue": 10**400}}]), JSON, ""),
    "a number with two signs": (as_json(attributes=[{"key": "k", "value": {"intValue": "--5"}}]), JSON, ""),
    "a time that is a word": (as_json(startTimeUnixNano="-"), JSON, ""),
    "millions of lists as JSON": (lambda: gzip.compress(b"[" + b"[[]]," * (POSTED.bytes // 6) + b"[]]", 1), JSON, "gzip"),
    "millions of texts as JSON": (lambda: gzip.compress(b"[" + b'"",' * (POSTED.bytes // 4) + b"[]]", 1), JSON, "gzip"),
    "a key of ten bytes": (b"\x8a\x80\x80\x80\x80\x80\x80\x80\x80\x00\x00", PROTOBUF, ""),
    "a number for an id": (sized(1, sized(2, sized(2, b"\x08\x7f"))), PROTOBUF, ""),
    "millions of empty messages": (lambda: gzip.compress(b"\x0a\x00" * (POSTED.bytes // 2)), PROTOBUF, "gzip"),
    "millions of empty attributes": (lambda: gzip.compress(empty_attributes(4_000_000)), PROTOBUF, "gzip"),
    "a bomb": (lambda: gzip.compress(b"\0" * (POSTED.bytes * 4)), PROTOBUF, "gzip"),
    "no gzip": (b"hello", PROTOBUF, "gzip"),
    "half a gzip": (gzip.compress(made()[0])[:-12], PROTOBUF, "gzip"),
    "another encoding": (b"x", PROTOBUF, "br"),
}  # fmt: skip


def hostile_export(name: str) -> tuple[bytes, str, str]:
    """Return the body, the content type and the encoding; a large body is built here."""
    body, kind, encoding = HOSTILE[name]
    return body() if callable(body) else body, kind, encoding


@pytest.mark.parametrize("name", HOSTILE)
def test_decode_refuses_invalid_export_in_a_sentence(name: str) -> None:
    with pytest.raises(OtlpError) as caught:
        decode(*hostile_export(name))
    assert 0 < len(str(caught.value)) < 300


def of_one_resource(name: str, value: str, spans: int) -> bytes:
    """So many spans of one resource, which says that of itself."""
    told = {"attributes": [{"key": name, "value": {"stringValue": value}}]}
    made = [{"traceId": TRACE, "spanId": f"{n:016x}"} for n in range(1, spans + 1)]
    return json.dumps({"resourceSpans": [{"resource": told, "scopeSpans": [{"spans": made}]}]}).encode()


def test_read_export_reads_long_resource_once() -> None:
    began = time.process_time()
    found = read_export(of_one_resource("rollout_id", "1" * 8_000_000 + "x", 2000), JSON, "", "5")
    assert (sum(json.loads(part)["annotations"] != [] for part in found.parts), found.rejected) == (20, 0)
    assert time.process_time() - began < 10  # it took a minute


@pytest.mark.parametrize("name", ["lists in lists", "one list", "one object", "a text of escapes"])
def test_decode_of_small_export_takes_little_memory(name: str) -> None:
    many = POSTED.bytes // 2
    lists = b",".join([b"[]"] * (many // 3))
    held = b'{"key": "agentlightning.object.json", "value": {"stringValue": "[%s]"}}' % lists
    body = {
        "lists in lists": nested(20, b"x" * many),
        "one list": as_json(x=0).replace(b'"x": 0', b'"x": [%s]' % lists),
        "one object": as_json(name="agentlightning.object", attributes=0).replace(b": 0", b": [%s]" % held),
        "a text of escapes": as_json(x="@").replace(b"@", b"\\t" * (many // 2)),
    }[name]
    kind = PROTOBUF if name == "lists in lists" else JSON
    tracemalloc.start()
    try:
        with contextlib.suppress(OtlpError):
            read_export(body, kind, "", "5")
        assert tracemalloc.get_traced_memory()[1] < 8 * many
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300), st.sampled_from([PROTOBUF, JSON]), st.sampled_from(["", "gzip"]))
def test_decode_reads_or_refuses_any_body(body: bytes, kind: str, encoding: str) -> None:
    with contextlib.suppress(OtlpError):
        assert all(isinstance(span, Span) for span in decode(body, kind, encoding))


NAMES = st.sampled_from(
    ["value", "values", "events", "status", "code", "name", "traceId", "doubleValue", "intValue", "stringValue", "arrayValue"]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400) | st.just("-")
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
)
VALUES = st.dictionaries(NAMES, TREES, max_size=2)


@given(st.dictionaries(NAMES, TREES, max_size=4), st.lists(st.builds(lambda v: {"key": "k", "value": v}, VALUES), max_size=3))
def test_read_export_reads_or_refuses_any_json_span(changes: dict[str, Any], attributes: list[Any]) -> None:
    with contextlib.suppress(OtlpError):
        read_export(as_json(attributes=attributes, **changes), JSON, "", "5")


@given(st.integers(0, 400), st.integers(0, 255))
def test_decode_reads_or_refuses_corrupted_export(place: int, byte: int) -> None:
    body = bytearray(BODY)
    body[place % len(body)] = byte
    with contextlib.suppress(OtlpError):
        decode(bytes(body), PROTOBUF)


BODY = made()[0]


# annotations


def span(name: str, **attributes: Any) -> Span:
    return Span(
        TRACE, SPAN, name, start=1, end=500_000_001, attributes={key.replace("__", "."): v for key, v in attributes.items()}
    )


def test_annotations_of_span_maps_agent_lightning() -> None:
    rewards = {
        "agentlightning.reward.0.name": "exact",
        "agentlightning.reward.0.value": 0.5,
        "agentlightning.reward.1.value": 1,
    }
    told = annotations_of_span(Span(TRACE, SPAN, "agentlightning.reward", attributes=rewards))
    assert [(each.id, each.kind, each.name, each.data) for each in told] == [
        (f"span:{SPAN}:0", "reward", "exact", {"value": 0.5}),
        (f"span:{SPAN}:1", "reward", "agent", {"value": 1}),
    ]
    (said,) = annotations_of_span(span("agentlightning.message", agentlightning__message__body="hello", more=1))
    assert (said.kind, said.name, said.data) == ("message", "", {"message": "hello", "attributes": {"more": 1}})
    (held,) = annotations_of_span(span("agentlightning.object", agentlightning__object__json='{"a": [1]}'))
    assert (held.kind, held.data) == ("object", {"value": {"a": [1]}})
    (work,) = annotations_of_span(span("agentlightning.operation", agentlightning__operation__name="look_up"))
    assert (work.kind, work.name, work.seconds) == ("operation", "look_up", 0.5)
    (error,) = annotations_of_span(span("agentlightning.exception", exception__type="KeyError", exception__message="k"))
    assert (error.kind, error.name, error.data) == ("exception", "KeyError", {"type": "KeyError", "message": "k"})


def test_annotations_of_span_keeps_other_spans_by_convention() -> None:
    (call,) = annotations_of_span(
        span("execute_tool x", gen_ai__operation__name="execute_tool", gen_ai__tool__name="calculator")
    )
    assert (call.id, call.kind, call.name, call.seconds) == (f"span:{SPAN}", "span", "execute_tool calculator", 0.5)
    assert call.data["attributes"]["gen_ai.tool.name"] == "calculator"
    (plain,) = annotations_of_span(Span(TRACE, SPAN, "n" * 500, error="bad"))
    assert (plain.name, plain.data["error"], plain.seconds) == ("n" * 128, "bad", None)


@pytest.mark.parametrize(
    "wrong",
    [
        span("agentlightning.reward"),
        span("agentlightning.reward", agentlightning__reward__0__value="nan"),
        span("agentlightning.reward", agentlightning__reward__0__value=1e300),
        span("agentlightning.message", agentlightning__message__body="x" * 100_000),
        span("big", text="x" * 100_000),
    ],
)
def test_annotations_of_span_refuses_only_invalid_span(wrong: Span) -> None:
    with pytest.raises(ValueError, match=r"reward|bytes"):
        annotations_of_span(wrong)


def test_answer_has_form_of_exporter() -> None:
    assert answer(PROTOBUF, 0, "") == b""
    read = ExportTraceServiceResponse.FromString(answer(PROTOBUF, 300, "too long"))
    assert (read.partial_success.rejected_spans, read.partial_success.error_message) == (300, "too long")
    assert json.loads(answer(JSON, 2, "no")) == {"partialSuccess": {"rejectedSpans": "2", "errorMessage": "no"}}
    assert answer(JSON, 0, "") == b"{}"
    assert isinstance(annotations_of_span(span("x"))[0], Annotation)
