"""Converts spans to annotations of their episodes, and builds the responses for an exporter."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.annotations import MAX_AT_ONCE, MAX_DATA, MAX_NAME, Annotation, check
from agentrl.workflow.spans import Span, span_names
from agentrl.workflow.spans.otlp import JSON, OtlpError, decode

PART_BYTES = 512 * 2**10
MAX_NAMED = 4096
"""The most characters in the id of an episode, a conversation, an attempt or a task."""
_REWARD = re.compile(span_names.REWARD)


def annotations_of_span(span: Span) -> list[Annotation]:
    """Convert a span to annotations. The annotation ids contain the span's id, so a span that is exported twice is stored once.
    Raise ValueError if the span cannot be stored; the message says why.
    """
    kind = span_names.KINDS.get(span.name, "span")
    annotations = list(_rewards(span)) if kind == "reward" or any(map(_REWARD.fullmatch, span.attributes)) else []
    if kind != "reward":
        annotations.append(_annotation(span, kind))
    if not annotations:
        raise ValueError("a span of a reward lacks agentlightning.reward.0.name or agentlightning.reward.0.value")
    for annotation in annotations:
        check(annotation)
    return annotations


def episode_named(span: Span) -> str:
    """Return the id of the episode that the span or its resource names; empty if neither names one."""
    return next(
        (value for name in span_names.EPISODE for where in (span.attributes, span.resource) if (value := named(where, name))),
        "",
    )


def named(where: Mapping[str, Any], name: str) -> str:
    """Return the attribute of that name as text if it is a short text or a number; else an empty text.

    Long texts are not read. Many spans share one resource, so a long text in the resource would be read again for each span.
    """
    value = where.get(name)
    short = isinstance(value, str) and len(value) <= MAX_NAMED
    return str(value) if short or type(value) in (int, float, bool) else ""


def _annotation(span: Span, kind: str) -> Annotation:
    attributes = span.attributes
    name, data = span.name, {"attributes": dict(attributes), "parent": span.parent_id} if kind == "span" else _data(span, kind)
    if kind == "operation":
        name = str(attributes.get(span_names.OPERATION_NAME, span.name))
    elif kind == "span" and span_names.GEN_AI_OPERATION in attributes:
        names = [str(attributes[key]) for key in span_names.GEN_AI_NAMED if key in attributes]
        name = " ".join([str(attributes[span_names.GEN_AI_OPERATION]), *names[:1]])
    elif kind not in ("span", "exception"):
        name = ""
    elif kind == "exception":
        name = str(data["type"])
    if span.error is not None and kind in ("span", "operation"):
        data["error"] = span.error or "error"
    return Annotation(f"span:{span.span_id}", kind, name[:MAX_NAME], data, seconds=span.seconds)


def _data(span: Span, kind: str) -> dict[str, Any]:
    attributes = dict(span.attributes)
    if kind == "message":
        return {"message": str(attributes.pop(span_names.MESSAGE_BODY, "")), **_rest(attributes)}
    if kind == "object":
        return {"value": _object(attributes), **_rest(attributes)}
    if kind == "exception":
        fields = next((event.attributes for event in span.events if event.name == span_names.EXCEPTION_EVENT), attributes)
        kind_of, message = (
            fields.get(span_names.EXCEPTION_TYPE, "Exception"),
            fields.get(span_names.EXCEPTION_MESSAGE, span.error or ""),
        )
        return {"type": str(kind_of), "message": str(message)}
    return attributes


def _rest(attributes: Mapping[str, Any]) -> dict[str, Any]:
    left = {name: value for name, value in attributes.items() if not name.startswith(span_names.PREFIX)}
    return {"attributes": left} if left else {}


def _object(attributes: Mapping[str, Any]) -> Any:
    text = attributes.get(span_names.OBJECT_JSON)
    if isinstance(text, str) and len(text) <= 2 * MAX_DATA:  # a longer one is refused as it is
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text if isinstance(text, str) else attributes.get(span_names.OBJECT_LITERAL)


def _rewards(span: Span) -> Iterator[Annotation]:
    rewards: dict[int, dict[str, Any]] = {}
    for key, value in span.attributes.items():
        if match := _REWARD.fullmatch(key):
            rewards.setdefault(int(match[1]), {})[match[2]] = value
    for place, fields in sorted(rewards.items()):
        yield Annotation(
            f"span:{span.span_id}:{place}", "reward", str(fields.get("name") or "agent"), {"value": fields.get("value")}
        )


def answer(content_type: str, rejected: int, why: str) -> bytes:
    """Return an ExportTraceServiceResponse in the format of the request."""
    if content_type.startswith(JSON):
        return json.dumps(
            {"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": why}} if rejected else {}
        ).encode()
    if not rejected:
        return b""
    partial = b"\x08" + _varint(rejected) + b"\x12" + _sized(why)
    return b"\x0a" + _varint(len(partial)) + partial


def refusal(content_type: str, code: int, why: str) -> bytes:
    """Return a google.rpc.Status in the format of the request."""
    if content_type.startswith(JSON):
        return json.dumps({"code": code, "message": why}).encode()
    return b"\x08" + _varint(code) + b"\x12" + _sized(why)


def _sized(text: str) -> bytes:
    data = text[:1000].encode()
    return _varint(len(data)) + data


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


@dataclass(frozen=True, slots=True)
class Export:
    """The annotations that an export has for one episode.

    Args:
        parts: the request bodies to send to `/v1/annotations`, each within the limits of one request.
        rejected: the number of spans that cannot be stored.
        why: the reason why the first rejected span cannot be stored.
    """

    parts: Sequence[bytes]
    rejected: int
    why: str


def read_export(body: bytes, content_type: str, encoding: str, episode: str) -> Export:
    """Return the annotations in an export. Raise OtlpError if the body is not an export, or if a span names another episode
    than `episode`.
    """
    documents: list[bytes] = []
    rejected, why = 0, ""
    for span in decode(body, content_type, encoding):
        span_episode = episode_named(span)
        if span_episode.isdecimal() and span_episode != episode:
            raise OtlpError(f"a span belongs to episode {span_episode[:20]}, but the key belongs to another episode")
        try:
            documents += [_document(annotation) for annotation in annotations_of_span(span)]
        except ValueError as error:
            rejected, why = rejected + 1, why or str(error)
    return Export(list(_parts(documents)), rejected, why)


def _document(annotation: Annotation) -> bytes:
    fields = {
        "id": annotation.id,
        "kind": annotation.kind,
        "name": annotation.name,
        "data": annotation.data,
        "seconds": annotation.seconds,
    }
    return json.dumps(fields).encode()


def _parts(documents: Sequence[bytes]) -> Iterator[bytes]:
    part, size = list[bytes](), 0
    for document in documents:
        if part and (len(part) >= MAX_AT_ONCE or size + len(document) > PART_BYTES):
            yield _together(part)
            part, size = [], 0
        part.append(document)
        size += len(document)
    if part:
        yield _together(part)


def _together(part: Sequence[bytes]) -> bytes:
    return b'{"annotations": [' + b", ".join(part) + b"]}"
