"""tool_formats: each family's calls, both ways. What is written reads back as the same calls; any text at all can be read."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agentrl.workflow.call_json import MAX_CHARACTERS, MAX_NESTING
from agentrl.workflow.chat.parsing import IN_THOUGHT, MAX_CALLS, TOO_MANY, parse_text
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.plugins import find, names
from agentrl.workflow.tool_formats import ToolFormat
from agentrl.workflow.tools import NAMES
from agentrl.workflow.trajectory import UNCLOSED, UNFINISHED, Message, ToolCall
from tests.support.malformed import HUGE, MALFORMED
from tests.support.small_models import tokenizer

FORMATS = [find("tool_formats", name) for name in names("tool_formats")]
each_format = pytest.mark.parametrize("tool_format", FORMATS, ids=names("tool_formats"))
CALLS = (ToolCall("calculator", {"expression": "12+7"}), ToolCall("no-args/v2.b", {}))
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+7"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "no-args/v2.b", "arguments": {}}\n</tool_call>',
    "named": '<tool_call name="calculator">\n{"expression": "12+7"}\n</tool_call>\n'
    '<tool_call name="no-args/v2.b">\n{}\n</tool_call>',
    "llama3": '{"name": "calculator", "parameters": {"expression": "12+7"}}; {"name": "no-args/v2.b", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "12+7"}}, '
    '{"name": "no-args/v2.b", "arguments": {}}]',
    "granite": '<|tool_call|>[{"name": "calculator", "arguments": {"expression": "12+7"}}, '
    '{"name": "no-args/v2.b", "arguments": {}}]',
    "phi4_mini": '<|tool_call|>[{"name": "calculator", "arguments": {"expression": "12+7"}}, '
    '{"name": "no-args/v2.b", "arguments": {}}]<|/tool_call|>',
    "mistral_args": '[TOOL_CALLS]calculator[ARGS]{"expression": "12+7"}[TOOL_CALLS]no-args/v2.b[ARGS]{}',
    "qwen_coder": "<tool_call>\n<function=calculator>\n<parameter=expression>\n12+7\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=no-args/v2.b>\n</function>\n</tool_call>",
    "glm": "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>12+7</arg_value>\n</tool_call>\n"
    "<tool_call>no-args/v2.b\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n"
    '{"expression": "12+7"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>no-args/v2.b\n```json\n{}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>calculator<｜tool▁sep｜>"
    '{"expression": "12+7"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>no-args/v2.b<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "pythonic": '[calculator(expression="12+7"), no-args/v2.b()]',
    "lfm2": '<|tool_call_start|>[calculator(expression="12+7"), no-args/v2.b()]<|tool_call_end|>',
    "olmo3": '<function_calls>\ncalculator(expression="12+7")\nno-args/v2.b()\n</function_calls>',
    "gemma": '```tool_code\ncalculator(expression="12+7")\nno-args/v2.b()\n```',
    "function_gemma": "<start_function_call>call:calculator{expression:<escape>12+7<escape>}<end_function_call>"
    "<start_function_call>call:no-args/v2.b{}<end_function_call>",
    "gemma4": '<|tool_call>call:calculator{expression:<|"|>12+7<|"|>}<tool_call|><|tool_call>call:no-args/v2.b{}<tool_call|>',
}

TAGS = (
    "</tool_call>", "<tool_call>", "</parameter>", "</arg_value>", "<arg_key>",
    "\n</parameter>\n", "<parameter=a>", "\n<parameter=a>\n",
    "</function></tool_call>", "</function>", "<function=f>", "; {",
    "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "</think>", "<think>", '"', "'", "'''",
    "[TOOL_CALLS]", "<|tool_call|>", "<|/tool_call|>", "functools[", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "\n```",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_call_start|>", "<|tool_call_end|>", "</function_calls>", "print(",
    "<escape>", "<end_function_call>", '<|"|>', "<tool_call|>", "{a:1}",
    '"""', "\\", "\\u0041", "\n", "\r", "\0", "&lt;", "12", "1e999", "NaN", "True", "null", "None", "[]", "{}", '"x"',
    '"<\\/parameter>"', "f(a=1)", " ", "\u2028", "\U0001f642", "e\u0301",
)  # fmt: skip
letters = st.characters(exclude_categories=["Cs"])
texts = st.lists(st.sampled_from(TAGS) | st.text(letters, max_size=4), max_size=4).map("".join)
numbers = st.integers() | st.integers(-(10**400), 10**400) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
keys = texts.map(lambda text: text.replace("\0", ""))
tool_names = st.from_regex(NAMES, fullmatch=True).filter(lambda name: name[0].isalpha())
calls = st.builds(ToolCall, tool_names, st.dictionaries(keys | st.just("a"), values, max_size=3))
several = st.lists(calls, min_size=1, max_size=3)
words = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>[]{}&"), max_size=20).map(str.strip)


