"""The command line: what each command prints and exits with, on a run written by hand; nothing heavy at the start."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text as sql

from agentrl.cli.console import show_json
from agentrl.cli.doctor import Check, _gsm8k
from agentrl.cli.eval_run import _describe_scoring
from agentrl.cli.follow import is_somebody_working, load_view, summary
from agentrl.cli.main import main
from agentrl.cli.plot import buckets, plot, sparkline
from agentrl.cli.run_view import RunView, held_out_line
from agentrl.cli.screen import live_lines
from agentrl.workers.stack import broker, embedded, presence
from agentrl.workers.stack.celery_app import QUEUES, make_app
from agentrl.workers.stack.process import database as process_database
from agentrl.workflow.config import build
from agentrl.workflow.errors import ConfigError, did_you_mean
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.hooks import Hook
from agentrl.workflow.models.devices import pick_device
from agentrl.workflow.models.packed_weights import ROUNDING, why_not_packed
from agentrl.workflow.runtime.shown_text import cell, clean, one_line
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.store import (
    blocked_runs,
    control_reads,
    planning,
    rollout_claims,
    run_names,
    steps,
    tool_calls,
    train_claims,
    train_commits,
)
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import open_database
from agentrl.workflow.store.planning import Submission
from agentrl.workflow.store.rollout_claims import GroupWork, Outcome
from agentrl.workflow.store.train_claims import IterationWork
from agentrl.workflow.store.train_commits import UpdateRecord
from agentrl.workflow.trajectory import CallRecord, Message, PolicyRef, Step, StepRecord, Task, ToolCall, ToolResult
from tests.conftest import forget_process, missing
from tests.support.forked_stack import ForkedStack
from tests.support.forked_stack import stack as stack
from tests.support.played_runs import claim, fail, start, submission
from tests.support.real_stack import SMALL
from tests.support.small_models import tiny_random

EVIL = "\x1b[2J\x1b]0;owned\x07 \x9b31m [bold]no[/x] [link=http://x]y[/link] \u202ereversed \x00 \r end"
CONFIG = {"env": "arithmetic", "rollout": {"tasks_per_iteration": 2, "group_size": 2}}


@pytest.fixture(params=["sqlite", "postgres"])
def data(store_home: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A database on each kind of server, and the settings that point to it."""
    if request.param == "postgres":
        server: Database = request.getfixturevalue("postgres")
        monkeypatch.setenv("AGENTRL_DATABASE_URL", server.url.render_as_string(hide_password=False))
    forget_process()
    database = open_database(settings().database)
    yield database
    database.close()
    if process_database.made:
        process_database().close()
    forget_process()


@pytest.fixture
def run(data: Database) -> str:
    """A run of two iterations: the first trained, the second planned. Its texts hold all that can hurt a terminal."""
    tasks = [Task(f"train/{i}", (Message("user", f"What is 2 + {i}? {EVIL}"),), str(2 + i)) for i in range(2)]
    submission = Submission(
        name="by-hand", kind="train", config=CONFIG, manifest={}, policy=PolicyRef("tiny", "hash"), tasks=tasks,
        dataset="arithmetic", seed=0, epochs=2, tasks_per_iteration=2, group_size=2, weights={"numeric_answer": 1.0},
        code_hash="code", output_dir="",
    )  # fmt: skip
    made = planning.submit(data, submission)
    iteration = planning.open_iterations(data, made.id)[0]
    for group in planning.start_iteration(data, iteration):
        work = rollout_claims.claim_group(data, group, "test:1", 30)
        assert work is not None
        for sample, episode in enumerate(work.episodes):
            _play(data, work, episode.id, reward=float(sample))
    train = train_claims.claim_iteration(data, iteration, "test:1", 30)
    assert isinstance(train, IterationWork)
    train = train_claims.load_work(data, train)
    credit = {e.id: (1.0 if e.reward else -1.0) for group in train.groups for e in group.episodes}
    train_commits.commit_update(
        data, train, UpdateRecord([{"loss": 0.25, "rows": 4, "tokens": 40}], credit, path="x", sha256="y"), 3
    )
    return made.name


def _play(data: Database, work: GroupWork, episode: int, reward: float) -> None:
    """Two steps: a tool call with its result, then an answer."""
    call = ToolCall("calculator", {"expression": f"2 + 2 {EVIL}"})
    asked = Message("assistant", "", thought=f"I think {EVIL}", tool_calls=(call,))
    opening = (Message("user", f"What is it? {EVIL}"),)
    first = Step(0, opening, (1, 2, 3), (7, 8, 9), (-0.5, -2.25, -0.25), "stop", asked, 0, 0.5)
    ((call_id,),) = steps.commit_sampled(
        data, work.fence, [StepRecord(episode, first, work.policy_id, "text", (CallRecord(call, "none", None),))]
    )
    result = ToolResult(f"4 {EVIL}", seconds=0.003)
    tool_calls.record_result(data, call_id, result, datetime.now(UTC), "tools:1")
    done = Step(0, opening, (1, 2, 3), (7, 8, 9), (-0.5, -2.25, -0.25), "stop", asked, 0, 0.5, (result,))
    steps.commit_observed(data, work.fence, [(episode, done)])
    said = Message("assistant", f"The answer is 4. {EVIL}")
    second = Step(1, (Message("tool", result.content, name="calculator"),), (4,), (5, 6), (-1.0, -1.0), "stop", said, 0, 0.25)
    steps.commit_sampled(data, work.fence, [StepRecord(episode, second, work.policy_id, "text", ())])
    outcome = Outcome(episode, "done", "answered", reward, {"numeric_answer": reward}, f"4 {EVIL}")
    rollout_claims.finish_episodes(data, work.fence, [outcome], work.reward_set, work.weights)


