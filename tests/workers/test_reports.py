"""Runs written to trackers: by real processes, from real rows, with each step once whatever ends the process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.workers.requests.submit import remark_on_trackers
from agentrl.workers.stack.report_processes import FAILED, ReportProcess, ReportProcesses
from agentrl.workflow.config import build
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.plugins import find, names
from agentrl.workflow.settings import settings
from agentrl.workflow.store import leases, planning, run_reports, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.trackers import Tracker, eval_metrics, iteration_metrics, mask_text, masked_config
from tests.conftest import missing
from tests.support.line_tracker import read_lines
from tests.support.played_runs import claim_training, play, start, submission, update_of, value, values

pytestmark = pytest.mark.usefixtures("forked_programs_of_module")
LINES = "tests.support.line_tracker:line_tracker"
ITERATIONS = 3


def train(db: Database, groups: list[int]) -> None:
    """Play the open iteration of the run, and commit its update."""
    for group in groups:
        ended = play(db, group)
    assert ended.iteration is not None
    work = claim_training(db, ended.iteration)
    train_commits.commit_update(db, work, update_of(work, path=f"out/v{work.number + 1}"), 3)


def play_run(db: Database, iterations: int = ITERATIONS, to: str = LINES, samples: int = 0) -> None:
    """A run of three iterations that is reported, and of which so many are done."""
    wanted = submission(tasks=2 * ITERATIONS)
    wanted = replace(wanted, config={**wanted.config, "report": {"to": [to], "samples": samples}})
    groups = start(db, wanted)
    for number in range(iterations):
        train(db, groups)
        if number + 1 < ITERATIONS:
            opened = planning.open_iterations(db, 1)[0]
            groups = planning.start_iteration(db, opened)


def write(db: Database) -> int:
    """Write the run's report in a process, and return its exit code."""
    (report,) = run_reports.list_reports(db, "first")
    process = ReportProcess(report)
    process.process.wait()
    process.reap(db)
    return process.process.returncode


def lines() -> list[dict[str, Any]]:
    return read_lines(settings().trackers_dir / "first.jsonl")


def steps() -> list[tuple[str, int]]:
    return [(line["series"], line["number"]) for line in lines() if "series" in line]


