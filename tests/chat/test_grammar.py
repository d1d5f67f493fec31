"""Grammars of turns, walked at random with the real library: whatever they allow is what the client required."""

import json
from typing import Any

import numpy as np
import pytest

from agentrl.workflow.chat import grammar
from agentrl.workflow.chat.grammar import (
    ANY_TOOL,
    Constraint,
    GrammarError,
    call_end,
    find_obstacle,
    has_open_call,
    is_kept,
    turn_grammar,
    with_wish,
)
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.errors import ModelError
from agentrl.workflow.trajectory import Message, ToolCall
from tests.support.small_models import tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "s": {"enum": ["a", "b"]}},
    "required": ["x", "s"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}}
    for name in ("calculator", "other")
]
JSON_FORMATS = ("deepseek", "deepseek_v31", "granite", "hermes", "llama3", "mistral", "mistral_args", "named", "phi4_mini")
SHORT = json.dumps(
    {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
)


def chat_of(tool_format: str = "hermes") -> Chat:
    return Chat(tokenizer(), tool_format)


def walk(chat: Chat, constraint: Constraint, seed: int, tools: Any = TOOLS, tokens: int = 400) -> tuple[Message, bool]:
    """A turn of random tokens that the grammar allows: its message, and whether it has ended."""
    matcher = chat.grammars.matcher(turn_grammar(constraint, tools, chat, (5,)))
    random, ids = np.random.default_rng(seed), list[int]()
    for _ in range(tokens):
        allowed = np.flatnonzero(matcher.allowed(len(chat.tokenizer)))
        ends = [int(token) for token in allowed if int(token) in chat.end_ids]
        token = ends[0] if ends and random.random() < 0.7 else int(random.choice(allowed))
        ids.append(token)
        if token in chat.end_ids:
            return chat.parse(tuple(ids), tools, False, offered_only=True), True
        matcher.take(token)
    return chat.parse(tuple(ids), tools, False, offered_only=True), False


@pytest.mark.parametrize("tool_format", JSON_FORMATS)
@pytest.mark.parametrize("tool", [ANY_TOOL, "other"])
def test_grammar_of_required_tool_gives_only_valid_calls(tool_format: str, tool: str) -> None:
    chat = chat_of(tool_format)
    constraint = Constraint(tool)
    if obstacle := find_obstacle(constraint, TOOLS, chat):
        pytest.fail(f"{tool_format}: {obstacle}")
    ended = 0
    for seed in range(12):
        message, is_over = walk(chat, constraint, seed)
        ended += is_over
        if is_over:
            assert message.tool_calls
            for call in message.tool_calls:
                assert call.error is None, message
                assert call.name in (("calculator", "other") if tool == ANY_TOOL else (tool,))
                assert set(call.arguments) == {"x", "s"}
                assert isinstance(call.arguments["x"], int)
                assert call.arguments["s"] in ("a", "b")
            assert is_kept(constraint, message, TOOLS)
    assert ended >= 6, "most of the walks end"


def test_grammar_of_one_call_gives_one() -> None:
    several = [walk(chat_of(), Constraint(ANY_TOOL), seed)[0] for seed in range(40)]
    one = [walk(chat_of(), Constraint(ANY_TOOL, one_call=True), seed) for seed in range(40)]
    assert max(len(message.tool_calls) for message in several) > 1
    assert {len(message.tool_calls) for message, is_over in one if is_over} == {1}


@pytest.mark.parametrize("schema", [SHORT, "{}", json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 3})])
def test_grammar_of_schema_gives_only_its_json(schema: str) -> None:
    ended = 0
    for seed in range(30):
        message, is_over = walk(chat_of(), Constraint(schema=schema), seed, tools=())
        if is_over:
            ended += 1
            value = json.loads(message.content)
            assert is_kept(Constraint(schema=schema), message, ())
            if schema == SHORT:
                assert list(value) == ["n"]
                assert isinstance(value["n"], int)
    assert ended >= 5


def test_grammar_of_strict_tool_allows_text_and_valid_calls() -> None:
    texts = [walk(chat_of(), Constraint(strict=("calculator",)), seed, tokens=200) for seed in range(60)]
    messages = [message for message, is_over in texts if is_over]
    assert any(message.content and not message.tool_calls for message in messages)
    for message in messages:
        for call in message.tool_calls:
            assert call.error is None
            assert call.name != "calculator" or set(call.arguments) == {"x", "s"}


