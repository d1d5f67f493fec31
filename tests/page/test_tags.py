"""Tags and notes: what people say of a run, written by commands and shown by them, on both databases."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.workflow.errors import ConfigError, ConflictError, NotFoundError
from agentrl.workflow.store import planning, tags_and_notes
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import label_rows
from tests.support.page_answers import PageOver
from tests.support.played_runs import submission


@pytest.fixture
def labelled(database: Database) -> Database:
    """A database with the runs `first` and `second`."""
    for name in ("first", "second"):
        planning.submit(database, submission(name))
    return database


def command(*words: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, [*words])
    return ended.exit_code, ended.output


def test_change_tags_adds_and_removes_by_name_or_number(labelled: Database) -> None:
    assert tags_and_notes.change_tags(labelled, "first", ["good", " paper ", "good"]) == ["good", "paper"]
    assert tags_and_notes.change_tags(labelled, "1", ["bad", "good"], ["paper", "never"]) == ["bad", "good"]
    assert label_rows.list_tags(labelled, "first") == ["bad", "good"]
    assert label_rows.load_tags(labelled, [1, 2]) == {1: ["bad", "good"]}
    assert label_rows.list_tags(labelled, "second") == []


def test_change_tags_prefers_adding_to_removing(labelled: Database) -> None:
    assert tags_and_notes.change_tags(labelled, "first", ["good"], ["good"]) == ["good"]


def test_change_tags_refuses_invalid_tag_and_writes_nothing(labelled: Database) -> None:
    for word in ("", "  ", "a\nb", "\x1b[31m", "\0", "\ud800", "x" * 65):
        with pytest.raises(ConfigError, match="is not a valid tag"):
            tags_and_notes.change_tags(labelled, "first", ["good", word])
        assert label_rows.list_tags(labelled, "first") == [], word
        assert tags_and_notes.change_tags(labelled, "first", [], [word]) == [], word


def test_change_tags_takes_any_printable_text_that_finds_its_run(labelled: Database) -> None:
    page = PageOver(labelled)
    for word in ("%", "_", "a/b", "🦊 ok", "'; DROP TABLE runs; --", "x" * 64):
        tags_and_notes.change_tags(labelled, "first", [word])
        assert [row["tags"] for row in page.read("/api/runs", tag=word)["rows"]] == [[word]], word
        tags_and_notes.change_tags(labelled, "first", [], [word])
        assert page.read("/api/runs", tag=word)["rows"] == [], word


def test_run_has_limited_tags_and_notes(labelled: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    tags_and_notes.change_tags(labelled, "first", [str(number) for number in range(tags_and_notes.MAX_TAGS)])
    with pytest.raises(ConflictError, match="at most 100 tags"):
        tags_and_notes.change_tags(labelled, "first", ["more"])
    assert tags_and_notes.change_tags(labelled, "first", ["more"], ["0"])[-1] == "more"
    monkeypatch.setattr(tags_and_notes, "MAX_NOTES", 2)
    tags_and_notes.add_note(labelled, "first", "one")
    tags_and_notes.add_note(labelled, "first", "two")
    with pytest.raises(ConflictError, match="at most 2 notes"):
        tags_and_notes.add_note(labelled, "first", "three")


def test_notes_are_stored_verbatim_and_listed_newest_first(labelled: Database) -> None:
    first = tags_and_notes.add_note(labelled, "first", "  lr too high\nsee #7 🦊  ")
    second = tags_and_notes.add_note(labelled, "first", "\0\ud800<b>")
    tags_and_notes.add_note(labelled, "second", "another run's")
    notes = label_rows.list_notes(labelled, "first")
    assert [(note["id"], note["text"]) for note in notes] == [(second, "\ufffd?<b>"), (first, "lr too high\nsee #7 🦊")]
    assert all(isinstance(note["created_at"], datetime) for note in notes)
    shown = PageOver(labelled).read("/api/runs/1")
    assert [note["text"] for note in shown["notes"]] == ["\ufffd?<b>", "lr too high\nsee #7 🦊"]
    tags_and_notes.remove_note(labelled, "first", second)
    assert [note["id"] for note in label_rows.list_notes(labelled, "1")] == [first]


def test_add_note_refuses_empty_and_huge_text(labelled: Database) -> None:
    for text in ("", " \n ", "x" * (tags_and_notes.MAX_NOTE_CHARS + 1)):
        with pytest.raises(ConfigError, match="1 to 10000 characters"):
            tags_and_notes.add_note(labelled, "first", text)


def test_remove_note_leaves_note_of_other_run(labelled: Database) -> None:
    note = tags_and_notes.add_note(labelled, "second", "mine")
    for number in (note, note + 1, 2**70):
        with pytest.raises(NotFoundError, match=f"has no note {number}"):
            tags_and_notes.remove_note(labelled, "first", number)
    assert len(label_rows.list_notes(labelled, "second")) == 1


# the commands


@pytest.fixture
def stored(own_database: Database) -> Database:
    """The process's own store, with the runs `first` and `second`."""
    for name in ("first", "second"):
        planning.submit(own_database, submission(name))
    return own_database


def test_tag_command_adds_removes_and_lists(stored: Database) -> None:
    assert command("tag", "first")[1] == "first has no tag. Give it one: agentrl tag first good\n"
    assert command("tag", "first", "good", "paper") == (0, "good\npaper\n")
    assert command("tag", "1", "better", "-r", "good", "-r", "paper") == (0, "better\n")
    assert json.loads(command("tag", "1", "--json")[1]) == {"run": "first", "tags": ["better"]}


def test_runs_command_shows_tags_only_if_any(stored: Database) -> None:
    assert "tags" not in command("runs")[1]
    command("tag", "first", "good", "new 🦊")
    assert "good, new 🦊" in command("runs")[1]
    assert "tags" not in json.loads(command("runs", "--json")[1])[0]  # which are the columns of v_runs


def test_note_command_adds_lists_and_removes(stored: Database) -> None:
    assert "first has no notes." in command("note", "first")[1]
    command("note", "first", "--", "-1 is the best reward\nof all")
    code, said = command("note", "first", "\x1b[31mred")
    assert code == 0
    assert said.splitlines()[0].endswith("  red")
    assert said.splitlines()[1].endswith("-1 is the best reward")
    assert "1  20" in said
    assert [row["id"] for row in json.loads(command("note", "first", "-r", "2", "--json")[1])] == [1]


def test_tag_command_names_similar_run(stored: Database) -> None:
    for words in (
        ("tag", "firsd", "good"),
        ("tag", "firsd"),
        ("note", "firsd", "x"),
        ("note", "firsd"),
        ("note", "firsd", "-r", "1"),
    ):
        with pytest.raises(NotFoundError, match="There is no run 'firsd'") as raised:
            CliRunner().invoke(app, [*words], catch_exceptions=False)
        assert "Did you mean 'first'?" in raised.value.hint


def test_tag_command_makes_no_store(home: Path) -> None:
    for words in (("tag", "first", "good"), ("tag", "first"), ("note", "first", "x"), ("note", "first")):
        assert command(*words)[0] != 0
    assert not home.exists() or not any(home.glob("*.db"))