def events(db: Database) -> list[str]:
    return values(db, "SELECT detail FROM events WHERE kind = 'report_failed' ORDER BY id")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of the processes, with a short time limit for a step."""
    monkeypatch.setenv("AGENTRL_REPORT_SECONDS", "2")
    settings.cache_clear()
    return monkeypatch


def test_report_has_each_step_with_its_metrics(own_database: Database) -> None:
    play_run(own_database)
    assert write(own_database) == 0
    first, *middle, last = lines()
    assert first["run"] == "first"
    assert first["config"]["rollout.group_size"] == 2
    assert first["page"] == "http://127.0.0.1:7788/#/run/1"
    assert last == {"status": "done"}
    assert steps() == [("iteration", number + 1) for number in range(ITERATIONS)]
    assert middle[0]["metrics"]["train/reward"] == pytest.approx(0.5)
    assert middle[0]["metrics"]["train/kl"] == pytest.approx(0.01)
    assert middle[0]["metrics"]["rollout/episodes"] == 4
    assert [line["text"] for line in middle] == [""] * ITERATIONS
    (report,) = run_reports.list_reports(own_database, "first")
    assert (report.iteration, report.status, report.url) == (ITERATIONS, "done", f"file://{report.handle}")
    assert run_reports.list_due_reports(own_database) == []


def test_report_of_killed_processes_has_each_step_once(own_database: Database, faults: pytest.MonkeyPatch) -> None:
    play_run(own_database)
    for number in (1, 2, 3):
        faults.setenv("LINE_TRACKER", f"kill:{number}")
        assert write(own_database) == -signal.SIGKILL
    faults.delenv("LINE_TRACKER")
    assert write(own_database) == 0
    assert steps() == [("iteration", number + 1) for number in range(ITERATIONS)]
    assert [line["run"] for line in lines() if "run" in line] == ["first"]


def test_report_that_hangs_is_ended_with_one_event(own_database: Database, faults: pytest.MonkeyPatch) -> None:
    play_run(own_database)
    faults.setenv("LINE_TRACKER", "hang:2")
    assert [write(own_database) for _ in range(2)] == [-signal.SIGALRM] * 2
    (sentence,) = events(own_database)
    assert sentence.startswith(f"{LINES} did not answer within 2 s")
    assert value(own_database, "SELECT status FROM runs") == "done"
    faults.delenv("LINE_TRACKER")
    assert write(own_database) == 0
    assert steps() == [("iteration", number + 1) for number in range(ITERATIONS)]


@pytest.mark.parametrize(("fault", "said"), [("open", "502 Bad Gateway"), ("log", "the key is wrong")])
def test_report_that_fails_is_one_event(own_database: Database, faults: pytest.MonkeyPatch, fault: str, said: str) -> None:
    play_run(own_database)
    faults.setenv("LINE_API_KEY", "wrongsecret")
    faults.setenv("LINE_TRACKER", fault)
    assert [write(own_database) for _ in range(2)] == [FAILED] * 2
    (sentence,) = events(own_database)
    assert said in sentence
    assert "\n" not in sentence
    assert "wrongsecret" not in sentence
    assert "me:pw@" not in sentence


def test_report_without_its_package_names_the_command(own_database: Database) -> None:
    lacking = "tests.support.line_tracker:lacking_tracker"
    play_run(own_database, to=lacking)
    assert write(own_database) == FAILED
    (sentence,) = events(own_database)
    assert sentence.startswith(f"{lacking} is not installed here: pip install ")


def test_report_is_written_by_first_process_only(own_database: Database) -> None:
    play_run(own_database)
    assert leases.take_service_lease(own_database, run_reports.lease_name(1, LINES), "another", 60.0)
    assert write(own_database) == FAILED
    assert not (settings().trackers_dir / "first.jsonl").exists()
    assert events(own_database) == []
    done = agentrl("report", "first", "--to", LINES)
    assert f"Another process is writing {LINES}." in done.stderr


def test_report_processes_end_with_run(own_database: Database, faults: pytest.MonkeyPatch) -> None:
    faults.setenv("AGENTRL_TICK_SECONDS", "0.05")
    play_run(own_database, iterations=1)
    processes = ReportProcesses()
    processes.tend(own_database)
    wait_for(lambda: steps() == [("iteration", 1)])
    for _ in range(2):
        train(own_database, planning.start_iteration(own_database, planning.open_iterations(own_database, 1)[0]))
    wait_for(lambda: {"status": "done"} in lines())
    assert steps() == [("iteration", number + 1) for number in range(ITERATIONS)]
    wait_for(lambda: processes.tend(own_database) or not processes.running)
    assert value(own_database, "SELECT count(*) FROM service_leases") == 0


def test_report_processes_write_the_rest_when_stopped(own_database: Database) -> None:
    play_run(own_database, iterations=2)
    processes = ReportProcesses()
    processes.tend(own_database)
    wait_for(lambda: (settings().trackers_dir / "first.jsonl").exists())
    processes.stop(lambda: own_database)
    assert value(own_database, "SELECT count(*) FROM service_leases") == 0
    assert steps() == [("iteration", 1), ("iteration", 2)]
    assert [report.status for report in run_reports.list_due_reports(own_database)] == [""]


def wait_for(condition: Any) -> None:
    """Wait until the condition holds, 30 s at most."""
    deadline = time.monotonic() + 30
    while not _holds(condition):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _holds(condition: Any) -> bool:
    try:
        return bool(condition())
    except FileNotFoundError:
        return False


def test_report_shows_as_many_episodes_as_were_asked_for(own_database: Database) -> None:
    play_run(own_database, samples=2)
    assert write(own_database) == 0
    texts = [line["text"] for line in lines() if "series" in line]
    assert [text.count("\n\nEpisode ") + text.startswith("Episode ") for text in texts] == [2] * ITERATIONS
    assert all("turn 0" in text and "42" in text for text in texts)


def test_report_of_an_older_run_is_due_for_an_hour(database: Database) -> None:
    play_run(database)
    assert [report.tracker for report in run_reports.list_due_reports(database)] == [LINES]
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE runs SET finished_at = '2026-01-01 00:00:00'"))
    assert run_reports.list_due_reports(database) == []


def test_report_command_writes_an_old_run(own_database: Database) -> None:
    play_run(own_database)
    with own_database.engine.begin() as tx:
        tx.execute(text("DELETE FROM reports"))
    done = agentrl("report", "first", "--to", LINES, "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["tracker"], row["iteration"], row["status"]) == (LINES, ITERATIONS, "done")
    assert steps() == [("iteration", number + 1) for number in range(ITERATIONS)]
    again = agentrl("report", "first", "--to", LINES)
    assert again.stdout == f"{LINES}: {ITERATIONS} iterations; {row['url']}\n"
    assert steps() == [("iteration", number + 1) for number in range(ITERATIONS)]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--to", "wandbb"), 2, "No tracker is called 'wandbb'. Did you mean 'wandb'?"),
        (("--to", ","), 2, "report.to.0: String should have at least 1 character"),
        (("--report-samples", "3"), 2, "--report-samples requires --to. Add --to wandb."),
        (("--to", LINES), 4, "the key is wrong"),
    ],
)
def test_report_command_says_what_is_wrong(
    own_database: Database, faults: pytest.MonkeyPatch, words: tuple[str, ...], code: int, said: str
) -> None:
    play_run(own_database)
    faults.setenv("LINE_TRACKER", "log")
    done = agentrl("report", "first", *words)
    assert done.returncode == code
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_submission_refuses_a_tracker_that_does_not_exist(home: Path) -> None:
    done = agentrl("submit", "--dataset", "arithmetic", "--report-to", "wandb,tensorbord", "--dry-run")
    assert done.returncode == 2
    assert "No tracker is called 'tensorbord'. Did you mean 'tensorboard'?" in " ".join(done.stderr.split())


def test_submission_remarks_on_a_tracker_without_its_package() -> None:
    lacking = "tests.support.line_tracker:lacking_tracker"
    (remark,) = remark_on_trackers(build({"report.to": [LINES, lacking]}))
    assert remark.startswith("no_such_package is not installed here. The control loop's machine needs: pip install ")


def agentrl(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "agentrl.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})


def test_report_in_tensorboard_has_each_step_once(own_database: Database) -> None:
    if find_spec("tensorboard") is None:
        missing("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play_run(own_database, to="tensorboard", iterations=2, samples=1)
    processes = ReportProcesses()
    processes.tend(own_database)
    wait_for(lambda: run_reports.list_reports(own_database, "first")[0].iteration == 2)
    (process,) = processes.running
    process.kill()  # its last event may be cut off
    process.reap(own_database)
    train(own_database, planning.start_iteration(own_database, planning.open_iterations(own_database, 1)[0]))
    assert write(own_database) == 0
    folder = Path(run_reports.list_reports(own_database, "first")[0].handle)
    found = EventAccumulator(str(folder))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/reward")] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert [event.step for event in found.Tensors("rollout/samples")] == [1, 2, 3]
    assert b"rollout.group_size" in found.Tensors("run")[0].tensor_proto.string_val[0]
    shutil.rmtree(folder)
    assert write(own_database) == 0
    anew = EventAccumulator(str(folder))
    anew.Reload()
    assert [event.step for event in anew.Scalars("train/reward")] == [1, 2, 3]
    assert b"rollout.group_size" in anew.Tensors("run")[0].tensor_proto.string_val[0], "the config is written with the steps"


def test_tracker_files_each_define_a_tracker() -> None:
    assert names("trackers") == ["mlflow", "tensorboard", "trackio", "wandb"]
    assert {type(find("trackers", name)) for name in names("trackers")} == {Tracker}


def test_report_config_takes_commas_and_refuses_lone_samples() -> None:
    assert build({"report.to": "wandb, mlflow"}).report.to == ("wandb", "mlflow")
    assert build({"report.to": ["wandb"]}).report.to == ("wandb",)
    with pytest.raises(ConfigError, match=r"samples has no effect without report\.to"):
        build({"report.samples": 2})


def test_masked_config_has_no_secret_and_no_prompt() -> None:
    config = build(
        {
            "tools": ["mcp:server --token abc123 --host h", "mcp:run https://me:pw123@example.org/x"],
            "agent": None,
            "resources": {"system_prompt": "Be brief."},
            "model.path": "hf_abcdefghijklmnop",
            "output_dir": "/runs/verysecretvalue",
        }
    ).model_dump(mode="json")
    masked = masked_config(config, {"MY_API_KEY": "verysecretvalue", "HOME": "mcp:server"})
    said = json.dumps(masked)
    for secret in ("abc123", "pw123", "hf_abc", "verysecretvalue", "Be brief"):
        assert secret not in said, secret
    assert masked["tools"] == ["mcp:server --token *** --host h", "mcp:run https://***@example.org/x"]
    assert masked["algorithm.name"] == "grpo"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("run --password 'two words' -v", "run --password *** -v"),
        ('{"api_key": "a b", "n": 1}', '{"api_key": ***, "n": 1}'),
        ("AWS_SECRET_ACCESS_KEY=abc/def HOME=x", "AWS_SECRET_ACCESS_KEY=*** HOME=x"),
        ("curl -H 'Authorization: Basic dXNlcjpwdw=='", "curl -H 'Authorization: Basic ***'"),
        ("curl -H 'Authorization: Bearer abc.def'", "curl -H 'Authorization: Bearer ***'"),
        ("x eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc_d y", "x *** y"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- z", "*** z"),
        ("max_new_tokens 128, the basic sums, passes 3", "max_new_tokens 128, the basic sums, passes 3"),
    ],
)
def test_mask_text_hides_keys_in_every_common_form(text: str, masked: str) -> None:
    assert mask_text(text, {}) == masked


def test_report_metrics_are_finite_with_usual_names() -> None:
    row = dict.fromkeys(("seconds", "tokens", "reward_high", "reward", "kl", "loss"))
    found = iteration_metrics({**row, "seconds": 2.0, "tokens": 10, "reward": 0.5, "reward_high": 0.75, "loss": float("inf")})
    assert found == {
        "train/reward": 0.5,
        "train/reward_std": 0.25,
        "rollout/tokens": 10.0,
        "perf/seconds": 2.0,
        "perf/tokens_per_second": 5.0,
    }
    evaluation = {"mean_reward": 0.5, "low": 0.4, "high": None, "accuracy": 0.5, "episodes": 4, "errors": 0}
    assert eval_metrics({**evaluation, "pass_at": {"2": 0.75}})["eval/pass_at_2"] == 0.75