def test_grammar_closes_a_thought_that_the_prompt_left_open() -> None:
    chat = chat_of()
    prompt = tuple(chat.tokenizer.encode("<think>"))
    text = turn_grammar(Constraint(ANY_TOOL), TOOLS, chat, prompt)
    end = chat.tokenizer.convert_tokens_to_ids("</think>")
    assert f"<[{end}]>" in text
    assert f"<[{end}]>)?" not in text


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string", "pattern": "^a$", "enum": ["b"]}, "cannot be compiled"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "cannot be compiled"),
        ({"type": "string", "pattern": "(a"}, "cannot be compiled"),
        ({"$ref": "#/$defs/nowhere"}, "cannot be compiled"),
    ],
)
def test_schema_without_a_text_is_refused_in_one_sentence(schema: Any, said: str) -> None:
    chat = chat_of()
    with pytest.raises(ModelError, match=said) as refused:
        chat.grammars.matcher(turn_grammar(Constraint(schema=json.dumps(schema)), (), chat, (5,)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}$"} for n in range(20)]},
        {"type": "object", "patternProperties": {f"^a{{{n}}}$": {"type": "integer"} for n in range(500)}},
    ],
    ids=["patterns", "names"],
)
def test_schema_that_takes_hours_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="more than 2 s of processor time"):
        chat_of().grammars.matcher(turn_grammar(Constraint(schema=json.dumps(schema)), (), chat_of(), (5,)))


def test_schema_that_only_repeats_itself_has_no_text() -> None:
    with pytest.raises(GrammarError, match="No text satisfies the constraint"):
        chat_of().grammars.matcher(turn_grammar(Constraint(schema='{"$ref": "#"}'), (), chat_of(), (5,)))


def test_recursive_schema_is_followed() -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}}}}
    message, _ = walk(chat_of(), Constraint(schema=json.dumps(schema)), 3, tools=(), tokens=50)
    assert message.content.startswith("{")


def test_two_hundred_tools_compile() -> None:
    tools = [{"type": "function", "function": {"name": f"tool_{number}", "parameters": SCHEMA}} for number in range(200)]
    message, is_over = walk(chat_of(), Constraint(ANY_TOOL), 1, tools=tools)
    assert not is_over or message.tool_calls[0].name.startswith("tool_")
    huge = [{"type": "function", "function": {"name": f"tool_{number}", "parameters": SCHEMA}} for number in range(500)]
    with pytest.raises(ModelError, match="characters as a grammar"):
        turn_grammar(Constraint(ANY_TOOL), huge, chat_of(), (5,))


def test_formats_without_json_arguments_cannot_be_enforced() -> None:
    for tool_format in ("pythonic", "qwen_coder", "glm"):
        assert "does not write arguments as JSON" in find_obstacle(Constraint(ANY_TOOL), TOOLS, chat_of(tool_format))
        assert find_obstacle(Constraint(schema=SHORT), (), chat_of(tool_format)) == ""
    assert call_end(TOOLS, chat_of().manner.tool_format) == "</tool_call>"
    assert "no end mark" in find_obstacle(Constraint(one_call=True), TOOLS, chat_of("llama3"))


def test_constraint_without_the_library_is_a_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "library", lambda: "")
    assert find_obstacle(Constraint(ANY_TOOL), TOOLS, chat_of()) == "the package llguidance is not installed"
    messages = (Message("system", "Be kind."), Message("user", "x"))
    said = with_wish(messages, Constraint("other", one_call=True))
    assert said[0].content == "Be kind.\n\nCall the tool other. Call at most one tool."
    assert with_wish(messages[1:], Constraint(schema="{}"))[0].content == "Answer with a JSON object and nothing else."
    assert "follows this schema" in with_wish(messages, Constraint(schema=SHORT))[0].content


def test_wish_is_checked_afterwards() -> None:
    assert not is_kept(Constraint(ANY_TOOL), Message("assistant", "no"), TOOLS)
    assert is_kept(Constraint(schema=SHORT), Message("assistant", '{"n": 4}'), ())
    for wrong in ('{"m": 4}', "n", "[1]"):
        assert not is_kept(Constraint(schema=SHORT), Message("assistant", wrong), ())


@pytest.mark.parametrize(
    ("text", "is_open"),
    [("<tool_call>", True), ('Look: <tool_call>\n{"name": "oth', True), ("only text", False)],
)
def test_strict_call_that_was_cut_off_is_not_kept(text: str, is_open: bool) -> None:
    message = Message("assistant", text)
    assert has_open_call(message, chat_of().manner.tool_format) == is_open
    assert is_kept(Constraint(strict=("other",)), message, TOOLS, is_open) != is_open


@pytest.mark.parametrize("required", [7, "n", {"n": 1}, [["n"], {"n": 1}, 7, None]])
def test_wish_with_invalid_schema_is_checked(required: Any) -> None:
    schema = {"type": "object", "required": required}
    assert is_kept(Constraint(schema=json.dumps(schema)), Message("assistant", '{"m": 4}'), ())
    tools = [{"type": "function", "function": {"name": "other", "parameters": schema}}]
    called = Message("assistant", "", (ToolCall("other", {"m": 4}),))
    assert is_kept(Constraint(strict=("other",)), called, tools)
