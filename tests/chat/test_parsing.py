"""turns: which texts are calls, what the model is told of those that are none, and that no text is read for long."""

import json
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workflow.agent import CallTools, Finish, next_action
from agentrl.workflow.call_json import MAX_CHARACTERS, MAX_DIGITS
from agentrl.workflow.chat.parsing import IN_THOUGHT, MAX_CALLS, parse_text
from agentrl.workflow.config import RolloutConfig
from agentrl.workflow.plugins import find
from agentrl.workflow.store.connect import Database
from agentrl.workflow.trajectory import UNCLOSED, Episode, FinishReason, Message, Step, Task, ToolCall
from tests.faults.test_endings import Worker, episodes, group_of
from tests.support.malformed import GOOD, tag
from tests.support.played_runs import values
from tests.support.small_models import chat
from tests.workers.test_workers import answer
from tests.workers.test_workers import in_memory as in_memory

COMPLETE = GOOD.removesuffix("</tool_call>")
MADE = ToolCall("calculator", {"expression": "1+1"})


def errors(text: str) -> list[str | None]:
    return [call.error for call in parse_text(text).tool_calls]


# --- arguments in a string ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"a": 1}, {"a": {"b": [1, "\u00e9\n"]}}, {"x": '{"y": "\\""}'}])
def test_parse_text_reads_arguments_object_within_string(arguments: dict[str, Any]) -> None:
    for indent in (None, 2):
        text = tag(json.dumps({"name": "f", "arguments": json.dumps(arguments, indent=indent)}))
        assert parse_text(text) == Message("assistant", "", tool_calls=(ToolCall("f", arguments),))


@pytest.mark.parametrize(
    ("held", "why"),
    [
        ("1+1", 'they are a string, and it holds no valid JSON'), ("", "no valid JSON"), ("[1]", "must be an object, not list"),
        ("null", "not NoneType"), ('"{}"', "must be an object, not str"), ('{"a": 1, "a": 2}', 'the key "a" stands twice'),
        ('{"a": NaN}', "no valid JSON"), ('{"a": "\\ud800"}', "no valid JSON"), ("[" * 70 + "]" * 70, "nest 64"),
        ('{"a": ' * 70 + "1" + "}" * 70, "nest 64"), ("[" * 100_000, "no valid JSON"), ("9" * 100_000, "4300 digits"),
    ],
)  # fmt: skip
def test_parse_text_reports_arguments_string_without_object(held: str, why: str) -> None:
    text = tag(json.dumps({"name": "f", "arguments": held}))
    (error,) = errors(text)
    assert why in (error or "")
    assert parse_text(text).content == text


# --- keys that stand twice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inside", "key"),
    [
        ('{"name": "f", "name": "f", "arguments": {}}', "name"),
        ('{"name": "f", "arguments": {}, "arguments": {"a": 1}}', "arguments"),
        ('{"name": "f", "arguments": {"a": 1, "a": 1}}', "a"),
        ('{"name": "f", "arguments": {"x": [{"y": {"a": 1, "b": 2, "\\u0061": 3}}]}}', "a"),
        ('{"name": "f", "arguments": {"\\ud800": 1, "\\ud800": 1, "a": 1, "a": 2}}', None),
    ],
)
def test_parse_text_reports_duplicate_key_and_takes_nothing(inside: str, key: str | None) -> None:
    (call,) = parse_text(tag(inside)).tool_calls
    assert (call.name, call.arguments) == ("", {})
    assert call.error == (f'the key "{key}" stands twice in one object; give it once' if key else call.error)
    (call.error or "").encode()


def test_parse_text_allows_same_key_in_two_objects() -> None:
    inside = {"name": "f", "arguments": {"name": "f", "a": {"a": [{"a": 1}, {"a": 2}]}}}
    assert parse_text(tag(json.dumps(inside))).tool_calls == (ToolCall("f", inside["arguments"]),)  # type: ignore[arg-type]


# --- the end of a turn --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", "\n", " \n\t "])
def test_parse_text_needs_no_closing_tag_at_end_of_turn(end: str) -> None:
    assert parse_text(f"So: {COMPLETE}{end}") == Message("assistant", "So:", tool_calls=(MADE,))
    assert parse_text(f"{GOOD}\n{COMPLETE}{end}").tool_calls == (MADE, MADE)


@pytest.mark.parametrize("end", [" and more", "</tool", "}", ",", '{"name": "f", "arguments": {}}', "<|im_end|>"])
def test_parse_text_needs_closing_tag_before_more_text(end: str) -> None:
    assert errors(COMPLETE + end) == [UNCLOSED]


def test_parse_text_takes_no_beginning_for_whole_call() -> None:
    for cut in range(len("<tool_call>"), len(COMPLETE)):
        assert errors(COMPLETE[:cut]) == [UNCLOSED]
    for inside in ("12", "null", '"f"', "[]", ""):
        assert errors(f"<tool_call>{inside}") == [UNCLOSED]


