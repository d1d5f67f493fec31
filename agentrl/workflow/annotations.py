"""Annotations that an agent, a tool or a hook writes to an episode: rewards, messages, objects, errors and durations.

An annotation is written once and never changed. `read_annotations` parses annotations from untrusted sources, and limits their
number and size.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

KINDS = ("reward", "message", "object", "annotation", "exception", "operation", "span")
SOURCES = ("agent", "tool", "hook")
MAX_AT_ONCE = 100
MAX_OF_ATTEMPT = 10_000
MAX_NAME = 128
MAX_DATA = 64 * 1024
MAX_DEPTH = 32
MAX_STEP = 2**31 - 1
MAX_REWARD = 1e30
_ID = re.compile(r"[0-9a-z:_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Annotation:
    """An annotation of an episode.

    Args:
        id: the id, unique within the attempt. Of several annotations with the same id, only the first is written.
        kind: one of `KINDS`.
        name: the name of the reward part, the class of the exception, or another label.
        data: a JSON object.
        step: the index of the step to which the annotation belongs; None if no step was recorded yet. A reward belongs to a
            step only if `data` has the key `step`. Any other reward belongs to the episode.
        seconds: the duration of an operation, in seconds.
        source: the writer, one of `SOURCES`.
    """

    id: str
    kind: str
    name: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    seconds: float | None = None
    source: str = "agent"


def read_annotations(values: Any, source: str = "agent") -> tuple[Annotation, ...]:
    """Parse annotations from decoded JSON. Raise ValueError if an annotation is invalid; the message says why."""
    if not isinstance(values, list) or len(values) > MAX_AT_ONCE:
        raise ValueError(f"annotations must be a list of at most {MAX_AT_ONCE} annotations")
    return tuple(read_annotation(value, source) for value in values)


def read_annotation(value: Any, source: str = "agent") -> Annotation:
    """Parse an annotation from decoded JSON. Raise ValueError if the annotation is invalid; the message says why."""
    if not isinstance(value, Mapping) or value.keys() - {"id", "kind", "name", "data", "step", "seconds"}:
        raise ValueError("an annotation must be an object with no other keys than id, kind, name, data, step and seconds")
    annotation = Annotation(
        value.get("id", ""),
        value.get("kind", ""),
        value.get("name", ""),
        value.get("data") or {},
        value.get("step"),
        value.get("seconds"),
        source,
    )
    check(annotation)
    return annotation


def check(annotation: Annotation) -> None:
    """Validate an annotation. Raise ValueError if the annotation is invalid; the message says why."""
    if not isinstance(annotation.id, str) or not _ID.fullmatch(annotation.id):
        raise ValueError("an annotation's id must be a text of 1 to 64 lower-case letters, digits, : _ and -")
    if annotation.kind not in KINDS:
        raise ValueError(f"an annotation's kind must be one of {', '.join(KINDS)}")
    if not isinstance(annotation.name, str) or len(annotation.name) > MAX_NAME:
        raise ValueError(f"an annotation's name must be a text of at most {MAX_NAME} characters")
    if annotation.step is not None and not (type(annotation.step) is int and 0 <= annotation.step <= MAX_STEP):
        raise ValueError("an annotation's step must be the index of a step: a whole number, 0 or more")
    if annotation.seconds is not None and not (_is_number(annotation.seconds) and annotation.seconds >= 0):
        raise ValueError("an annotation's seconds must be a number, 0 or more")
    if annotation.kind == "reward":
        _check_reward(annotation)
    _check_data(annotation)


def _check_reward(annotation: Annotation) -> None:
    value = annotation.data.get("value") if isinstance(annotation.data, Mapping) else None
    if not annotation.name or not annotation.name.isprintable() or len(annotation.name) > 64:
        raise ValueError("a reward must have a name of 1 to 64 printable characters")
    if not _is_number(value) or abs(value) > MAX_REWARD:
        raise ValueError(f"a reward must be a finite number, from -{MAX_REWARD:g} to {MAX_REWARD:g}")


def _check_data(annotation: Annotation) -> None:
    if not isinstance(annotation.data, Mapping) or is_deep(annotation.data, MAX_DEPTH):
        raise ValueError(f"an annotation's data must be an object, nested at most {MAX_DEPTH} levels deep")
    try:
        size = len(json.dumps(annotation.data, allow_nan=False).encode("utf-8", "replace"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"an annotation's data cannot be written as JSON: {str(error)[:200]}") from None
    if size > MAX_DATA:
        raise ValueError(f"an annotation's data may have at most {MAX_DATA} bytes as JSON, not {size}")


def is_deep(value: Any, left: int) -> bool:
    """Return True if objects and lists nest deeper than `left` levels."""
    if not isinstance(value, Mapping | list | tuple):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return left == 0 or any(is_deep(item, left - 1) for item in inner)


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)


def rewards_of(annotations: Sequence[Annotation], steps: int) -> dict[str, float | tuple[float, ...]]:
    """Return the rewards in the annotations, by name.

    A reward is one number, or one number per step if any annotation of that name belongs to a step. A later reward replaces an
    earlier reward of the same name and step. If a name has rewards of steps and a reward of the episode, the episode's reward
    is added to the last step. Rewards of steps that do not exist are ignored. Annotations by hooks are ignored too: a hook's
    reward is what the hook returns. `steps` is the number of steps of the episode.
    """
    whole: dict[str, float | tuple[float, ...]] = {}
    by_step: dict[str, dict[int, float]] = {}
    for annotation in annotations:
        if annotation.kind != "reward" or annotation.source == "hook":
            continue
        step = annotation.data.get("step")
        if step is None:
            whole[annotation.name] = float(annotation.data["value"])
        elif step < steps:
            by_step.setdefault(annotation.name, {})[step] = float(annotation.data["value"])
    for name, step_rewards in by_step.items():
        last = whole.get(name, 0.0)
        assert isinstance(last, float)
        values = [step_rewards.get(step, 0.0) for step in range(steps)]
        whole[name] = (*values[:-1], values[-1] + last)
    return whole
