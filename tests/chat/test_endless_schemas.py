"""Schemas that no finite text satisfies."""

import time
from typing import Any

import pytest

from agentrl.workflow.chat.endless_schemas import is_endless

A = {"$ref": "#/$defs/a"}


def nested(part: Any) -> Any:
    return A | {"$defs": {"a": part}}


def needs(part: Any, **more: Any) -> Any:
    return {"type": "object", "properties": {"a": part}, "required": ["a"], "additionalProperties": False} | more


ENDLESS = {
    "itself": {"$ref": "#"},
    "required": nested(needs(A)),
    "root": needs({"$ref": "#"}),
    "every_branch": nested({"anyOf": [needs(A), {"type": "array", "items": A, "minItems": 1}]}),
    "one_of": nested(needs({"oneOf": [A, needs(A)]})),
    "all_of": nested({"allOf": [{"type": "object"}, needs(A)]}),
    "prefix": nested({"type": "array", "prefixItems": [{}, A], "minItems": 2}),
    "additional": nested({"type": "object", "required": ["x"], "additionalProperties": A}),
    "one_property": nested({"type": "object", "minProperties": 1, "additionalProperties": A}),
    "escaped": {"$ref": "#/$defs/a~1%62", "$defs": {"a/b": needs({"$ref": "#/$defs/a~1b"})}},
    "other": {**A, "$defs": {"a": needs({"$ref": "#/$defs/b"}), "b": needs(A)}},
}
FINITE = {
    "empty": {},
    "optional": nested({"type": "object", "properties": {"a": A}}),
    "null": nested(needs({"anyOf": [A, {"type": "null"}]})),
    "items": nested(needs({"type": "array", "items": A})),
    "prefix": nested({"type": "array", "prefixItems": [{}, A], "minItems": 1}),
    "no_type": nested({"properties": {"a": A}, "required": ["a"]}),
    "nullable": nested(needs(A, type=["object", "null"])),
    "one_property": nested({"type": "object", "minProperties": 1, "properties": {"a": A, "n": {}}}),
    "pattern": nested({"type": "object", "required": ["x"], "patternProperties": {"x": {}}, "additionalProperties": A}),
    "elsewhere": {"$ref": "https://example.org/a"},
    "unused": {"type": "string", "$defs": {"a": needs(A)}},
    "odd": {"type": "object", "required": 7, "properties": 3, "anyOf": {}, "$ref": 1, "minProperties": "x"},
}


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=ENDLESS)
def test_endless_schema_is_found(schema: Any) -> None:
    assert is_endless(schema)


@pytest.mark.parametrize("schema", FINITE.values(), ids=FINITE)
def test_schema_with_finite_value_is_not_endless(schema: Any) -> None:
    assert not is_endless(schema)


@pytest.mark.parametrize("end", [{}, {"$ref": "#/$defs/d0"}], ids=["finite", "endless"])
def test_long_chain_of_definitions_takes_little_time(end: Any) -> None:
    size = 20_000
    definitions = {f"d{n}": needs({"$ref": f"#/$defs/d{n + 1}"} if n + 1 < size else end) for n in range(size)}
    start = time.process_time()
    assert is_endless({"$ref": "#/$defs/d0", "$defs": definitions}) == bool(end)
    assert time.process_time() - start < 2