@pytest.fixture
def tcp_redis(tmp_path: Path) -> Iterator[str]:
    """URL of a Redis on a port, as somebody else would run it."""
    binary = broker.find_server(settings())
    if binary is None:
        missing("a Redis server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"redis://127.0.0.1:{port}/0"
    server = subprocess.Popen([binary, "--port", str(port), "--dir", str(tmp_path), "--save", ""], stdout=subprocess.DEVNULL)
    while not broker.is_answering(Settings(broker_url=url)):
        assert server.poll() is None
        time.sleep(0.02)
    yield url
    server.terminate()
    server.wait(10)


def agentrl(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Stdout of one command, run in this process; stderr where it must fail. No control character is ever printed."""
    capsys.readouterr()
    got = main(arguments)
    output = capsys.readouterr()
    assert got == code, output.out + output.err
    for text in (output.out, output.err):
        assert not [letter for letter in text if letter not in "\n\t" and (ord(letter) < 32 or 127 <= ord(letter) < 160)]
        assert "Traceback" not in text
    return output.err if code else output.out


def process(arguments: Sequence[str], home: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """One command in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "AGENTRL_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# the start


LOADED = "import sys; from agentrl.cli.main import main; main(sys.argv[1:]); print('|', *sys.modules)"


def test_help_loads_no_heavy_module(tmp_path: Path) -> None:
    done = process(["-c", LOADED, "--help"], tmp_path / "home")
    loaded = set(done.stdout.rpartition("|")[2].split())
    assert "typer" in loaded
    assert not loaded & {"torch", "transformers", "peft", "celery", "sqlalchemy", "psycopg", "redis", "numpy"}


@pytest.mark.slow
def test_dry_run_loads_no_torch_and_writes_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    model = _small_model(tmp_path)
    done = process(["-c", LOADED, "submit", "--dataset", "arithmetic", "--model", str(model), "--dry-run"], home)
    assert not {"torch", "transformers"} & set(done.stdout.rpartition("|")[2].split())
    assert "episodes" in done.stdout, done.stderr
    assert not home.exists()


def _small_model(tmp_path: Path) -> Path:
    return tiny_random(tmp_path / "small-model")


def test_help_explains_each_option_on_one_page(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        "submit", "watch", "runs", "episodes", "replay", "events", "resume", "pause", "cancel", "sql", "sft", "dpo", "eval",
        "compare", "chat", "up", "down", "worker", "doctor", "db", "db upgrade", "db current", "config", "config show", "tools",
        "tools serve", "whatif",
    ):  # fmt: skip
        text = agentrl(capsys, *command.split(), "--help")
        assert f"agentrl {command}" in text
        assert len(text.splitlines()) < 100


# submit


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_dry_run_prints_plan(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dataset", "arithmetic", "--max-tasks", "10", "--total-epochs", "2", "--samples-per-prompt", "4"]
    flags += [
        "--model-path",
        str(_small_model(tmp_path)),
        "--tasks-per-iteration",
        "4",
        "-s",
        "update.weight_decay=0.5",
    ]
    plan = json.loads(agentrl(capsys, "submit", *flags, "--dry-run", "--json"))
    assert (plan["tasks"], plan["iterations"], plan["episodes"], plan["env"]) == (10, 6, 80, "arithmetic")
    assert plan["config"]["update"]["weight_decay"] == 0.5
    assert "critic" not in plan
    more = ["--algorithm", "ppo", "-s", "update.epochs=2", "-s", "critic.warmup=3", "-s", "rollout.dynamic_sampling=3"]
    more += ["--iterations", "5"]
    plan = json.loads(agentrl(capsys, "submit", *flags[:4], *flags[6:], *more, "--dry-run", "--json"))
    assert (plan["epochs"], plan["iterations"]) == (2, 5)
    assert (plan["config"]["epochs"], plan["config"]["iterations"]) == (None, 5)
    assert (plan["algorithm"], plan["convention"], plan["passes"]) == ("ppo", "verl", 2)
    assert plan["critic"] == "learning rate 0.001; only the critic trains in the first 3 iterations"
    assert (plan["episodes"], plan["dynamic_sampling"]) == ((10 + 8) * 4, "up to 216 episodes (3 x)")
    assert not home.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_submit_remarks_on_warmup_as_long_as_run(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dataset", "arithmetic", "--max-tasks", "4", "--total-epochs", "1", "--tasks-per-iteration", "2"]
    flags += ["--algorithm", "ppo", "--model-path", str(_small_model(tmp_path)), "--dry-run"]
    never = {"critic": "the policy never trains", "update": "the learning rate never"}
    for length, remarked in ((1, False), (2, True)):
        assert main(["submit", *flags, *(word for section in never for word in ("-s", f"{section}.warmup={length}"))]) == 0
        said = capsys.readouterr().err
        for section, what in never.items():
            remark = f"{section}.warmup={length} is not shorter than the run (iterations: 2): {what}"
            assert (remark in said) == remarked
        assert ("warmup" in said) == remarked


BAD = [
    (["submit", "--dataset", "arithmetik", "--dry-run"], 2, "arithmetic"),
    (["submit", "--dataset", "nowhere.jsonl", "--dry-run"], 2, "nowhere.jsonl"),
    (["submit", "--dataset", "arithmetic", "--name", "../up", "--dry-run"], 2, "name"),
    (["submit", "--dataset", "arithmetic", "--name", "a\x1b[2Jb", "--dry-run"], 2, "name"),
    (["submit", "--dataset", "arithmetic", "-s", "rollout.groupsize=2", "--dry-run"], 2, "group_size"),
    (["submit", "--dataset", "arithmetic", "-s", "nonsense", "--dry-run"], 2, "key=value"),
    (["submit", "--config", "nowhere.yaml", "--dry-run"], 2, "nowhere.yaml"),
    (["submit", "--dataset", "arithmetic", "--model", "/nowhere/model", "--dry-run"], 8, "or tiny"),
    (["submit", "--dataset", "arithmetic", "--model", "tiny"], 8, "agentrl sft"),
    (["submit", "--dataset", "jsonl"], 2, "--dataset FILE.jsonl"),
    (["submit", "--dataset", "arithmetic", "--algorithm", "os:path", "--dry-run"], 2, "no Algorithm"),
    (["submit", "--dataset", "arithmetic", "--env", "os:path", "--dry-run"], 2, "no Env"),
    (["submit", "--dataset", "arithmetic", "-s", "hooks=[x]", "--dry-run"], 2, "package.module:Class"),
    (["submit", "--dataset", "arithmetic", "--epochs", "0", "--dry-run"], 2, "epochs"),
    (["submit", "--dataset", "arithmetic", "--iterations", "0", "--dry-run"], 2, "iterations"),
    (["submit", "--dataset", "arithmetic", "--iterations", "9", "--epochs", "1", "--dry-run"], 2, "pass one of them"),
    (["submit", "--from-episodes", "first", "--iterations", "9"], 5, "agentrl submit"),
    (["resume", "first", "--epochs", "0"], 2, "--epochs"),
    (["resume", "first", "--epochs", "1", "--iterations", "2"], 2, "Leave one out"),
    (["submit", "--no-such-option"], 2, "--no-such-option"),
    (["submit", "--epochs", "three"], 2, "--epochs"),
    (["nonsense"], 2, "nonsense"),
    (["sft", "--dataset", "arithmetik"], 2, "arithmetic"),
    (["sft", "--dataset", "mine.jsonl"], 2, "No such file"),
    (["sft", "--dataset", "arithmetic", "--epochs", "0"], 2, "--epochs"),
    (["sft", "--dataset", "arithmetic", "--save-every", "0"], 2, "--save-every"),
    (["sft", "--dataset", "arithmetic", "--optimizer", "sgd"], 2, "adamw_8bit"),
    (["sft", "--dataset", "arithmetic", "--devices", "0"], 2, "--devices must be a number from 1 to 64, or auto"),
    (["sft", "--dataset", "arithmetic", "--devices", "64"], 2, "--devices 64 needs 64"),
    (["dpo", "--from-episodes", "first", "--devices", "some"], 2, "--devices must be a number from 1 to 64, or auto"),
    (["sft", "--dataset", "arithmetic", "--lora-targets", "q_proj"], 2, "a new model trains all weights"),
    (["sft", "--dataset", "arithmetic", "--name", "../x"], 2, "--name"),
    (["eval", "--policy", "tiny", "--dataset", "arithmetic"], 8, "agentrl sft"),
    (["eval", "--policy", "nobody@3"], 5, "agentrl runs"),
    (["eval", "--policy", "nobody", "--dataset", "arithmetic"], 5, "agentrl runs"),
    (["chat", "--policy", "nobody"], 5, "agentrl runs"),
    (["eval", "--policy", "tiny", "--greedy", "--top-k", "3"], 2, "--greedy takes the likeliest token, so --top-k"),
    (["eval", "--policy", "tiny", "--greedy", "--group-size", "2"], 2, "Leave --group-size out."),
    (["eval", "--policy", "tiny", "--max-steps", "0"], 2, "--max-steps"),
    (["eval", "--policy", "tiny", "--max-new-tokens", "1000000000"], 2, "rollout.max_new_tokens"),
    (["sft", "--from-episodes", "first", "--min-reward", "nan"], 2, "finite number"),
    (["eval", "--policy", "/nowhere/model", "--dataset", "nowhere.jsonl"], 8, "No run or model is called '/nowhere/model'"),
    (["chat", "--policy", "tiny", "--temperature", "nan"], 2, "finite number"),
    (["chat", "--model-path", "/nowhere/model"], 8, "There is no folder '/nowhere/model'"),
    (["chat", "--model", "tiny", "--max_new_tokens", "0"], 2, "--max-new-tokens"),
    (["submit", "--dataset", "arithmetic", "--model", "", "--dry-run"], 2, "model.path"),
    (["submit", "--dataset", "arithmetic", "-s", "rollout.top_p=true", "--dry-run"], 2, "true or false"),
    (["chat", "--policy", "nobody@x"], 2, "RUN@3"),
    (["config", "show", "-s", "epoch=3"], 2, "epochs"),
    (["config", "demo"], 2, "agentrl config show demo"),
    (["config", "shwo"], 2, "Did you mean 'show'?"),
    (["config", "show", "-s", "algorithm.name=nothing"], 2, "algorithm"),
    (["config", "show", "-s", "critic.clip=0.5"], 2, "it has no critic"),
    (["config", "show", "-s", "algorithm.dual_clip=1"], 2, "algorithm.dual_clip"),
    (["worker", "cook"], 2, "rollout"),
    (["worker", "rollout,tools"], 2, "process"),
    (["sql", "SELECT 1"], 5, "agentrl submit"),
]


@pytest.mark.parametrize(("words", "code", "hint"), BAD, ids=[" ".join(words).replace("\x1b", "^") for words, _, _ in BAD])
def test_bad_input_is_sentence_next_step_and_code(
    home: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, hint: str
) -> None:
    complaint = agentrl(capsys, *words, code=code)
    assert hint in complaint
    assert len(complaint.splitlines()) <= 5
    assert not home.exists()


def test_eval_names_prompt_only_if_it_is_used() -> None:
    named = {"env": "math", "rewards": {"numeric_answer": 1.0}}
    assert re.match(r"env math \(prompt \w{8}\), rewards numeric_answer x 1", _describe_scoring(Experiment(build(named))))
    with_agent = build({**named, "agent.name": "external"})
    assert _describe_scoring(Experiment(with_agent)).startswith("env math, rewards numeric_answer x 1")


@pytest.mark.slow
def test_submit_without_tiny_model_of_file_suggests_sft(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps({"question": f"1 + {n}?", "answer": str(n + 1)}) for n in range(4)))
    words = ["submit", "--dataset", str(file), "--model", "tiny", "--dry-run"]
    told = agentrl(capsys, *words, code=8)
    assert f"agentrl sft --dataset {file} --model tiny. Or train another's: agentrl sft --dataset arithmetic" in " ".join(
        told.split()
    )
    agentrl(capsys, "sft", "--dataset", str(file), "--model", "tiny", "--steps", "1")
    assert json.loads(agentrl(capsys, *words, "--json"))["model"].endswith("/tiny-mine")


def test_sft_counts_too_long_demonstrations_and_refuses_if_all(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonl"
    short, long = '{"question": "1 + 1?", "answer": "2"}\n', json.dumps({"question": "1 + 1?", "answer": "2 " * 5000}) + "\n"
    words = ["sft", "--dataset", str(file), "--steps", "1"]
    file.write_text(short + 2 * long)
    told = json.loads(agentrl(capsys, *words, "--json"))
    assert (told["examples"], told["left_out"]) == (1, {"longer than the model reads": 2})
    file.write_text(2 * long)
    assert "None of 2 tasks has a demonstration that fits" in agentrl(capsys, *words, "--force", code=2)


def test_submit_refuses_group_of_one_for_relative_algorithm(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--dataset", "arithmetic", "--group-size", "1", "--dry-run"]
    assert "--group-size" in agentrl(capsys, *words, code=2)


def test_submit_without_broker_or_migrations_exits_with_4(
    home: Path, empty_postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "--dataset", "arithmetic", "--model", str(_small_model(tmp_path))]
    monkeypatch.setenv("AGENTRL_BROKER_URL", "redis://127.0.0.1:1/0")
    forget_process()
    assert "AGENTRL_BROKER_URL" in agentrl(capsys, *words, code=4)
    assert [row["status"] for row in json.loads(agentrl(capsys, "runs", "--json"))] == ["failed"]
    monkeypatch.setenv("AGENTRL_DATABASE_URL", empty_postgres)
    forget_process()
    assert "agentrl db upgrade" in agentrl(capsys, *words, code=4)
    agentrl(capsys, "db", "current", code=4)
    agentrl(capsys, "db", "upgrade")
    assert json.loads(agentrl(capsys, "db", "current", "--json"))["current"]
    forget_process()


def test_setting_that_does_not_fit_is_named(tmp_path: Path) -> None:
    done = process(["-m", "agentrl.cli", "runs"], tmp_path / "home", AGENTRL_THREADS="many")
    assert done.returncode == 2
    assert "AGENTRL_THREADS" in done.stderr


@pytest.mark.parametrize("words", ["watch 999999999999999999999999999999", "watch ²", "replay 99999999999999999999"])
def test_number_out_of_range_of_database_is_not_found(run: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "agentrl" in agentrl(capsys, *words.split(), code=5)


def test_debug_option_shows_traceback_in_any_position(tmp_path: Path) -> None:
    done = process(["-m", "agentrl.cli", "watch", "nobody", "--debug"], tmp_path / "home")
    assert done.returncode == 5
    assert "Traceback" in done.stderr


# looking


def test_lists_and_watch_show_the_run(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run in agentrl(capsys, "runs")
    (row,) = json.loads(agentrl(capsys, "runs", "--json"))
    assert (row["run"], row["iterations_done"], row["iterations"]) == (run, 1, 2)
    assert datetime.fromisoformat(row["created_at"]).tzinfo is not None
    assert len(json.loads(agentrl(capsys, "episodes", run, "--json"))) == 8
    assert "submitted" in agentrl(capsys, "events", run)
    state = json.loads(agentrl(capsys, "watch", run, "--json"))
    assert state["iterations"][0]["mean_reward"] == 0.5
    assert state["progress"]["episodes"] == 4


def test_episodes_command_filters_and_pages(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    def ids(*filters: str) -> list[int]:
        return [row["id"] for row in json.loads(agentrl(capsys, "episodes", run, "--json", *filters))]

    assert len(ids("--status", "done")) == 4
    assert len(ids("--min-reward", "1", "--iteration", "1")) == 2
    assert len(ids("--max-reward", "0", "--task", "train/1", "--stop-reason", "answered")) == 1
    assert ids("--tool-errors", "1") == []
    everything = ids()
    assert ids("--limit", "3") + ids("--limit", "5", "--offset", "3") == everything
    assert "cancelled" in agentrl(capsys, "episodes", run, "--status", "canceled", code=2)
    agentrl(capsys, "episodes", "nobody", code=5)
    for option in ("--iteration", "--offset", "--tool-errors"):
        assert option in agentrl(capsys, "episodes", run, option, "9" * 23, code=2)


def test_replay_shows_every_part_without_terminal_escape(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    (episode, *_) = json.loads(agentrl(capsys, "episodes", run, "--json", "--min-reward", "1"))
    text = agentrl(capsys, "replay", str(episode["id"]))
    for part in (
        "task train/", "I think", "calculator", "expression: 2 + 2", "result (0.003 s", "The answer is 4.", "policy v0",
        "mean -1.000, lowest -2.250 at token 1 (id 8)", "numeric_answer: 1 x 1", "advantage 1", "done (answered)",
        "[bold]no[/x]",
    ):  # fmt: skip
        assert part in text
    assert "owned" not in text
    assert "The answer" not in agentrl(capsys, "replay", str(episode["id"]), "--step", "0").split("reference")[0]
    document = json.loads(agentrl(capsys, "replay", str(episode["id"]), "--json"))
    assert document["steps"][0]["sampled_ids"] == [7, 8, 9]
    assert document["steps"][0]["calls"][0]["arguments"]["expression"].startswith("2 + 2")
    agentrl(capsys, "replay", str(episode["id"]), "--step", "9", code=5)
    agentrl(capsys, "replay", "999", code=5)
    agentrl(capsys, "replay", "9" * 23, code=5)


def test_sql_command_prints_table_csv_or_json(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    asking = "SELECT iteration, status, final_answer FROM v_episodes ORDER BY id LIMIT 1"
    assert agentrl(capsys, "sql", asking).splitlines()[0].split() == ["iteration", "status", "final_answer"]
    assert agentrl(capsys, "sql", asking, "--csv").startswith("iteration,status,final_answer\n1,done,")
    assert json.loads(agentrl(capsys, "sql", asking, "--json"))[0]["status"] == "done"
    tokens = "SELECT rl_i4(sampled_ids) AS ids FROM step_tokens ORDER BY step_id LIMIT 1"
    assert json.loads(json.loads(agentrl(capsys, "sql", tokens, "--json"))[0]["ids"]) == [7, 8, 9]
    agentrl(capsys, "sql", "DELETE FROM runs", code=7)
    agentrl(capsys, "sql", "SELEC", code=2)
    agentrl(capsys, "sql", asking, "--csv", "--json", code=2)


def test_config_show_names_origin_of_each_value(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 5\nrollout:\n  group_size: 4\n")
    monkeypatch.setenv("AGENTRL_RUN_SEED", "9")
    shown = json.loads(agentrl(capsys, "config", "show", "--config", str(file), "-s", "epochs=7", "--origin", "--json"))
    origins = {row["key"]: (row["value"], row["origin"]) for row in shown}
    assert origins["epochs"] == (7, "flag")
    assert origins["seed"] == (9, "environment")
    assert origins["rollout.group_size"] == (4, str(file))
    assert origins["rollout.max_steps"][1] == "default"
    assert "rollout.group_size: 2" in agentrl(capsys, "config", "show", run)


def test_config_show_resolves_defaults_of_algorithm(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("config", "show", "-s", "algorithm.name=dapo", "-s", "algorithm.clip_low=0.1")
    values = json.loads(agentrl(capsys, *words, "--json"))
    assert (values["algorithm.clip_low"], values["algorithm.clip_high"]) == (0.1, 0.28)
    origins = {row["key"]: row["origin"] for row in json.loads(agentrl(capsys, *words, "--origin", "--json"))}
    assert (origins["algorithm.clip_low"], origins["algorithm.clip_high"]) == ("flag", "dapo")
    shown = agentrl(capsys, *words[:4])
    assert "# algorithm.clip_high: 0.28 (dapo)" in shown.splitlines()
    (tmp_path / "x.yaml").write_text(shown)
    again = json.loads(agentrl(capsys, "config", "show", "--config", str(tmp_path / "x.yaml"), "--json"))
    assert again["algorithm.clip_high"] == 0.28
    other = ("config", "show", "--config", str(tmp_path / "x.yaml"), "-s", "algorithm.name=reinforce", "--json")
    assert json.loads(agentrl(capsys, *other))["algorithm.clip_high"] is None


def test_output_pipe_closed_is_no_failure(run: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cli", "runs"],
        env={**os.environ, "AGENTRL_HOME": str(settings().root)},
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_during_start_is_no_traceback() -> None:
    """The interrupt comes while the commands are being imported."""
    code = (
        "import sys\nclass Interrupt:\n    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\nfrom agentrl.cli.main import main\nsys.exit(main(['runs']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_watch_summary_shows_most_frequent_error(data: Database, run: str) -> None:
    second = next(state for state in control_reads.snapshot(data, 30).runs[0].iterations)
    errors = iter(["reward 'x' raised KeyError", "once", "reward 'x' raised KeyError", "reward 'x' raised KeyError"])
    for group in second.groups:
        work = rollout_claims.claim_group(data, group.id, "test:1", 30)
        assert work is not None
        failed = [Outcome(e.id, "failed", error_class="RewardError", error=next(errors)) for e in work.episodes]
        rollout_claims.finish_episodes(data, work.fence, failed, work.reward_set, work.weights)
    planning.stop(data, run, "paused", "none of the 4 episodes can train: 4 failed")
    text = "\n".join(line for line, _ in summary(load_view(data, run)))
    assert "4 episodes failed, 3 of them with: reward 'x' raised KeyError" in text
    assert f"agentrl episodes {run} --status failed" in text
    assert f"agentrl resume {run} (skips the update" in text


@pytest.mark.parametrize("data", ["sqlite"], indirect=True)
def test_run_without_reward_gets_no_useless_hint(data: Database) -> None:
    for group in start(data, submission()):
        work = claim(data, group)
        for position in range(len(work.episodes)):
            fail(data, work, position)
    planning.stop(data, "first", "paused", "none of the 4 episodes can train: 4 failed")
    lines = [line.strip() for line, _ in summary(load_view(data, "first"))]
    assert lines[lines.index("Look closer:") :] == ["Look closer:", "agentrl episodes first", "agentrl replay EPISODE"]


@pytest.mark.parametrize("status", ["failed", "cancelled", "paused"])
@pytest.mark.parametrize("data", ["sqlite"], indirect=True)
def test_run_that_never_began_gets_no_useless_hint(data: Database, status: str) -> None:
    start(data, submission())
    planning.stop(data, "first", status, "The files make no model.")
    lines = [line.strip() for line, _ in summary(load_view(data, "first"))]
    hints = {"failed": ["After fixing that: agentrl resume first"], "paused": ["Resume it: agentrl resume first"]}
    assert lines[0].startswith(f"first: {status}")
    assert lines[1:] == ["The files make no model.", *hints.get(status, [])]


def _fails_after_its_answer(data: Database, error: str) -> str:
    """An episode of the second iteration that says something and fails then; its number."""
    group = control_reads.snapshot(data, 30).runs[0].iterations[0].groups[0]
    work = rollout_claims.claim_group(data, group.id, "test:1", 30)
    assert work is not None
    episode = work.episodes[0].id
    said = Step(0, (Message("user", "?"),), (1,), (2,), (-1.0,), "stop", Message("assistant", "The answer is 4."), 0, 0.5)
    steps.commit_sampled(data, work.fence, [StepRecord(episode, said, work.policy_id, "text", ())])
    outcome = Outcome(episode, "failed", error_class="RewardError", error=error)
    rollout_claims.finish_episodes(data, work.fence, [outcome], work.reward_set, work.weights)
    return str(episode)


@pytest.mark.parametrize("data", ["sqlite"], indirect=True)
def test_replay_of_failed_episode_keeps_its_answer(run: str, data: Database, capsys: pytest.CaptureFixture[str]) -> None:
    text = agentrl(capsys, "replay", _fails_after_its_answer(data, "reward 'x' raised KeyError"))
    assert "The answer is 4." in text
    assert "failed (RewardError)" in text
    assert "answer: " not in text
    assert "reference: " in text


@pytest.mark.parametrize("data", ["sqlite"], indirect=True)
def test_error_of_several_lines_is_printed_on_one(run: str, data: Database, capsys: pytest.CaptureFixture[str]) -> None:
    episode = _fails_after_its_answer(data, "reward 'x' raised ValueError: it began\nand\r\n went on")
    for command in ("replay", "why"):
        assert "reward 'x' raised ValueError: it began and went on" in agentrl(capsys, command, episode)


# steering


def test_pause_and_cancel_are_repeatable_and_say_what_is_kept(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = agentrl(capsys, "pause", run)
    assert "was running" in first
    assert "1 of 2 iterations, policy version 1, 4 episodes done; 0 of 4 episodes of the open iteration ended" in first
    assert "redone: nothing; 4 episodes of iteration 2 have not begun" in first
    assert "already" in agentrl(capsys, "pause", run)
    assert "was paused" in agentrl(capsys, "cancel", run)
    assert "redone: nothing" in agentrl(capsys, "cancel", run)
    agentrl(capsys, "resume", run, code=6)
    agentrl(capsys, "pause", run, code=6)
    agentrl(capsys, "cancel", "nobody", code=5)


def test_watch_ends_with_summary_and_exits_1_unless_done(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    agentrl(capsys, "cancel", run)
    capsys.readouterr()
    assert main(["watch", run]) == 1
    text = capsys.readouterr().out
    assert "iteration 1/2  epoch 1  reward 0.5  episodes 4/4" in text
    assert f"agentrl episodes {run}" in text


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("data", ["sqlite"], indirect=True)
def test_submit_on_named_broker_names_missing_workers(
    data: Database, tcp_redis: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTRL_BROKER_URL", tcp_redis)
    settings.cache_clear()
    for module in ("stack.celery_app", "stack.presence", "requests.requirements"):
        monkeypatch.setattr(f"agentrl.workers.{module}.app", make_app(settings()))
    monkeypatch.setattr("agentrl.cli.ensure_workers.START_SECONDS", 0.1)
    words = ["submit", "--dataset", "arithmetic", "--max-tasks", "2", "--model", str(_small_model(tmp_path))]
    for extra in ([], ["--wait"]):
        complaint = agentrl(capsys, *words, *extra, code=4)
        lines = [line.strip() for line in complaint.splitlines()]
        for role in ("rollout", "tools", "train", "control"):
            assert sum(line.endswith(f"Start one: agentrl worker {role}") for line in lines) == 1, "a line each"
        assert "--detach" in complaint
        assert "then: agentrl resume" in complaint
    left = json.loads(agentrl(capsys, "runs", "--json"))
    assert [run["status"] for run in left] == ["failed", "failed"]
    assert all("Start one: agentrl worker tools" in run["reason"] for run in left)
    assert main([*words, "--name", left[0]["run"], "--detach"]) == 0
    again = capsys.readouterr().err
    assert f"{left[0]['run']}: already existed and is failed, " in again
    assert f"agentrl resume {left[0]['run']}" in again
    resumed = process(["-m", "agentrl.cli", "resume", left[0]["run"]], settings().root, AGENTRL_BROKER_URL=tcp_redis)
    assert "was failed" in resumed.stdout, resumed.stderr
    (sent,) = [run for run in json.loads(agentrl(capsys, "runs", "--json")) if run["status"] == "running"]
    assert (sent["run"], sent["reason"]) == (left[0]["run"], "")


class Starting(Hook):
    """Writes down which run began."""

    def on_run_start(self, run: str, config: Mapping[str, object]) -> None:
        """Once."""
        Path(os.environ["STARTED"]).write_text(run)


@pytest.mark.parametrize("data", ["sqlite"], indirect=True)
def test_submit_without_broker_leaves_run_that_resume_explains(
    data: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTRL_BROKER_URL", "redis://user:secret@127.0.0.1:1/0?password=secret")
    settings.cache_clear()
    model, started = str(_small_model(tmp_path)), tmp_path / "started"
    monkeypatch.setenv("STARTED", str(started))
    words = ["submit", "--dataset", "arithmetic", "--max-tasks", "2", "--model", model, "--name", "lost"]
    agentrl(capsys, *words, "--eval-every", "1", "--hook", "tests.cli.test_cli:Starting", code=4)
    assert started.read_text() == "lost"
    agentrl(capsys, "eval", "--dataset", "arithmetic", "-n", "2", "--policy", model, code=4)
    rows = json.loads(agentrl(capsys, "sql", "SELECT run, kind, status, reason FROM v_runs ORDER BY id", "--json"))
    assert [(row["kind"], row["status"]) for row in rows] == [("train", "failed"), ("eval", "paused"), ("eval", "failed")]
    assert all("does not answer" in row["reason"] and "secret" not in row["reason"] for row in rows)
    assert "then: agentrl resume lost --iterations 3" in agentrl(capsys, "resume", "lost", "--iterations", "3", code=4)
    monkeypatch.setenv("AGENTRL_BROKER_URL", "redis://:pa#secret@127.0.0.1:6379/0")
    settings.cache_clear()
    again = agentrl(capsys, "resume", "lost", code=4)
    assert "then: agentrl resume lost" in again
    assert "secret" not in again
    assert "pa" not in again.partition("redis://")[2].partition(" ")[0]
    assert main(["watch", "lost"]) == 1
    assert "agentrl resume lost" in "".join(capsys.readouterr())
    with data.engine.begin() as tx:
        tx.execute(sql("UPDATE runs SET status = 'done' WHERE name = 'lost'"))
    hint = agentrl(capsys, *words, "--eval-every", "1", "--hook", "tests.cli.test_cli:Starting", code=4)
    assert "resume" not in hint


@pytest.mark.parametrize("data", ["sqlite"], indirect=True)
@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_submit_detached_without_workers_names_what_to_start(
    run: str, tcp_redis: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = _small_model(tmp_path)
    words = [
        "-m",
        "agentrl.cli",
        "submit",
        "--dataset",
        "arithmetic",
        "--max-tasks",
        "2",
        "--model",
        str(model),
        "--name",
        "alone",
    ]
    words.append("--detach")
    done = process(words, settings().root, AGENTRL_BROKER_URL=tcp_redis)
    assert (done.returncode, done.stdout) == (0, "alone\n"), done.stderr
    for part in ("worker rollout", "worker tools", "worker train", "worker control", "watch alone"):
        assert f"agentrl {part}" in done.stderr
    again = process(words, settings().root, AGENTRL_BROKER_URL=tcp_redis)
    assert again.stdout == "alone\n"
    assert "already existed" in again.stderr
    other = process([*words, "--seed", "5"], settings().root, AGENTRL_BROKER_URL=tcp_redis)
    assert other.returncode == 3
    resumed = process(["-m", "agentrl.cli", "resume", run], settings().root, AGENTRL_BROKER_URL=tcp_redis)
    assert "running already" in resumed.stdout
    assert "agentrl worker control" in resumed.stderr


def watch(run: str) -> "subprocess.Popen[str]":
    """`agentrl watch` of the run, in a process of its own."""
    command = [sys.executable, "-m", "agentrl.cli", "watch", run]
    here = {**os.environ, "AGENTRL_HOME": str(settings().root)}
    return subprocess.Popen(command, env=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("forked_programs")
def test_ctrl_c_leaves_run_and_says_how_to_stop_it(run: str) -> None:
    watching = watch(run)
    assert watching.stdout is not None
    assert watching.stdout.readline().startswith("iteration 1/2")
    watching.send_signal(signal.SIGINT)
    _, remarks = watching.communicate(timeout=60)
    assert watching.returncode == 130
    assert f"agentrl cancel {run}" in remarks
    assert "Traceback" not in remarks


@pytest.mark.usefixtures("forked_programs")
def test_watch_names_what_run_waits_for(run: str, data: Database) -> None:
    blocked_runs.wait_for(data, run_names.find_run(data, run)["id"], "The engine's server does not answer.")
    watching = watch(run)
    assert watching.stderr is not None
    assert watching.stderr.readline() == f"{run} waits: The engine's server does not answer.\n"
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=60)


@pytest.mark.parametrize("data", ["sqlite"], indirect=True)
def test_stack_with_supervisor_lacks_no_control_loop(data: Database) -> None:
    assert not is_somebody_working(data)
    folder = settings().stack_dir
    folder.mkdir(parents=True)
    with (folder / "supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "supervisor.json").write_text(json.dumps({"pid": os.getpid()}))
        assert is_somebody_working(data)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_model_is_submitted_evaluated_and_chatted_with(stack: ForkedStack, tmp_path: Path) -> None:
    model = str(tiny_random(tmp_path / "random"))
    words = ["submit", "--dataset", "arithmetic", "--model", model, "--max-tasks", "4", *SMALL, "--name", "short"]
    assert stack.agentrl(*words, "--wait") == "short\n"
    drawn = ["--top-k", "9", "--top-p", "0.9", "--min-p", "0.01", "--stop", "é", "--stop", "ü"]
    score = json.loads(stack.agentrl("eval", "--policy", "short@1", "-n", "3", "--group-size", "2", *drawn, "--json"))
    stored = json.loads(stack.agentrl("sql", "SELECT config FROM runs WHERE kind = 'eval'", "--json"))
    rollout = json.loads(stored[0]["config"])["rollout"]
    assert [rollout[key] for key in ("top_k", "top_p", "min_p", "stop")] == [9, 0.9, 0.01, ["é", "ü"]]
    limits = ["--greedy", "--max-new-tokens", "6", "--max-steps", "1", "--env", "qa"]
    stack.agentrl("eval", "--policy", "short@1", "-n", "2", *limits, "--json")
    newest = "SELECT config FROM runs WHERE kind = 'eval' ORDER BY id DESC LIMIT 1"
    made = json.loads(json.loads(stack.agentrl("sql", newest, "--json"))[0]["config"])
    assert [made["rollout"][key] for key in ("top_k", "max_new_tokens", "max_steps")] == [1, 6, 1]
    assert made["env"] == "qa"
    stack.agentrl("eval", "--policy", "short@1", "--top-p", "0", code=2)
    assert (score["episodes"], score["errors"], score["split"]) == (6, 0, "test")
    assert 0 <= score["low"] <= score["mean_reward"] <= score["high"] <= 1
    assert score["interval_by"] == "Wilson"
    stack.agentrl("eval", "--policy", model, "--dataset", "arithmetic", "-n", "2", "--fail-under", "1.1", code=1)
    stack.agentrl("eval", "--policy", "short@99", code=5)
    assert "workers" in stack.agentrl("doctor")
    talk = subprocess.run(
        [
            sys.executable,
            "-m",
            "agentrl.cli",
            "chat",
            "--policy",
            "short",
            "--max-new-tokens",
            "8",
            "--top-k",
            "9",
            "--stop",
            "é",
        ],
        env=stack.environment,
        input="What is 2 plus 2?\nAnd 3 plus 3?\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert talk.returncode == 0, talk.stderr
    assert talk.stdout.strip()
    assert not [letter for letter in talk.stdout if ord(letter) < 32 and letter not in "\n\t"]


@pytest.mark.usefixtures("forked_programs")
def test_doctor_checks_everything_and_says_what_to_do(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = {check["name"]: check for check in json.loads(agentrl(capsys, "doctor", "--json"))}
    assert {"python", "packages", "torch", "device", "cpu", "database", "redis", "sandbox", "disk", "gsm8k", "models"} <= set(
        checks
    )
    assert checks["torch"]["state"] == checks["device"]["state"] == "ok"
    assert f"{pick_device('auto')} runs a matrix product" in checks["device"]["found"]
    roads = {dtype: f"plain ({why})" if (why := why_not_packed(dtype)) else "packed" for dtype in ROUNDING}
    assert all(f"{dtype} {road}".removeprefix("torch.") in checks["cpu"]["found"] for dtype, road in roads.items())
    assert not home.exists()


def test_doctor_tries_gsm8k_before_reporting_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = '{"question": "1 + 1?", "answer": "<<1+1=2>>2\\n#### 2"}\n'
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(rows)
    monkeypatch.setenv("AGENTRL_GSM8K_DIR", str(folder))
    settings.cache_clear()
    assert _gsm8k(settings()) == Check("gsm8k", "ok", f"{folder}: 1 task in train, 1 task in test")
    (folder / "test.jsonl").write_text("no JSON")
    assert (_gsm8k(settings()).state, _gsm8k(settings()).todo) == ("warn", "Correct AGENTRL_GSM8K_DIR.")
    monkeypatch.delenv("AGENTRL_GSM8K_DIR")
    settings.cache_clear()
    monkeypatch.setattr("agentrl.workflow.runtime.hub.has_fetched_dataset", lambda name: False)
    for answer, state in (("known", "ok"), ("away", "warn")):
        monkeypatch.setattr("agentrl.workflow.runtime.hub.ask_hub", lambda kind, name, answer=answer: answer)
        assert _gsm8k(settings()).state == state
    settings.cache_clear()


@pytest.mark.usefixtures("forked_programs")
def test_doctor_fails_missing_device_and_shows_threads(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTRL_DEVICE", "cuda:99")
    monkeypatch.setenv("AGENTRL_THREADS", "3")
    settings.cache_clear()
    assert main(["doctor", "--json"]) == 4
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["device"]["state"] == "fail"
    assert "cuda:99 (AGENTRL_DEVICE=cuda:99) cannot be used" in checks["device"]["found"]
    assert "3 CPU threads" in checks["torch"]["found"]


@pytest.mark.usefixtures("forked_programs")
def test_doctor_exits_with_4_if_service_is_away(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENTRL_BROKER_URL", "redis://127.0.0.1:1/0")
    settings.cache_clear()
    assert main(["doctor", "--model", "/nowhere"]) == 4
    lines = capsys.readouterr().out.splitlines()
    (broker,) = [line for line in lines if line.startswith("fail  broker")]
    assert broker.endswith("Check AGENTRL_BROKER_URL and AGENTRL_BROKER_PASSWORD.")
    assert any(line.startswith("fail  template") for line in lines)
    assert main(["up"]) == 4
    assert "Check AGENTRL_BROKER_URL and AGENTRL_BROKER_PASSWORD." in capsys.readouterr().err


@pytest.mark.usefixtures("forked_programs")
def test_doctor_leaves_starting_workers_to_stack(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "find_supervisor", lambda where: 1)
    monkeypatch.setattr(broker, "is_answering", lambda where: True)
    monkeypatch.setattr(presence, "count_workers_by_queue", lambda: dict.fromkeys(QUEUES, 0))
    main(["doctor"])
    said = [line for line in capsys.readouterr().out.splitlines() if "No worker serves" in line]
    assert len(said) == len(QUEUES)
    assert all("The stack starts it" in line and "agentrl worker" not in line for line in said)


# texts


@given(st.text())
def test_clean_removes_control_characters(text: str) -> None:
    cleaned = clean(text)
    assert not [c for c in cleaned if c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000)]
    assert clean(cleaned) == cleaned
    assert len(one_line(text)) <= 60


@given(st.text(st.characters(categories=("L", "N", "P", "S"), exclude_characters="\u202e")))
def test_clean_keeps_plain_text(text: str) -> None:
    assert clean(text) == text


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("It failed: no such file..", "It failed: no such file."),
        ("Is it accepting connections?.", "Is it accepting connections?"),
        ("It failed: out of memory!.", "It failed: out of memory!"),
        ("It failed: a, b, ....", "It failed: a, b, ..."),
        ("The views are a, b, ...", "The views are a, b, ..."),
        ("It failed.", "It failed."),
        (".", "."),
        ("", ""),
    ],
)
def test_error_sentence_ends_with_one_full_stop(said: str, told: str) -> None:
    error = ConfigError(said, "Do it.")
    assert (error.message, error.hint, str(error)) == (told, "Do it.", f"{told} Do it.".strip())


@pytest.mark.parametrize(
    ("word", "meant"), [("gpro", "grpo"), ("gsop", "gspo"), ("dpao", "dapo"), ("grop", "grpo"), ("pop", "ppo"), ("grp", "grpo")]
)
def test_did_you_mean_finds_transposed_letters(word: str, meant: str) -> None:
    assert did_you_mean(word, ["dapo", "grpo", "gspo", "ppo", "cispo"]) == f"Did you mean {meant!r}?"


def test_clean_keeps_joined_letters_and_pictures() -> None:
    for text in ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\U0001f469\u200d\U0001f4bb"):
        assert clean(text) == text


@pytest.mark.parametrize("mark", "\u061c\u200b\u2028\u2029\u2060\ufeff\u00ad\U000e0001\U000e0041\U000e007f")
def test_clean_replaces_invisible_characters(mark: str) -> None:
    assert clean(f"a{mark}b") == "a\ufffdb"


@pytest.mark.parametrize("opened", ["\x1b]", "\x1bP", "\x1bX", "\x1b^", "\x1b_"])
def test_clean_hides_nothing_after_open_sequence(opened: str) -> None:
    assert clean(f"a{opened}b\nc") == "ab\nc"
    assert clean(f"a{opened}b\nc\x07d") == "ab\nc\ufffdd"
    assert clean(f"a{opened}0;title\x07b{opened}8;;http://x\x1b\\c") == "abc"
    assert clean(f"{opened}{'long' * 1000}\x07") == "long" * 1000 + "\ufffd"


def test_show_json_takes_numbers_and_lists_of_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    numbers = [Decimal("NaN"), Decimal("sNaN"), Decimal("-Infinity"), Decimal("1e100000"), Decimal("1.5e3"), Decimal("0.5")]
    show_json([*numbers, 10**5000, deep])
    found = json.loads(capsys.readouterr().out)
    assert found[:6] == [None, None, None, "1E+100000", 1500, 0.5]
    assert int(found[6], 16) == 10**5000
    assert [len(cell(value)) <= 60 for value in (10**5000, {"a": 10**5000}, deep, *numbers)] == [True] * 9


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=300), st.integers(2, 60))
def test_plot_has_one_mark_per_column_and_extremes(values: list[float], width: int) -> None:
    lines = plot(values, width)
    assert sum(line.count("*") for line in lines) == len(buckets(values, width)) == min(len(values), width)
    assert len(sparkline(values, width)) == min(len(values), width)


def test_plot_of_flat_curve_is_one_line() -> None:
    assert plot([0.5] * 3) == ["   0.500 |***", "         +---"]


def test_plot_shortens_huge_rewards() -> None:
    rewards, worst = [0.5, -3.4e38], -3.4028234663852886e38
    row = {"run": "r", "kind": "train", "status": "done", "reason": "", "seconds": None, "iterations": 2, "iterations_done": 2,
           "epochs": 1, "episodes_done": 2, "best_version": 1, "best_reward": worst}  # fmt: skip
    empty: defaultdict[str, Any] = defaultdict(lambda: None, tokens=0, epoch=1)
    scored: defaultdict[str, Any] = defaultdict(lambda: None, status="done", policy_version=1, low=worst, high=0.5)
    iterations = [empty | {"iteration": number, "mean_reward": reward} for number, reward in enumerate(rewards, 1)]
    view = RunView(row, iterations, evals=[scored | {"mean_reward": reward} for reward in (0.5, worst)])
    assert held_out_line(view) == "held out 0.500 -> -3.403e+38, best -3.403e+38: r@1"
    told = [line for line, _ in summary(view)]
    assert "  reward 0.500 -> -3.4e+38 (the first and the last of 2 iterations)" in told
    assert any(line.endswith("0.500 -> -3.4e+38") for line in live_lines(view))
    upper, *_, lower, axis = plot(rewards)
    assert (upper, lower, axis) == ("   0.500 |*", "-3.4e+38 | *", "         +--")
    assert {line.index("|") for line in plot([0.5, worst])[:-1]} == {len("-3.403e+38 ")}
