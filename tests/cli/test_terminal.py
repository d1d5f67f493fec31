"""What a person meets first at the keyboard: help in groups, lists that fit, names that need not be typed, completion."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text

from agentrl.cli.commands import COMMANDS, GROUPS
from agentrl.cli.compare import _policies_hint
from agentrl.cli.main import main
from agentrl.workers.stack.process import database as process_database
from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.runtime.shown_text import CELL_CHARS
from agentrl.workflow.settings import settings
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.tables.column_meanings import MEANINGS
from agentrl.workflow.tables.views import VIEWS
from tests.cli.test_cli import agentrl, data, run  # noqa: F401 - fixtures
from tests.conftest import forget_process
from tests.support.played_runs import ready, submission
from tests.support.small_models import tiny_random


def test_help_groups_every_command_with_line_and_examples(
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


def test_submit_help_groups_options_and_hooks(capsys: pytest.CaptureFixture[str]) -> None:
    text = agentrl(capsys, "submit", "--help")
    heads = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert heads == [
        "What it trains on:",
        "Learning:",
        "The model:",
        "Your own agent:",
        "Sampling:",
        "The run:",
        "Stored episodes:",
        "Options:",
    ]
    assert text.index("--hook") > text.index("The run:")


def test_submit_without_dataset_only_shows_examples(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["submit"], ["submit", "--epochs", "2", "--model", "tiny"], ["submit", "--dry-run"]):
        assert agentrl(capsys, *words, code=2).count("agentrl submit") == 3
    assert not home.exists()


def test_lists_fit_80_columns_and_name_omissions(
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


def test_sort_option_is_ascending_or_descending_with_minus(
    run: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rewards(sort: str) -> list[float | None]:
        return [row["reward"] for row in json.loads(agentrl(capsys, "episodes", "--sort", sort, "--json"))]

    assert rewards("-reward") == [1, 1, 0, 0, None, None, None, None]
    assert rewards("reward") == [0, 0, 1, 1, None, None, None, None]
    assert rewards("-advantage") == rewards("-reward"), "the advantage is 1 or -1, by the reward"
    assert rewards("advantage") == rewards("reward")
    assert json.loads(agentrl(capsys, "runs", "--sort", "-best", "--limit", "1", "--json"))[0]["run"] == run
    assert "reward" in agentrl(capsys, "episodes", "--sort", "rewards", code=2)
    assert "seconds" in agentrl(capsys, "runs", "--sort", "second; DROP TABLE runs", code=2)


def test_run_argument_defaults_to_newest_and_says_so(
    run: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, said in (
        (["episodes"], "The run: by-hand"),
        (["events"], "The run: by-hand"),
        (["watch", "--json"], "The run: by-hand"),
        (["replay"], "The episode: 4, of the run by-hand"),
        (["why"], "The episode: 4, of the run by-hand"),
    ):
        assert main(words) == 0
        assert said in capsys.readouterr().err


def test_run_argument_skips_evaluations_if_other_runs_exist(
    data: Database,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    def defaults() -> list[str]:
        assert main(["events"]) == main(["replay"]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("The ")]

    ready(data, submission("before", kind="eval"))
    assert defaults() == ["The run: before", "The episode: 4, of the run before"]
    ready(data, submission("trained"))
    ready(data, submission("after", kind="eval"))
    assert defaults() == ["The run: trained", "The episode: 8, of the run trained"]


@pytest.mark.parametrize(
    ("words", "choices"),
    [("replay 4 --verify", "tools, tokens, rewards, all"), ("dpo RUN --reference", "start, sampler"), ("replay --step", "")],
)
def test_option_without_value_names_its_choices(words: str, choices: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert "requires an argument." in said
    assert said.count("Choose one of") == bool(choices)
    assert choices in said


def test_run_argument_without_runs_suggests_submit(
    data: Database,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "agentrl submit" in agentrl(capsys, "episodes", code=5)
    assert "agentrl watch" in agentrl(capsys, "replay", code=5)


def test_schema_explains_every_column_of_every_view(
    run: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = {each["view"]: each["columns"] for each in json.loads(agentrl(capsys, "sql", "--schema", "--json"))}
    assert told.keys() == VIEWS.keys()
    assert not [(view, each["column"]) for view, columns in told.items() for each in columns if not each["meaning"]]
    assert {each["column"] for columns in told.values() for each in columns} == MEANINGS.keys()
    assert max(len(each["meaning"]) for columns in told.values() for each in columns) <= CELL_CHARS
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["--schema"], *(["--schema", view] for view in VIEWS)):
        assert max(map(len, agentrl(capsys, "sql", *words).splitlines())) <= 80


def test_schema_suggests_nearest_view_or_column(run: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert "v_episodes" in agentrl(capsys, "sql", "--schema", "v_episode", code=5)
    assert "mean_reward" in agentrl(capsys, "sql", "SELECT mean_rewrd FROM v_iterations", code=2)
    assert "v_iterations" in agentrl(capsys, "sql", "SELECT mean_reward FROM v_iteration", code=2)
    assert "--schema" in agentrl(capsys, "sql", code=2)
    assert agentrl(capsys, "sql", "SELECT run, status FROM v_runs WHERE 1 = 0", "--csv") == "run,status\n"


@pytest.fixture
def written(home: Path) -> Path:
    """Logs as an embedded stack leaves them."""
    folder = home / "stack"
    folder.mkdir(parents=True)
    (folder / "supervisor.log").write_text("it began\n")
    (folder / "tools.log").write_bytes(
        b"".join(b"line %d\n" % n for n in range(100)) + b"\x1b[2J\x1b]0;owned\x07evil \xff\x9b31m\r!\n"
    )
    (folder / "rollout-train.log").write_text("long " + 5000 * "x" + "\n")
    return folder


def test_logs_command_shows_last_lines_without_escapes(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = agentrl(capsys, "logs", "tools", "-n", "3").splitlines()
    assert lines[:2] == ["line 98", "line 99"]
    assert "evil" in lines[2]
    assert "owned" not in lines[2]
    assert "it began" in agentrl(capsys, "logs")
    assert len(agentrl(capsys, "logs", "train")) < 2100
    assert agentrl(capsys, "logs", "rollout,train") == agentrl(capsys, "logs", "rollout")
    assert "tools" in agentrl(capsys, "logs", "tool", code=5)


def test_logs_command_without_stack_says_how_to_start_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "agentrl up" in agentrl(capsys, "logs", code=5)
    assert not home.exists()


def test_logs_command_follows_until_ctrl_c(written: Path) -> None:
    command = [sys.executable, "-m", "agentrl.cli", "logs", "supervisor", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "AGENTRL_HOME": str(written.parent)}) as shown:
        assert shown.stdout is not None
        assert shown.stdout.readline() == b"it began\n"
        with (written / "supervisor.log").open("a") as log:
            log.write("half a ")
            log.flush()
            log.write("line\nanother\n")
        assert shown.stdout.readline() == b"half a line\n"
        (written / "supervisor.log").write_text("anew\n")
        assert shown.stdout.readline() == b"another\n"
        assert shown.stdout.readline() == b"anew\n"
        shown.send_signal(signal.SIGINT)
        assert shown.wait(20) == 130


def offered(line: str, home: Path) -> tuple[set[str], set[str]]:
    """What bash is told that the last word of a line may become, and what was imported for it."""
    words = line.split(" ")
    environment = {
        **os.environ, "AGENTRL_HOME": str(home), "_AGENTRL_COMPLETE": "complete_bash", "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }  # fmt: skip
    code = "import atexit, sys; atexit.register(lambda: print('|', *sys.modules)); from agentrl.cli.main import main; main([])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    said, _, modules = done.stdout.rpartition("|")
    assert not done.stderr
    return set(said.split()), set(modules.split())


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("agentrl ep", "episodes"),
        ("agentrl watch ", "by-hand"),
        ("agentrl replay ", "4"),
        ("agentrl eval --policy by", "by-hand"),
        ("agentrl submit --dataset ari", "arithmetic"),
        ("agentrl submit --algorithm dr", "dr_grpo"),
        ("agentrl submit --env cod", "code_tiny"),
        ("agentrl submit --tools calc", "calculator"),
        ("agentrl submit --model ti", "tiny"),
        ("agentrl submit -s rollout.gr", "rollout.group_size="),
        ("agentrl submit --gr", "--group-size"),
        ("agentrl sql --schema v_it", "v_iterations"),
    ],
)
@pytest.mark.slow
def test_completion_offers_words_quickly(run: str, line: str, word: str) -> None:  # noqa: F811
    words, modules = offered(line, settings().home)
    assert word in words
    assert not {"torch", "transformers", "celery", "alembic", "datasets"} & modules
    assert "sqlalchemy" not in modules or settings().database_url


def test_completion_without_database_makes_none(tmp_path: Path) -> None:
    assert offered("agentrl watch ", tmp_path / "home")[0] == set()
    assert not (tmp_path / "home").exists()


FIELDS = {
    "events by-hand": {"id", "run_id", "kind", "subject", "detail", "created_at"},
    "watch by-hand": {"run", "iterations", "progress", "evals"},
    "replay 1": {"episode", "agent_error", "agent_output", "rewards", "grades", "steps"},
    "doctor": {"name", "state", "found", "todo"},
    "config show --origin": {"key", "value", "origin"},
    "sql --schema": {"view", "meaning", "columns"},
}
"""Command -> the fields of its document, or of the objects that it lists, that `docs/stability.md` promises."""


@pytest.mark.slow
@pytest.mark.parametrize("command", FIELDS)
def test_json_fields_stay(run: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    capsys.readouterr()
    main([*command.split(), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {*(found[0] if isinstance(found, list) else found)} >= FIELDS[command]


@pytest.mark.parametrize(("words", "view"), [("runs", "v_runs"), ("episodes", "v_episodes")])
def test_json_list_has_columns_of_view(
    run: str,  # noqa: F811
    words: str,
    view: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = json.loads(agentrl(capsys, "sql", f"SELECT * FROM {view} LIMIT 1", "--json"))
    more = {"task_id", "question", "parts", "failed_call", "more_errors", "fate"} if words == "episodes" else set()
    assert json.loads(agentrl(capsys, words, "--limit", "1", "--json"))[0].keys() == asked[0].keys() | more


def test_runs_command_says_how_many_it_leaves_out(
    run: str,  # noqa: F811
    data: Database,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    columns = "status, dataset, base, base_hash, seed, format, epochs, iterations, output_dir, config, manifest"
    query = f"""
        INSERT INTO runs (name, kind, measures_id, measures_version, {columns})
        SELECT 'measured', 'eval', id, 0, {columns} FROM runs"""
    with data.engine.begin() as tx:
        tx.execute(text(query))
    assert main(["runs"]) == 0
    output = capsys.readouterr()
    assert ("measured" in output.out, output.err.splitlines()[-1]) == (
        False,
        "Left out: 1 evaluation that runs planned. List them: agentrl runs --kind eval",
    )
    assert [row["run"] for row in json.loads(agentrl(capsys, "runs", "--kind", "eval", "--json"))] == ["measured"]
    assert main(["runs", "--kind", "serve"]) == 0
    assert capsys.readouterr().err == "No run is of the kind 'serve'.\n"
    refusal = agentrl(capsys, "runs", "--kind", "evl", "--csv", code=2)
    assert "There is no kind 'evl'.\n  Did you mean 'eval'? The kind is one of train, eval, fork, serve," in refusal


@pytest.mark.parametrize("words", ["runs", "episodes", "tasks", "events"])
def test_list_prints_csv_of_all_columns(
    run: str,  # noqa: F811
    words: str,
    data: Database,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    documents = json.loads(agentrl(capsys, words, "--json"))
    listed = [*csv.DictReader(io.StringIO(agentrl(capsys, words, "--csv")))]
    assert [[*row] for row in listed] == [[*row] for row in documents]
    assert len(listed) > 0
    if words == "episodes":
        assert [json.loads(row["parts"]) for row in listed] == [row["parts"] for row in documents]
    assert "exclude each other" in agentrl(capsys, words, "--csv", "--json", code=2)
    if words == "events":
        with data.engine.begin() as tx:
            tx.execute(text("DELETE FROM events"))
    nothing = {"runs": ("--kind", "serve"), "episodes": ("--search", "none"), "tasks": ("--search", "none"), "events": ()}
    empty = csv.DictReader(io.StringIO(agentrl(capsys, words, *nothing[words], "--csv")))
    assert ([*empty], [*(empty.fieldnames or ())]) == ([], [*documents[0]])


def test_tasks_command_lists_outcomes(run: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    solved = json.loads(agentrl(capsys, "tasks", "--outcome", "solved", "--json"))
    assert sorted((task["task"], task["first_solved"]) for task in solved) == [("train/0", 1), ("train/1", 1)]
    assert json.loads(agentrl(capsys, "tasks", "--outcome", "never_solved", "--json")) == []
    listed = agentrl(capsys, "tasks", run, "--sort", "-task").splitlines()
    assert [line.split()[1] for line in listed[1:3]] == ["train/1", "train/0"]
    assert [" 1 of 1 " in line for line in listed] == [False, True, True]
    assert [(task["right_episodes"], task["episodes"]) for task in solved] == [(1, 2), (1, 2)]
    assert [" 1 of 2 " in line for line in listed] == [False, True, True]
    for sort, is_tied in (("solved", True), ("task", False)):
        main(["tasks", run, "--sort", sort, "--limit", "1"])
        assert ("the same `solved` as the last one" in capsys.readouterr().err) is is_tied
    assert [task["task"] for task in json.loads(agentrl(capsys, "tasks", "--search", "2 + 1", "--json"))] == ["train/1"]
    assert agentrl(capsys, "tasks", "--sort", "-mean_reward") == agentrl(capsys, "tasks", "--sort", "-reward")
    main(["tasks", run, "--outcome", "never_solved"])
    assert capsys.readouterr().err == f"No task matches these filters. {run} has 2 tasks.\n"
    assert "never_solved" in agentrl(capsys, "tasks", "--outcome", "never", code=2)


def test_changes_command_judges_run_or_shows_iteration(run: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    found = json.loads(agentrl(capsys, "changes", "--json"))
    assert (found["run"], found["is_healthy"], found["troubles"]) == (run, True, [])
    assert (found["health"]["iteration"], found["drop"], found["gain"]) == (1, None, None)
    printed = agentrl(capsys, "changes")
    assert printed.startswith("by-hand is running. Nothing unusual: in its finished iteration,")
    assert "largest drop of the mean reward: none" in printed
    assert json.loads(agentrl(capsys, "changes", run, "--iteration", "1", "--json"))["iteration"] == 1
    assert "part numeric_answer" in agentrl(capsys, "changes", run, "--iteration", "1")
    for words in (("changes", run, "--iteration", "9"), ("episodes", run, "--iteration", "9", "--json")):
        assert "has no iteration 9: its iterations are 1 to 2." in agentrl(capsys, *words, code=5)


def test_compare_runs_says_never_evaluated_and_what_to_type(
    run: str,  # noqa: F811
    data: Database,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    ready(data, submission("other", seed=3))
    assert main(["compare", run, "other", "--runs"]) == 0
    output = capsys.readouterr()
    lines = {line.partition("  ")[0]: line.split()[-2:] for line in output.out.splitlines()}
    assert lines["held-out reward, newest"] == ["never", "evaluated"]
    assert lines["iterations planned"] == ["2", "1"]
    assert lines["seed"] == ["0", "3"]
    assert "agentrl eval --policy by-hand; then: agentrl compare by-hand other" in output.err
    assert f"agentrl compare {run} other --runs" in agentrl(capsys, "compare", run, "other", code=5)
    with pytest.raises(NotFoundError, match="no run or model folder 'nobody'"):  # not a missing evaluation
        _policies_hint(run, "nobody")


def test_episodes_command_searches_and_filters(run: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    def ids(*filters: str) -> list[int]:
        return [row["id"] for row in json.loads(agentrl(capsys, "episodes", run, "--json", *filters))]

    right = ids("--min-reward", "1")
    first, rest = ids("--outcome", "solved", "--limit", "1"), ids("--outcome", "solved", "--offset", "1")
    assert ids("--outcome", "solved") == first + rest == right
    assert ids("--search", "what is IT?") == ids("--status", "done")
    assert ids("--search", "nothing has this") == ids("--error", "code_error") == ids("--truncated") == []
    assert "no_longer_solved" in agentrl(capsys, "episodes", run, "--outcome", "no_longer", code=2)
    assert "Did you mean 'done'?" in agentrl(capsys, "episodes", run, "--status", "don", code=2)
    assert "The stop reason is one of" in agentrl(capsys, "episodes", run, "--stop-reason", "tired", code=2)
    assert "has sampled no task 'train/99'." in agentrl(capsys, "episodes", run, "--task", "train/99", code=5)
    assert agentrl(capsys, "episodes", "--sort", "-task") == agentrl(capsys, "episodes", "--sort", "-question")
    assert "Known: advantage, answer," in agentrl(capsys, "episodes", "--sort", "sample", code=2)


@pytest.mark.slow
def test_stack_start_failure_leaves_run_with_reason_and_hint(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTRL_REDIS_SERVER", "/bin/false")
    forget_process()
    model = tiny_random(tmp_path / "model")
    told = agentrl(capsys, "submit", "--dataset", "arithmetic", "--model", str(model), "--name", "stuck", code=4)
    assert "agentrl logs supervisor, then: agentrl resume stuck" in told
    (run,) = json.loads(agentrl(capsys, "runs", "--json"))  # noqa: F811
    assert (run["run"], run["status"], run["reason"]) == ("stuck", "failed", "The embedded stack did not start.")
    assert main(["logs", "supervisor"]) == 0
    assert "/bin/false does not start" in capsys.readouterr().out
    process_database().close()
    forget_process()
