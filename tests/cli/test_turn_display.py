"""voice, keyboard, history: what a person types and sees in a chat, whatever comes in which pieces."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cli.keyboard import HEADER, MAX_FILE_BYTES, MAX_MESSAGES, TypedLines, read_message
from agentrl.cli.turn_display import Voice
from agentrl.workflow.chat.parsing import parse_text
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.runtime.shown_text import clean
from agentrl.workflow.tool_formats.hermes import hermes

# what is typed


def test_keyboard_joins_blocks_and_continued_lines() -> None:
    def typed(*lines: str) -> str:
        rest = iter(lines)
        return read_message(lambda prompt: next(rest))

    assert typed("plain") == "plain"
    assert typed("a\\", "b\\", "c") == "a\nb\nc"
    assert typed('"""', "  a", "", 'b"""') == "  a\n\nb"
    assert typed('"""one"""') == "one"
    assert typed('""""""') == ""
    with pytest.raises(ConfigError, match="1000000"):
        read_message(lambda prompt: "x" * 1000 + "\\")


def test_history_is_bounded_and_survives_torn_lines(tmp_path: Path) -> None:
    file = tmp_path / "home" / "chat_history"
    TypedLines(file).add("first")
    with file.open("a") as lines:
        lines.write('"torn\n[1]\n"\\u001b[2J"\n' + '""\n')
    history = TypedLines(file)
    for number in range(3000):
        history.add(f"{number} " + "x" * 400)
    history.add("y" * 20_000)
    assert history.read()[-1].startswith("2999")
    assert len(history.read()) <= MAX_MESSAGES
    assert file.stat().st_size < MAX_FILE_BYTES
    assert file.read_text().startswith(HEADER)
    assert [other.name for other in file.parent.iterdir()] == ["chat_history"]


@pytest.mark.parametrize(
    "found", ["a letter to a friend\n", b"\xff\xfe\x00", "x" * (MAX_FILE_BYTES + 1), "folder", "link", "pipe"]
)
def test_history_file_that_is_not_ours_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], found: str | bytes
) -> None:
    file = tmp_path / "chat_history"
    if found == "folder":
        file.mkdir()
    elif found == "pipe":
        os.mkfifo(file)
    elif found == "link":
        (tmp_path / "other").write_text("mine\n")
        file.symlink_to(tmp_path / "other")
    else:
        file.write_bytes(found if isinstance(found, bytes) else found.encode())
    history = TypedLines(file)
    assert history.read() == []
    history.add("hello")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "is not saved" in said
    if found == "link":
        assert (tmp_path / "other").read_text() == "mine\n"
    elif found not in ("folder", "pipe"):
        assert file.read_bytes() == (found if isinstance(found, bytes) else found.encode())


# what is shown


def shown(pieces: list[str], thinks: bool = False) -> str:
    """What a person sees of the pieces of a turn, and of its rest."""
    written: list[str] = []
    voice = Voice(lambda text, style: written.append(text), thinks, hermes.opens)
    for piece in pieces:
        voice.take(piece)
    lines = list(voice.rest(parse_text("".join(pieces))))
    return "".join(written) + "".join(f"{text}\n" for text, _ in lines)


TURNS = {
    "plain": ("Hello there", "Hello there\n"),
    "thought": ("<think>\nhm hm\n</think>\n\nyes", "(thinks) hm hm\nyes\n"),
    "call": ('See <tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>', "See\n  a {}\n"),
    "after": ('A\n<tool_call>{"name": "a"}</tool_call>\nB', "A\nB\n  a {}\n"),
    "broken": ("<tool_call>{oops", "<tool_call>{oops\n  (unreadable call) <tool_call> was not closed\n"),
    "like a mark": ("a <tool b <thin", "a <tool b <thin\n"),
    "mark in words": ("a <think> b </think> c", None),
    "nothing": ("", ""),
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_turn_display_is_independent_of_chunks(name: str, size: int) -> None:
    text, expected = TURNS[name]
    seen = shown([text[at : at + size] for at in range(0, len(text), size)])
    if expected is not None:
        assert seen == expected
    assert seen == shown([text])


def test_turn_display_shows_thought_opened_by_template() -> None:
    assert shown(list("hm</think>yes"), thinks=True) == "(thinks) hm\nyes\n"


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "a", " ", "\n", "<", '{"name": "a"}', "\x1b[2J"])
    )
)
def test_turn_display_loses_no_text(pieces: list[str]) -> None:
    seen = shown(pieces)
    message = parse_text("".join(pieces))
    assert "".join(clean(message.content).split()) in "".join(clean(seen).split())
    assert all(call.name in seen for call in message.tool_calls)
