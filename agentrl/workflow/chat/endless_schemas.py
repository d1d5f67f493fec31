"""Finds JSON schemas whose required parts contain themselves without end. No finite text satisfies such a schema, but a grammar
of it has a first token, and a model would write it until its limit.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote


def is_endless(schema: Mapping[str, Any]) -> bool:
    """Return True if no finite value satisfies the schema.

    The time is linear in the size of the schema. A keyword that is unknown here never makes a schema endless.
    """
    waits: dict[int, int] = {}  # for each part, the number of its conditions that have no finite value yet
    needed_by: dict[int, list[int]] = {}
    finite: list[int] = []
    parts: list[Any] = [schema]
    for part in parts:  # grows
        if id(part) in waits:
            continue
        conditions = list(part) if isinstance(part, _OneOf) else list(_conditions(part, schema))
        waits[id(part)] = min(1, len(conditions)) if isinstance(part, _OneOf) else len(conditions)
        for condition in conditions:
            needed_by.setdefault(id(condition), []).append(id(part))
        parts += conditions
        if not waits[id(part)]:
            finite.append(id(part))
    for number in finite:  # grows
        for waiting in needed_by.get(number, ()):
            waits[waiting] -= 1
            if waits[waiting] == 0:
                finite.append(waiting)
    return waits[id(schema)] > 0


class _OneOf(list[Any]):
    """Schemas of which one must have a finite value."""


def _conditions(schema: Any, root: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas that all must have a finite value if this schema has one."""
    if not isinstance(schema, Mapping):
        return
    if isinstance(schema.get("$ref"), str):
        yield _target(root, schema["$ref"])
    yield from _list(schema, "allOf")
    for name in ("anyOf", "oneOf"):
        if choices := _list(schema, name):
            yield _OneOf(choices)
    if schema.get("type") in ("object", ["object"]):
        yield from _required_properties(schema)
    elif schema.get("type") in ("array", ["array"]) and isinstance(schema.get("minItems"), int):
        first = _list(schema, "prefixItems")
        yield from first[: max(0, schema["minItems"])]
        if schema["minItems"] > len(first):
            yield schema.get("items")


def _required_properties(schema: Mapping[str, Any]) -> Iterator[Any]:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    others = None if schema.get("patternProperties") else schema.get("additionalProperties")
    for name in _list(schema, "required"):
        if isinstance(name, str):
            yield properties.get(name, others)
    if isinstance(schema.get("minProperties"), int) and schema["minProperties"] > 0:
        yield _OneOf([*properties.values(), others])


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _target(root: Any, reference: str) -> Any:
    """Return the part of the schema to which a reference such as `#/$defs/a` leads; None if it leads elsewhere."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    part = root
    for name in reference.split("/")[1:]:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping):
            part = part.get(key)
        elif isinstance(part, list) and key.isascii() and key.isdigit() and len(key) < 6 and int(key) < len(part):
            part = part[int(key)]
        else:
            return None
    return part
