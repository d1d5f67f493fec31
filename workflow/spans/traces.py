"""Spans of one rollout put together: by the rollout that they name, else by their conversation, else by their trace."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.workflow.spans import Span, span_names
from agentrl.workflow.spans.span_annotations import episode_named, named


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one rollout, in the order in which they began; `key` is what they are called by."""

    key: str
    spans: tuple[Span, ...]

    def told(self, name: str) -> str:
        """What the first span that says anything says under that name; else empty."""
        return next((str(value) for span in self.spans if (value := span.attributes.get(name, span.resource.get(name)))), "")

    @property
    def error(self) -> str | None:
        """What a span without a parent says went wrong."""
        return next((span.error or "error" for span in self.spans if not span.parent_id and span.error is not None), None)


def traces_of(spans: Sequence[Span]) -> list[Trace]:
    """The rollouts that the spans are of, in the order in which they began.

    A span that was exported twice counts once. Of a rollout with several attempts the one that began last counts.
    """
    known = {(span.trace_id, span.span_id): span for span in reversed(spans)}
    ordered = sorted(known.values(), key=lambda span: (span.start, span.trace_id, span.span_id))
    names = {span.trace_id: "" for span in ordered}
    for span in ordered:
        names[span.trace_id] = names[span.trace_id] or episode_named(span)
    for span in ordered:
        names[span.trace_id] = names[span.trace_id] or _of(span, span_names.CONVERSATION)
    attempts: dict[str, dict[str, list[Span]]] = {}
    for span in ordered:
        attempt = next((told for name in span_names.ATTEMPT if (told := _of(span, name))), "")
        attempts.setdefault(names[span.trace_id] or span.trace_id, {}).setdefault(attempt, []).append(span)
    last = {key: max(found.values(), key=lambda some: some[0].start) for key, found in attempts.items()}
    return sorted((Trace(key, tuple(some)) for key, some in last.items()), key=lambda trace: trace.spans[0].start)


def _of(span: Span, name: str) -> str:
    return named(span.attributes if name in span.attributes else span.resource, name)