def test_parse_text_reports_fault_of_call_without_closing_tag() -> None:
    assert errors('<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}') == [
        'the key "a" stands twice in one object; give it once'
    ]
    assert errors('<tool_call>{"arguments": {}}') == ['a call must be an object with a "name" and "arguments"']
    assert errors('<tool_call>{"arguments": {"a": 1, "a": 2}') == [UNCLOSED]


@pytest.mark.parametrize(("reason", "next_is"), [("stop", CallTools), ("length", Finish)])
def test_complete_call_cut_by_limit_is_not_made(reason: FinishReason, next_is: type) -> None:
    for text in (GOOD, COMPLETE, COMPLETE[:-1]):
        step = Step(0, (), (1,), (2,), (-0.1,), reason, parse_text(text), 0)
        found = next_action(Episode(Task("t", (), "2"), steps=(step,)), find("envs", "arithmetic"), RolloutConfig())
        if text == COMPLETE[:-1]:
            assert found == Finish("parse_error" if reason == "stop" else "max_tokens")
        else:
            assert isinstance(found, next_is)


# --- thoughts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [GOOD, COMPLETE, "<tool_call>\n {", f"{GOOD}{GOOD} and </tool_call>", GOOD[:18]])
def test_parse_text_reports_call_in_open_thought(text: str) -> None:
    message = parse_text(f"<think>hm {text}")
    assert message == Message("assistant", "", thought=f"hm {text}", tool_calls=(ToolCall("", {}, error=IN_THOUGHT),))


def test_parse_text_keeps_call_in_closed_thought_as_thought() -> None:
    assert parse_text(f"<think>hm {GOOD} no</think>42") == Message("assistant", "42", thought=f"hm {GOOD} no")
    assert parse_text(f"<think>{GOOD}</think>{GOOD}") == Message("assistant", "", thought=GOOD, tool_calls=(MADE,))


def test_parse_text_makes_no_call_of_thought_within_turn() -> None:
    for text in (f"Let me see. <think>{GOOD}</think> 42", f"<think>a</think>b<think>{GOOD}</think>"):
        assert parse_text(text).tool_calls == ()
        assert GOOD in parse_text(text).content
    assert errors(f"Let me see. <think>{GOOD}") == [IN_THOUGHT]
    assert errors(f"{GOOD}<think>{GOOD}{GOOD}") == [None, IN_THOUGHT]
    assert errors("Let me see. <think>42") == []
    written = {"name": "f", "arguments": {"x": "<think>"}}
    assert parse_text(tag(json.dumps(written))).tool_calls == (ToolCall("f", {"x": "<think>"}),)


def test_parse_text_allows_tag_name_in_open_thought() -> None:
    for text in ("hm, <tool_call>", "I could use <tool_call> or not", "42"):
        assert parse_text(f"<think>{text}") == Message("assistant", "", thought=text)


# --- what the model is told, in an episode ------------------------------------------------------------------------------------

SAID = {
    f"<think>hm {COMPLETE}": IN_THOUGHT,
    f"<think>hm {GOOD}": IN_THOUGHT,
    tag('{"name": "calculator", "arguments": {"expression": "1", "expression": "2"}}'): (
        'the key "expression" stands twice in one object; give it once'
    ),
    COMPLETE: None,
    tag('{"name": "calculator", "arguments": "{\\"expression\\": \\"1+1\\"}"}'): None,
}


def ids(said: str) -> tuple[int, ...]:
    """The tokens of a turn that says it."""
    return (*chat().tokenizer.encode(said, add_special_tokens=False), min(chat().end_ids))


@pytest.mark.parametrize(("said", "told"), SAID.items())
def test_episode_continues_exact_tokens_after_bad_call(sqlite: Database, in_memory: None, said: str, told: str | None) -> None:
    worker = Worker(sqlite, group_of(sqlite), [ids(said)] * 2 + [ids("#### 42")] * 2).takes(2)
    answer(sqlite, worker.driver)  # with 42, where a call was made
    worker.takes(2)
    for episode, request in zip(episodes(sqlite), worker.requests[2:], strict=True):
        first, second = episode.steps
        assert episode.stop_reason == "answered"
        (result,) = first.results or ()
        assert (result.content, result.error_class) == ((told, "parse_error") if told else ("42", None))
        assert first.sampled_ids == ids(said)
        assert request.prompt_ids == first.prompt_ids + first.sampled_ids + second.prompt_ids
        assert f"<tool_response>\n{result.content}\n</tool_response>" in chat().decode(second.prompt_ids)
        assert second.new_row is None


def test_turn_ending_within_call_ends_episode(sqlite: Database, in_memory: None) -> None:
    Worker(sqlite, group_of(sqlite), [ids(COMPLETE[:-1])] * 2).takes(2)
    assert {episode.stop_reason for episode in episodes(sqlite)} == {"parse_error"}


