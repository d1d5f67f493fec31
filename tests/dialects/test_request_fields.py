"""request_fields: each declared field is treated as declared in every object, and the manual shows the same table."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.workflow.dialects import RequestError
from agentrl.workflow.dialects.chat_requests import read
from agentrl.workflow.dialects.request_fields import OBJECTS, FieldRules, table

CALL = {"id": "x", "type": "function", "function": {"name": "look", "arguments": "{}"}}
REQUEST: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hi", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "x", "content": "seen"},
    ],
    "tools": [{"type": "function", "function": {"name": "look"}}],
    "stream": True,
    "stream_options": {"include_usage": True},
}
PATHS: Mapping[str, tuple[str | int, ...]] = {
    "the request": (),
    "`stream_options`": ("stream_options",),
    "`messages[]`": ("messages", 1),
    "`messages[].content[]`, of type `text` or `refusal`": ("messages", 0, "content", 0),
    "`messages[].tool_calls[]`": ("messages", 1, "tool_calls", 0),
    "`messages[].tool_calls[].function`": ("messages", 1, "tool_calls", 0, "function"),
    "`tools[]`": ("tools", 0),
    "`tools[].function`": ("tools", 0, "function"),
}


def sent(path: tuple[str | int, ...], **fields: Any) -> bytes:
    """The request with these fields in the object at that path."""
    request = json.loads(json.dumps(REQUEST))
    place = request
    for step in path:
        place = place[step]
    place.update(fields)
    return json.dumps(request).encode()


def refused(path: tuple[str | int, ...], **fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        read(sent(path, **fields))
    assert caught.value.status == 400
    return str(caught.value)


@pytest.mark.parametrize("name", OBJECTS)
def test_request_fields_are_treated_as_declared(name: str) -> None:
    rules, path, plain = OBJECTS[name], PATHS[name], read(sent(()))
    for field in rules.ignored:
        for value in ("anything", {"a": [1]}, None):
            assert read(sent(path, **{field: value})) == plain, field
    for field, values in rules.refused.items():
        for value in (*values, None):
            assert read(sent(path, **{field: value})) == plain, field
        assert field in refused(path, **{field: {"another": "value"}})


@pytest.mark.parametrize("name", OBJECTS)
def test_request_fields_not_declared_are_refused_in_every_object(name: str) -> None:
    said = refused(PATHS[name], unheard_of=1)
    assert said.startswith("Unrecognized request argument supplied: ")
    assert said.endswith("unheard_of")
    assert said.count("[") == sum(isinstance(step, int) for step in PATHS[name])


def test_request_fields_have_one_rule_each() -> None:
    for rules in OBJECTS.values():
        names = [*rules.honoured, *rules.ignored, *rules.recorded, *rules.refused]
        assert len(set(names)) == len(names)
        assert rules.hints.keys() <= rules.refused.keys()


def test_request_fields_table_is_in_the_manual() -> None:
    assert table() in Path("docs/serve.md").read_text(), "write table() of request_fields into docs/serve.md"


def test_request_fields_declare_all_of_the_openai_package() -> None:
    from openai.types.chat import completion_create_params

    known = set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    rules: FieldRules = OBJECTS["the request"]
    assert known - {*rules.honoured, *rules.ignored, *rules.recorded, *rules.refused} == set()
