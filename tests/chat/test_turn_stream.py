"""turn_stream: what is told of a turn while it is sampled adds up to what the parser makes of all of it."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.workflow.chat.parsing import parse_text
from agentrl.workflow.chat.turn_stream import TextPiece, TurnStream
from agentrl.workflow.plugins import find, names
from agentrl.workflow.tool_formats import ToolFormat
from tests.chat.test_tool_formats import TAGS, WRITTEN

FORMATS = [find("tool_formats", name) for name in names("tool_formats")]
each_format = pytest.mark.parametrize("tool_format", FORMATS, ids=names("tool_formats"))
pieces_of_text = st.lists(
    st.sampled_from([*TAGS, *WRITTEN.values(), "<", "[", "{", '{"name":', "  ", "word ", "<thi", "</thin", "<tool_"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    max_size=8,
).map("".join)


def told(tool_format: ToolFormat, text: str, cuts: Iterable[int], thinking: bool) -> tuple[list[TextPiece], list[TextPiece]]:
    """What a stream tells of a text that comes in pieces: before its end, and then."""
    stream = TurnStream(tool_format, thinking)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    early = [piece for start, end in pairwise(places) for piece in stream.take(text[start:end])]
    return early, list(stream.rest(parse_text(text, tool_format, (), thinking)))


def joined(pieces: Iterable[TextPiece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


@each_format
@given(text=pieces_of_text, cuts=st.lists(st.integers(0, 200), max_size=30), thinking=st.booleans())
def test_turn_stream_adds_up_to_parsed_turn(tool_format: ToolFormat, text: str, cuts: list[int], thinking: bool) -> None:
    message = parse_text(text, tool_format, (), thinking)
    early, late = told(tool_format, text, cuts, thinking)
    assert joined([*early, *late], "thought") == message.thought
    assert joined([*early, *late], "content") == message.content


@each_format
def test_turn_stream_sends_no_part_of_call(tool_format: ToolFormat) -> None:
    written = tool_format.write("I look it up.", find_calls(tool_format), ())
    early, late = told(tool_format, written, range(len(written)), thinking=False)
    assert joined(early, "content") in ("", "I look it up.")
    assert joined([*early, *late], "content") == "I look it up."


def find_calls(tool_format: ToolFormat) -> tuple[object, ...]:
    return parse_text(WRITTEN[tool_format.name], tool_format).tool_calls


def test_turn_stream_sends_letters_without_outer_spaces() -> None:
    early, late = told(find("tool_formats", "hermes"), "  Hello,  world. \n", range(30), thinking=False)
    assert [piece.text for piece in early] == ["H", "e", "l", "l", "o", ",", "  w", "o", "r", "l", "d", "."]
    assert late == []


def test_turn_stream_separates_thought_from_content() -> None:
    early, late = told(find("tool_formats", "hermes"), "<think>\nWell </th then\n</think>\n\nYes", range(60), thinking=False)
    assert (joined(early, "thought"), joined(early, "content"), late) == ("Well </th then", "Yes", [])


def test_turn_stream_sends_thought_that_prompt_opened() -> None:
    early, late = told(find("tool_formats", "hermes"), "Well\n</think>Yes <b>", range(60), thinking=True)
    assert (joined(early, "thought"), joined(early, "content"), late) == ("Well", "Yes <b>", [])


def test_turn_stream_sends_stray_closing_tag_as_content() -> None:
    assert parse_text("a</think>b", thinking=False).content == "a</think>b"
    early, _ = told(find("tool_formats", "hermes"), "a</think>b", range(20), thinking=False)
    assert joined(early, "content") == "a</think>b"


def test_turn_stream_holds_leading_object_until_it_is_no_call() -> None:
    early, _ = told(find("tool_formats", "llama3"), '{"answer": 1} and more', range(60), thinking=False)
    assert early[0] == TextPiece("content", '{"a')
    assert joined(early, "content") == '{"answer": 1} and more'