def said(message: Message) -> str:
    """The calls so that 1, 1.0 and True are three things."""
    return json.dumps(
        [message.content, [[call.name, dict(call.arguments), call.error] for call in message.tool_calls]], sort_keys=True
    )


def schemas(made: list[ToolCall], kinds: list[str]) -> list[dict[str, Any]]:
    """Schemas of these calls' tools, whose arguments are of those kinds in turn; those of an unknown kind have none."""
    found = []
    for call in made:
        types = [kinds[number % len(kinds)] for number, _ in enumerate(call.arguments)]
        properties = {key: {"type": kind} if kind else {} for key, kind in zip(call.arguments, types, strict=True)}
        parameters = {"type": "object", "properties": properties}
        found.append({"type": "function", "function": {"name": call.name, "description": "", "parameters": parameters}})
    return found


def test_format_files_define_format_of_their_name() -> None:
    assert set(names("tool_formats")) == set(WRITTEN)
    for tool_format in FORMATS:
        assert isinstance(tool_format, ToolFormat)
        assert tool_format.name in WRITTEN


def test_format_of_own_file_is_found_by_path() -> None:
    chat = Chat(tokenizer(), "tests.support.own_format:shouted")
    turn = Message("assistant", "so", tool_calls=(ToolCall("f", {"a": [1, "x"]}),))
    assert chat.decode(chat.turn(turn)) == 'soCALL f {"a": [1, "x"]}<|im_end|>'
    assert chat.parse(chat.turn(turn)) == turn


@each_format
def test_format_writes_calls_like_its_family(tool_format: ToolFormat) -> None:
    assert tool_format.write("", CALLS, ()) == WRITTEN[tool_format.name]


@each_format
@given(made=several, content=words)
@pytest.mark.slow
def test_format_reads_back_written_calls(tool_format: ToolFormat, made: list[ToolCall], content: str) -> None:
    text = tool_format.write(content, made, ())
    assert said(parse_text(text, tool_format)) == said(Message("assistant", content, tool_calls=tuple(made)))


@given(
    calls, st.lists(st.sampled_from(["string", "number", "integer", "boolean", "null", "object", ""]), min_size=1, max_size=3)
)
def test_format_reads_number_as_text_by_schema(call: ToolCall, kinds: list[str]) -> None:
    qwen_coder, tools = find("tool_formats", "qwen_coder"), schemas([call], kinds)
    of_kind = {
        key: value if kind != "string" or isinstance(value, str) else json.dumps(value)
        for (key, value), kind in zip(call.arguments.items(), kinds * len(call.arguments), strict=False)
    }
    made = ToolCall(call.name, of_kind)
    text = qwen_coder.write("", [made], tools)
    assert said(parse_text(text, qwen_coder, tools)) == said(Message("assistant", "", tool_calls=(made,)))


def test_format_reads_year_as_text_or_number_by_schema() -> None:
    qwen_coder = find("tool_formats", "qwen_coder")
    text = "<function=f>\n<parameter=a>\n2024\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n</function>"
    for kind, expected in (("string", "2024"), ("integer", 2024), ("number", 2024), ("", 2024)):
        tools = schemas([ToolCall("f", {"a": 0, "b": 0})], [kind, "boolean"])
        (call,) = parse_text(text, qwen_coder, tools).tool_calls
        assert call.arguments == {"a": expected, "b": True}
    either = schemas([ToolCall("f", {"a": 0, "b": 0})], [""])
    either[0]["function"]["parameters"]["properties"]["a"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    (call,) = parse_text(text, qwen_coder, either).tool_calls
    assert call.arguments["a"] == "2024"


@each_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), [float("nan")]])
def test_format_writes_no_value_outside_json(tool_format: ToolFormat, value: Any) -> None:
    with pytest.raises(ValueError):
        tool_format.write("", [ToolCall("f", {"a": value})], ())


