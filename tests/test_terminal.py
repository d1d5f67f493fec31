"""What a person meets first at the keyboard: help in groups, lists that fit, names that need not be typed, completion."""

from pathlib import Path

import pytest

from cli.commands import COMMANDS, GROUPS
from tests.test_cli import agentrl, data, run  # noqa: F401 - fixtures


def test_help_has_every_command_in_a_group_with_a_whole_line_each_and_three_examples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = agentrl(capsys, "--help").splitlines()
    assert max(map(len, lines)) <= 80
    places = [lines.index(f"{title}:") for title in ("Examples", *GROUPS)]
    assert places == sorted(places)
    assert len([line for line in lines[places[0] : places[1]] if line.startswith("  agentrl ")]) == 3
    for name, entry in COMMANDS.items():
        assert [line for line in lines if line.split() == [name, *entry.line.split()]]


def test_the_options_of_submit_are_in_groups_hooks_included(capsys: pytest.CaptureFixture[str]) -> None:
    text = agentrl(capsys, "submit", "--help")
    heads = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["What it learns from:", "Learning:", "The model:", "Sampling:", "The run:", "Stored episodes:", "Options:"]
    assert text.index("--hook") > text.index("The run:")


def test_submit_with_nothing_to_train_on_shows_three_examples_and_starts_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["submit"], ["submit", "--epochs", "2", "--model", "tiny"], ["submit", "--dry-run"]):
        assert agentrl(capsys, *words, code=2).count("agentrl submit") == 3
    assert not home.exists()
