"""Groups spans by rollout. The key of a rollout is the rollout id, or else the conversation id, or else the trace id."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.workflow.spans import Span, span_names
from agentrl.workflow.spans.span_annotations import episode_named, named


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one rollout, ordered by start time. `key` is the rollout's id."""

    key: str
    spans: tuple[Span, ...]

    def told(self, name: str) -> str:
        """Return the first non-empty value of this attribute in the spans and their resources; empty if there is none."""
        return next((str(value) for span in self.spans if (value := span.attributes.get(name, span.resource.get(name)))), "")

    @property
    def error(self) -> str | None:
        """The error of the first span that failed and has no parent; None if there is no such span."""
        return next((span.error or "error" for span in self.spans if not span.parent_id and span.error is not None), None)


def traces_of(spans: Sequence[Span]) -> list[Trace]:
    """Group the spans into rollouts, ordered by start time. Spans with the same start time stay in the given order.

    A span without a rollout id belongs to the first rollout that another span of its trace names. A span that was exported
    twice is used once. If a rollout has several attempts, only the spans of the attempt that began last and the spans without
    an attempt are used.
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