def test_complete_call_at_token_limit_is_not_made(sqlite: Database, in_memory: None) -> None:
    said = ids(COMPLETE)
    group = group_of(sqlite, max_new_tokens=len(said) - 1)  # the end token is cut off
    Worker(sqlite, group, [said] * 2).takes(2)
    for episode in episodes(sqlite):
        assert episode.stop_reason == "max_tokens"
        assert episode.steps[0].message.tool_calls == (MADE,)
    assert values(sqlite, "SELECT result FROM tool_calls WHERE result IS NOT NULL") == []


def test_format_reward_counts_readable_calls() -> None:
    form = find("rewards", "format")
    shares = {GOOD: 1.0, COMPLETE: 1.0, COMPLETE[:-1]: 0.0, f"<think>{GOOD}": 0.0, f"x<think>{GOOD}</think>": 0.0}
    for text, share in shares.items():
        step = Step(0, (), (1,), (2,), (-0.1,), "stop", parse_text(text), 0)
        assert form(Episode(Task("t", (), "2"), steps=(step,))) == share


# --- bounds -------------------------------------------------------------------------------------------------------------------


def test_parse_text_stops_after_a_thousand_calls() -> None:
    message = parse_text(GOOD * (MAX_CALLS + 500))
    assert message.tool_calls[:MAX_CALLS] == (MADE,) * MAX_CALLS
    (last,) = message.tool_calls[MAX_CALLS:]
    assert f"{MAX_CALLS} calls" in (last.error or "")
    assert message.content == GOOD * 500


def test_parse_text_limits_digits_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)  # as some library might
    try:
        for sign in ("", "-"):
            text = tag(f'{{"name": "f", "arguments": {{"x": {sign}{"9" * (MAX_DIGITS + 1)}}}}}')
            assert errors(text) == [f"no valid JSON: a whole number may have {MAX_DIGITS} digits, not more"]
    finally:
        sys.set_int_max_str_digits(before)
    text = tag(f'{{"name": "f", "arguments": {{"x": {"9" * MAX_DIGITS}}}}}')
    assert parse_text(text).tool_calls == (ToolCall("f", {"x": int("9" * MAX_DIGITS)}),)


def test_parse_text_decodes_no_call_too_long_for_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", pytest.fail)
    (error,) = errors(tag(json.dumps({"name": "f", "arguments": {"x": "y" * MAX_CHARACTERS}})))
    assert f"{MAX_CHARACTERS} characters" in (error or "")


HOSTILE = [
    tag("[" * 100_000 + "]" * 100_000), tag('{"a":' * 100_000), tag("{" + '"a": 1, ' * 60_000 + '"a": 1}'), "<think>" * 140_000,
    tag('{"name": "f", "arguments": {' + ", ".join(['"a": 1'] * 60_000) + "}}"), "</think>" * 120_000, "<tool_call>" * 90_000,
    tag('{"name": "f", "arguments": {"x": ' + "9" * 100_000 + "}}"), tag('{"name": "f", "arguments": {"x": 1e400}}'),
    tag('{"name": "f", "arguments": {"x": ' + "9" * 400_000 + ".5}}"), "<tool_call>{" * 80_000, "<think><tool_call>" * 55_000,
    "<tool_call></tool_call>" * 43_000, "</tool_call>" * 80_000, "<think><tool_call> " + " " * 10**6, "<tool_call" * 100_000,
    "<think>" + "<tool_call> " * 80_000, "<tool_call>{}" + " " * 10**6 + "x", "\ud800" * 10**6, "\0" * 10**6, " " * 10**6 + "<",
    tag('{"name": "f", "arguments": "' + '\\"' * 250_000 + '"}'), tag("\\" * 10**6), tag('"' * 10**6), "x<think>" * 100_000,
    "<think>a</think>" * 60_000, "x<think>a</think><tool_call>{}</tool_call>" * 24_000, tag("{" * 500 + '"a":1' + "}" * 500),
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.slow
def test_parse_text_reads_a_megabyte_fast_with_short_error(text: str) -> None:
    began = time.process_time()
    message = parse_text(text)
    assert time.process_time() - began < 20  # of a second or less: nothing is quadratic
    assert len(message.tool_calls) <= MAX_CALLS + 1
    assert all(call.error and len(call.error) < 500 for call in message.tool_calls)
    for call in message.tool_calls:
        (call.error or "").encode()


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", GOOD, COMPLETE, "x", "{", "}", '"', " "]))
)
def test_parse_text_makes_calls_outside_thoughts_or_error(parts: list[str]) -> None:
    text = "".join(parts)
    message = parse_text(text)
    made = [call for call in message.tool_calls if call.error is None]
    assert all(call == MADE for call in made)
    assert len(made) <= text.count('{"name"')
    if "<think>" not in text and "</think>" not in text and text.count("<tool_call>") == 1 and text.endswith(COMPLETE):
        assert made == [MADE]
