"""Calls written as bare JSON: which turns are calls, how they are recorded, and how `strict` turns them off."""

from itertools import pairwise

import pytest

from agentrl.workflow.chat.parsing import parse_text
from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.chat.turn_stream import TurnStream
from agentrl.workflow.plugins import find, names
from agentrl.workflow.rewards.format import format
from agentrl.workflow.store import rollout_claims
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads.provenance import find_origin
from agentrl.workflow.store.row_codecs import message_row, message_value
from agentrl.workflow.store.steps import commit_sampled
from agentrl.workflow.tool_formats import ToolFormat
from agentrl.workflow.trajectory import CallRecord, Episode, Message, Step, StepRecord, Task, ToolCall
from tests.chat.test_rendering import SCHEMA
from tests.support.played_runs import EXPIRED, claim, start, submission, value
from tests.support.small_models import tokenizer

BARE = '{"name": "calculator", "arguments": {"expression": "12+7"}}'
LOOSE = ToolCall("calculator", {"expression": "12+7"}, loose=True)
FORMATS = [each for name in names("tool_formats") if (each := find("tool_formats", name)).json and name != "llama3"]
each_format = pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)


@each_format
@pytest.mark.parametrize(
    "text",
    [BARE, f"\n{BARE}\n", f"```json\n{BARE}\n```", f"```\n{BARE}```", BARE.replace("arguments", "parameters"),
     '{"type": "function", "name": "calculator", "arguments": "{\\"expression\\": \\"12+7\\"}"}'],
)  # fmt: skip
def test_parse_text_reads_bare_json_of_an_offered_tool_as_a_call(tool_format: ToolFormat, text: str) -> None:
    assert parse_text(text, tool_format, [SCHEMA]) == Message("assistant", "", tool_calls=(LOOSE,))
    thoughtful = parse_text(f"<think>hm</think>{text}", tool_format, [SCHEMA])
    assert thoughtful == Message("assistant", "", thought="hm", tool_calls=(LOOSE,))
    assert parse_text(text, tool_format, [SCHEMA], strict=True) == Message("assistant", text.strip())


@each_format
@pytest.mark.parametrize(
    "text",
    [f"I call {BARE}", f"{BARE} now", f"{BARE}\n{BARE}", BARE.replace("calculator", "another"), '{"name": "calculator"}',
     '{"answer": 19}', BARE[:-1], BARE.replace('{"expression": "12+7"}', "[1]"), f"```json\n{BARE}", f"```{BARE}``` so", "{}",
     '{"name": ["calculator"], "arguments": {}}', '{"name": "a", "name": "calculator", "arguments": {}}'],
)  # fmt: skip
def test_parse_text_reads_other_bare_json_as_text(tool_format: ToolFormat, text: str) -> None:
    assert parse_text(text, tool_format, [SCHEMA]) == Message("assistant", text)


def test_parse_text_reads_no_loose_call_without_tools() -> None:
    assert parse_text(BARE) == Message("assistant", BARE)


def test_parse_text_reads_no_loose_call_in_formats_without_json() -> None:
    assert parse_text(BARE, find("tool_formats", "pythonic"), [SCHEMA]).tool_calls == ()


@pytest.mark.parametrize(("strict", "text"), [(False, ""), (True, BARE)])
def test_chat_reads_loose_calls_unless_strict(strict: bool, text: str) -> None:
    chat = Chat(tokenizer(), strict_calls=strict)
    ids = tuple(chat.tokenizer.encode(f"{BARE}<|im_end|>", add_special_tokens=False))
    assert chat.parse(ids, [SCHEMA]).content == text


def test_turn_stream_sends_no_text_of_a_loose_call() -> None:
    for text in (BARE, f"```json\n{BARE}\n```", f"\x1c{BARE}"):
        stream = TurnStream(find("tool_formats", "hermes"))
        early = [piece for start, end in pairwise(range(len(text) + 1)) for piece in stream.take(text[start:end])]
        assert [*early, *stream.rest(parse_text(text, tools=[SCHEMA]))] == []


def test_format_reward_pays_nothing_for_a_loose_call() -> None:
    def scored(call: ToolCall) -> float:
        message = Message("assistant", "", tool_calls=(call,))
        return format(Episode(Task("t", (), ""), steps=(Step(0, (), (1,), (2,), (-0.1,), "stop", message, 0),)))

    assert scored(LOOSE) == 0.0
    assert scored(ToolCall("calculator", {})) == 1.0


def test_store_records_that_a_call_was_loose(database: Database) -> None:
    work = claim(database, start(database, submission())[0], lease=EXPIRED)
    message = Message("assistant", "", tool_calls=(LOOSE, ToolCall("calculator", {})))
    step = Step(0, (), (1,), (2,), (-0.1,), "stop", message, 0)
    calls = tuple(CallRecord(call, "none", None) for call in message.tool_calls)
    episode = work.episodes[0].id
    commit_sampled(database, work.fence, [StepRecord(episode, step, work.policy_id, BARE, calls)])
    assert value(database, "SELECT count(*) FROM v_tool_calls WHERE loose") == 1
    again = rollout_claims.claim_group(database, work.fence.group, "host:2/other", EXPIRED)
    assert again
    for found in (again.episodes[0], find_origin(database, episode).record.episode):
        assert [call.loose for call in found.steps[0].message.tool_calls] == [True, False]
    assert message_value(message_row(message)) == message