@each_format
def test_format_limits_digits_of_integers(tool_format: ToolFormat) -> None:
    made = ToolCall("f", {"a": 10**4298})
    assert parse_text(tool_format.write("", [made], ()), tool_format).tool_calls == (made,)
    text = tool_format.write("", [made], ()).replace("1000", "1" * 5000)
    (call,) = parse_text(text, tool_format).tool_calls
    if tool_format.name in ("qwen_coder", "glm"):  # between its tags everything is text
        assert call.arguments == {"a": "1" * 5000 + "0" * 4295}
    else:
        assert "4300 digits" in (call.error or "")


@each_format
def test_format_limits_nesting_of_arguments(tool_format: ToolFormat) -> None:
    def nested(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        return value

    allowed = ToolCall("f", {"a": nested(MAX_NESTING - 4)})
    assert parse_text(tool_format.write("", [allowed], ()), tool_format).tool_calls == (allowed,)
    for depth in (MAX_NESTING + 1, 300):
        text = tool_format.write("", [ToolCall("f", {"a": nested(depth)})], ())
        (call,) = parse_text(text, tool_format).tool_calls
        assert "nest 64" in (call.error or "")
        assert parse_text(text, tool_format).content == text


@each_format
def test_format_reports_call_that_is_too_long(tool_format: ToolFormat) -> None:
    text = tool_format.write("", [ToolCall("f", {"a": "x" * (MAX_CHARACTERS + 1)})], ())
    (call,) = parse_text(text, tool_format).tool_calls
    assert str(MAX_CHARACTERS) in (call.error or "")


@each_format
def test_format_limits_number_of_calls(tool_format: ToolFormat) -> None:
    one = ToolCall("f", {"a": 1})
    found = parse_text(tool_format.write("", [one] * (MAX_CALLS + 5), ()), tool_format)
    assert len(found.tool_calls) <= MAX_CALLS + 1
    assert found.tool_calls[-1].error == TOO_MANY
    assert parse_text(tool_format.write("", [one] * MAX_CALLS, ()), tool_format).tool_calls == (one,) * MAX_CALLS


@each_format
def test_format_takes_no_beginning_for_whole_call(tool_format: ToolFormat) -> None:
    text = tool_format.write("", [ToolCall("calc", {"expression": "12+7", "n": 3})], ())
    for cut in range(1, len(text)):
        found = parse_text(text[:cut], tool_format)
        for call in found.tool_calls:
            complete = call.error is None and call.arguments == {"expression": "12+7", "n": 3}  # only a closing tag is missing
            assert complete or call.error is not None, text[:cut]
    ended = [parse_text(text[:cut], tool_format).tool_calls for cut in range(len(text) // 2, len(text) - 18)]
    assert all(len(calls) == 1 and calls[0].error in (UNCLOSED, UNFINISHED) for calls in ended if calls and calls[0].error)


@each_format
def test_format_makes_no_call_of_thought_and_reports_open_one(tool_format: ToolFormat) -> None:
    text = tool_format.write("so", CALLS, ())
    assert parse_text(f"<think>{text}</think>done", tool_format) == Message("assistant", "done", thought=text)
    assert parse_text(f"<think>hm</think>\n{text}", tool_format) == Message("assistant", "so", thought="hm", tool_calls=CALLS)
    assert parse_text(f"hm</think>{text}", tool_format).tool_calls == CALLS
    (call,) = parse_text(f"<think>{text}", tool_format).tool_calls
    assert call.error == IN_THOUGHT


PIECES = (
    *TAGS, '<tool_call name="f">', "<tool_call name=", '{"name": "f", ', '"parameters": {}}', '{"name": "f", "arguments": {}}',
    "[", "]", "(", ")", "{", "}", ",", "=", ":", "**", "f", "f(", "a=", '{"a": 1, "a": 2}', "[f(a=1)]", "1", "-", "\ud800",
)  # fmt: skip
hostile = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=20).map("".join)


@each_format
@hypothesis_settings(max_examples=150)
@given(text=hostile, tail=hostile)
@pytest.mark.slow
def test_format_reads_any_text_without_loss(tool_format: ToolFormat, text: str, tail: str) -> None:
    begun = tool_format.write("", [ToolCall("f", {"a": "zq"})], ()).partition("zq")[0]
    for whole in (text, begun + tail, text + begun + tail):
        message = parse_text(whole, tool_format)
        assert all((call.error is None) == bool(call.name) for call in message.tool_calls)
        for call in message.tool_calls:
            json.dumps(dict(call.arguments), allow_nan=False, ensure_ascii=False).encode()
        if not any(call.error is None for call in message.tool_calls) and "think>" not in whole:
            assert message.content == whole.replace("\0", "\ufffd").strip()


UNITS = (
    "<tool_call>", '<tool_call name="f">', "<function=f>", "<function=f>\n<parameter=a>", "[TOOL_CALLS]", "[TOOL_CALLS][", '"',
    '[TOOL_CALLS]["', "[TOOL_CALLS]f[ARGS]", '[TOOL_CALLS]f[ARGS]{"a":"', "<|python_tag|>", '<|python_tag|>{"a":"\\', "'''",
    "<|python_start|>[", "<|python_start|>[f(a=", '<|python_start|>[f(a="', "<|python_start|>[f(a='''\\", "[TOOL_CALLS] [{",
    "<tool_call> ", "<tool_call>\n<function=f>\n<parameter=a>\n</parameter>", '{"name":', '[f(a="', "[f(**{", "\\", "\n",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "<function_calls>", "<function_calls>f()\n", "f()\n",
    "```tool_code",
    "```tool_code\nprint(f(a='", "<start_function_call>call:f{", "<start_function_call>call:f{a:<escape>", "a:{", "<escape>",
    '<|tool_call>call:f{a:<|"|>', '<|"|>', "<|tool_call_start|>[f(),", '<|tool_call_start|>[{"name":', "<|tool_call_start|>",
    "<|tool_call|>", "<|tool_call|>[", "functools[{", "<|tool_call|>[{}]<|/tool_call|>",
    "[f(a=[", "<|python_start|>[f(a=[1,", '<|python_tag|>{"name": "f"};', "<|python_start|>[f()],", "; {", "<think>", " ",
)  # fmt: skip


@each_format
@pytest.mark.slow
def test_format_reads_long_text_in_linear_time(tool_format: ToolFormat) -> None:
    begun = tool_format.write("", [ToolCall("f", {"a": "zq"})], ()).partition("zq")[0]
    whole = [start + unit * (400_000 // len(unit)) for unit in UNITS for start in ("", begun)]
    before = time.process_time()
    for text in (*whole, *HUGE[:3], *MALFORMED):
        parse_text(text, tool_format)
    assert time.process_time() - before < 60  # some seconds; in quadratic time hours


@pytest.mark.parametrize(
    ("name", "text", "made"),
    [
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ToolCall("f", {"a": 1})),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ToolCall("f", {})),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', ToolCall("f", {"a": "x\ny"})),
        ("named", '<tool_call name="f"></tool_call>', ToolCall("f", {})),
        ("named", "<tool_call name=\"f\">'no'</tool_call>", "no valid JSON"),
        ("named", "<tool_call name=f>{}</tool_call>", "a call must begin with"),
        ("named", '<tool_call name="f">[1]</tool_call>', "must be an object, not list"),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ToolCall("f", {"a": 1})),
        ("llama3", '{"type": "function", "name": "f", "parameters": {"a": 1}}', ToolCall("f", {"a": 1})),
        ("llama3", '{"name": "f", "arguments": {"a": 1}}', ToolCall("f", {"a": 1})),
        ("llama3", "<|python_tag|>import os", "after <|python_tag|> there must be"),
        ("llama3", '{"name": "f", "parameters": 7}', "must be an object, not int"),
        ("llama3", '{"name": "f", "parameters": {"a": 1, "a": 2}}', 'the key "a" stands twice'),
        ("llama3", '{"name": 7, "parameters": {}}', 'a call must be an object with a "name"'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', ToolCall("f", {"a": 1})),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": "{\\"a\\": 1}"}]', ToolCall("f", {"a": 1})),
        ("mistral", "[TOOL_CALLS] []", "there must be a list"),
        ("mistral", "[TOOL_CALLS] f", "there must be a list"),
        ("mistral", "[TOOL_CALLS] ", UNFINISHED),
        ("mistral", '[TOOL_CALLS] {"name": "f", "parameters": {"a": 1}}', ToolCall("f", {"a": 1})),
        ("granite", '<tool_call> [{"name": "f", "arguments": {"a": "x\ny"}}]', ToolCall("f", {"a": "x\ny"})),
        ("granite", "<|tool_call|>[{'name': 'f'}]", "no valid JSON"),
        ("granite", '<|tool_call|>"f"', "there must be a list"),
        ("granite", '<|tool_call|>[{"name": "f"}', UNFINISHED),
        ("phi4_mini", 'functools[{"name": "f", "arguments": {"a": 1}}]', ToolCall("f", {"a": 1})),
        ("phi4_mini", '<|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|>', ToolCall("f", {"a": 1})),
        (
            "phi4_mini",
            '<|tool_call|>[{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}] <|/tool_call|>',
            ToolCall("f", {"a": 1}),
        ),
        ("phi4_mini", "<|tool_call|>[]<|/tool_call|>", "there must be a list"),
        ("mistral_args", '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}', ToolCall("f", {"a": 1})),
        ("mistral_args", '[TOOL_CALLS]f[ARGS] {"a": NaN}', "no valid JSON"),
        ("mistral_args", "[TOOL_CALLS]f {}", "there must be NAME[ARGS]"),
        ("qwen_coder", "<function=f>\n<parameter=a>\nx\ny\n</parameter>\n</function>", ToolCall("f", {"a": "x\ny"})),
        (
            "qwen_coder",
            "<function=f>\n<parameter=a>\nx\n<parameter=b>\n3\n</parameter>\n</function>",
            ToolCall("f", {"a": "x", "b": 3}),
        ),
        ("qwen_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</tool_call>", ToolCall("f", {"a": "x"})),
        ("qwen_coder", "<function=f>\n<parameter=a>\nx\n<parameter=a>\ny\n</parameter>\n</function>", '"a" stands twice'),
        ("qwen_coder", '<tool_call>{"name": "f"}</tool_call>', "a call must be <tool_call><function=NAME>"),
        ("qwen_coder", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", '"a" stands twice'),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>[1]</arg_value></tool_call>", ToolCall("f", {"a": [1]})),
        ("glm", "<tool_call>f</tool_call>", ToolCall("f", {})),
        ("glm", '<tool_call>{"name": "f"}</tool_call>', "a call must be <tool_call>NAME"),
        ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1", UNFINISHED),
        (
            "deepseek",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
            ToolCall("f", {"a": 1}),
        ),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "stand calls"),
        ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}', ToolCall("f", {"a": 1})),
        ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"{\\"a\\": 1}"', ToolCall("f", {"a": 1})),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]", "must be an object, not list"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>f", "stand calls"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f", UNFINISHED),
        ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": {"a": "\n"}}]<|tool_call_end|>', ToolCall("f", {"a": "\n"})),
        ("lfm2", "<|tool_call_start|> [f(a='x\ny')] <|tool_call_end|>", ToolCall("f", {"a": "x\ny"})),
        ("lfm2", "<|tool_call_start|>[f(a='x\ny')]", ToolCall("f", {"a": "x\ny"})),
        ("lfm2", "<|tool_call_start|>f<|tool_call_end|>", "there must be a list"),
        ("lfm2", "<|tool_call_start|>[f(a=", UNFINISHED),
        ("olmo3", "<function_calls>\nf(a='x', b=null)", ToolCall("f", {"a": "x", "b": None})),
        ("olmo3", "<function_calls>f(a=true)</function_calls>", ToolCall("f", {"a": True})),
        ("olmo3", "<function_calls></function_calls>", "each line is a call"),
        ("olmo3", "<function_calls>\nf(a='x", UNFINISHED),
        ("gemma", "```tool_code\nprint(f(a='x'))\n```", ToolCall("f", {"a": "x"})),
        ("gemma", "```tool_code\nprint(a=1)\n```", ToolCall("print", {"a": 1})),
        ("gemma", "```tool_code\nimport numpy\n```", "each line is a call"),
        (
            "function_gemma",
            '<start_function_call>call:f{a:<escape>x, {y}"<escape>,b:[1,null,None],c:{d:true}}<end_function_call>',
            ToolCall("f", {"a": 'x, {y}"', "b": [1, None, None], "c": {"d": True}}),
        ),
        ("function_gemma", "<start_function_call>call:f{a:1}", ToolCall("f", {"a": 1})),
        ("function_gemma", "<start_function_call>call:f{a:1,a:2}<end_function_call>", '"a" stands twice'),
        ("function_gemma", "<start_function_call>call:f{a:x y}<end_function_call>", "cannot be read from"),
        ("function_gemma", "<start_function_call>call:f{a:<escape>x", UNFINISHED),
        ("gemma4", '<|tool_call>call:f{<|"|>a b<|"|>:<|"|>x<|"|>}<tool_call|>', ToolCall("f", {"a b": "x"})),
        ("gemma4", "<|tool_call>f{}<tool_call|>", "a call must be <|tool_call>call:NAME"),
        ("pythonic", "[f(a='it\\'s', b=[-2.5e3, (True, None)],)]", ToolCall("f", {"a": "it's", "b": [-2500.0, [True, None]]})),
        ("pythonic", '[f(a="""x\n"y" z""")]', ToolCall("f", {"a": 'x\n"y" z'})),
        ("pythonic", "<|tool_call_start|>[f(a={'b': null})]<|tool_call_end|>", ToolCall("f", {"a": {"b": None}})),
        ("pythonic", "[f(a='x\ny', b=\"z\n\")]", ToolCall("f", {"a": "x\ny", "b": "z\n"})),
        ("pythonic", "<|tool_call_start|>[f(a='x\ny')]<|tool_call_end|>", ToolCall("f", {"a": "x\ny"})),
        ("pythonic", "[f(a=1, a=2)]", 'the key "a" stands twice'),
        ("pythonic", "[f(a=1e999)]", "Out of range float values"),
        ("pythonic", "[f(a=open('x'))]", "cannot be read from"),
        ("pythonic", "[f(a=__import__)]", "cannot be read from"),
        ("pythonic", "[f(1)]", "cannot be read from"),
        ("pythonic", '[f(a="x', UNFINISHED),
    ],
)  # fmt: skip
def test_format_accepts_variants_and_reports_the_rest(name: str, text: str, made: ToolCall | str) -> None:
    message = parse_text(f"{text}\n", find("tool_formats", name))
    (call,) = message.tool_calls
    if isinstance(made, ToolCall):
        assert (call, message.content) == (made, "")
    else:
        assert made in (call.error or "")
        assert message.content == text.strip()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3", '{"answer": 7}'), ("llama3", 'So {"name": "f", "parameters": {}} it is.'), ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[a link](https://example.org)"), ("pythonic", "See [f(a=1)]."), ("hermes", '{"name": "f"}'),
        ("named", "<tool_call>"), ("mistral", '[{"name": "f"}]'), ("qwen_coder", "<parameter=a>"),
        ("phi4_mini", "import functools"), ("granite", "[1]"), ("gemma", "[f(a=1)]"), ("gemma", "```python\nf(a=1)\n```"),
        ("olmo3", "f(a=1)"),
    ],
)  # fmt: skip
def test_format_keeps_answer_that_resembles_call(name: str, text: str) -> None:
    assert parse_text(text, find("tool_formats", name)) == Message("assistant", text)


def test_format_makes_no_call_if_one_of_several_is_wrong() -> None:
    for name, text in (
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": ""}]'),
        ("phi4_mini", '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "f", "arguments": 1}]'),
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": 1}'),
        ("pythonic", "[f(a=1), f(a=)]"),
        ("lfm2", "<|tool_call_start|>[f(a=1), f(a=)]<|tool_call_end|>"),
        ("olmo3", "<function_calls>f(a=1)\nf(a=)</function_calls>"),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>7",
        ),
    ):
        message = parse_text(text, find("tool_formats", name))
        assert message.content == text
        assert [call.name for call in message.tool_calls] == [""]
