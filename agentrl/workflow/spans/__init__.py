"""OpenTelemetry spans. Spans are decoded within limits, read with the attribute names of several conventions, and stored as
annotations of an episode.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """An event inside a span."""

    name: str
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """An exported span.

    Args:
        trace_id, span_id, parent_id: 32, 16 and 16 lower-case hexadecimal digits. `parent_id` is empty if the span has no
            parent.
        start, end: the times in nanoseconds since 1970; 0: unknown.
        attributes, resource: the attributes of the span and of its resource. Values are texts, numbers, booleans, lists and
            mappings.
        events: the events inside the span.
        error: the message of an error status; None if the status is not an error.
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
        """The duration in seconds; None if it is unknown."""
        return (self.end - self.start) / 1e9 if 0 < self.start <= self.end else None
