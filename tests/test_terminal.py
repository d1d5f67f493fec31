"""What a person meets first at the keyboard: help in groups, lists that fit, names that need not be typed, completion."""

import json
from pathlib import Path

import pytest

from cli.commands import COMMANDS, GROUPS
from cli.main import main
from tests.test_cli import agentrl, data, run  # noqa: F401 - fixtures
from workflow.store import planning
from workflow.store.connect import Database


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


def test_lists_fit_a_terminal_of_80_columns_and_name_what_they_leave_out(
    run: str,  # noqa: F811
    data: Database,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    planning.stop(data, run, "paused", "too many of its episodes failed: " + 200 * "why ")
    whole = agentrl(capsys, "runs").splitlines()[0].split()
    for words, width in ((["runs"], 60), (["runs"], 80), (["episodes", run], 80)):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(words) == 0
        output = capsys.readouterr()
        assert max(map(len, output.out.splitlines())) <= width
        if words == ["runs"]:
            assert "    reason: too many of its episodes" in output.out
            named = output.err.partition("columns: ")[2].partition(".")[0].split(", ")
            assert {*output.out.splitlines()[0].split(), *filter(None, named)} == set(whole)
            assert any(named) or width == 80


def test_lists_are_sorted_the_greatest_first_or_with_a_minus_the_least(
    run: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rewards(sort: str) -> list[float | None]:
        return [row["reward"] for row in json.loads(agentrl(capsys, "episodes", "--sort", sort, "--json"))]

    assert rewards("reward") == [1, 1, 0, 0, None, None, None, None]
    assert rewards("-reward") == [0, 0, 1, 1, None, None, None, None]
    assert json.loads(agentrl(capsys, "runs", "--sort", "best", "--limit", "1", "--json"))[0]["run"] == run
    assert "reward" in agentrl(capsys, "episodes", "--sort", "rewards", code=2)
    assert "seconds" in agentrl(capsys, "runs", "--sort", "second; DROP TABLE runs", code=2)


def test_without_a_name_the_newest_run_or_the_last_episode_is_meant_and_said(
    run: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, said in (
        (["episodes"], "The newest run: by-hand"),
        (["events"], "The newest run: by-hand"),
        (["watch", "--json"], "The newest run: by-hand"),
        (["replay"], "The last episode: 4"),
        (["why"], "The last episode: 4"),
    ):
        assert main(words) == 0
        assert said in capsys.readouterr().err


def test_without_a_name_and_without_a_run_the_first_one_is_shown_how_to_make(
    data: Database,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "agentrl submit" in agentrl(capsys, "episodes", code=5)
    assert "agentrl watch" in agentrl(capsys, "replay", code=5)
