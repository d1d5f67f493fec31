"""Spans of OpenTelemetry: decoded within bounds, by the names of several conventions, as annotations of an episode."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened within a span."""

    name: str
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """A span as it was exported.

    Args:
        trace_id, span_id, parent_id: small hexadecimal digits, 32, 16 and 16 of them; no parent: empty.
        start, end: in nanoseconds since 1970; 0: unknown.
        attributes, resource: its own, and those of what it came from: texts, numbers, truth values, lists and mappings of them.
        error: what its status says, where that is an error.
    """

    trace_id: str
    span_id: str
    name: str
    parent_id: str = ""
    start: int = 0
    end: int = 0
    attributes: Mapping[str, Any] = field(default_factory=dict)
    resource: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    error: str | None = None

    @property
    def seconds(self) -> float | None:
        """How long it took; None where that is not known."""
        return (self.end - self.start) / 1e9 if 0 < self.start <= self.end else None
