"""What a person sees of a run that goes on: all of it on one screen, more on a larger one."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from sqlalchemy import text

from agentrl.cli.follow import _failing_line, _Lines, _seconds_lines, load_view, summary
from agentrl.cli.main import main
from agentrl.cli.run_view import RunView
from agentrl.cli.screen import live_lines
from agentrl.workflow.store import planning, run_reports, steps, tool_calls, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.machine_loads import HostLoad, WorkLoad, record_load
from tests.store.test_evals import measure, measured
from tests.support.played_runs import (
    CALL,
    answered,
    claim,
    claim_training,
    fail,
    finish,
    play,
    sampled,
    start,
    submission,
    update_of,
    values,
)


def going(db: Database, iterations: int) -> RunView:
    """A run that measures itself, after so many iterations, in the middle of the next."""
    planning.submit(db, measured(every=4, epochs=iterations + 10))
    for number in range(iterations):
        iteration = planning.open_iterations(db, 1)[0]
        for group in planning.start_iteration(db, iteration):
            _play_with_calls(db, group)
        work = claim_training(db, iteration)
        metrics = [{"loss": 0.5, "kl": 0.01, "policy_kl": 2e-5 * number, "entropy": 0.75, "grad_norm": 0.25}]
        metrics = [{**step, "rows": 4, "tokens": 8} for step in metrics]
        train_commits.commit_update(db, work, update_of(work, metrics=metrics, path=f"out/v{number + 1}"), 3)
    measure(db, "first-eval-0", 1.0, 0.0)
    planning.start_iteration(db, planning.open_iterations(db, 1)[0])
    return load_view(db, "first")


def test_watch_lines_show_progress_of_long_iteration(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = [100.0], list[str]()
    monkeypatch.setattr("agentrl.cli.follow.time", SimpleNamespace(monotonic=lambda: now[0]))
    view, lines = going(sqlite, 0), _Lines(written.append)
    for now[0] in (100.0, 114.0, 115.0, 120.0, 130.0):
        lines.show(view)
    assert [line for line in written if "ended" in line] == ["iteration 1/10  0 of 2 episodes ended, 0 tokens sampled"] * 2


def test_watch_says_how_many_lines_it_left_out(sqlite: Database, capsys: pytest.CaptureFixture[str]) -> None:
    view = going(sqlite, 2)
    view = replace(view, run={**view.run, "iterations": 20, "status": "done"})
    _Lines(list[str]().append).show(view)
    assert "Left out: the lines of 1 iteration. All: agentrl sql" in capsys.readouterr().err


def test_watch_explains_equal_rewards_after_three_iterations(database: Database) -> None:
    planning.submit(database, submission("first", tasks=1, epochs=9))
    written = list[str]()
    lines = _Lines(written.append)
    for _ in range(3):
        assert load_view(database, "first").flat == []
        iteration = planning.open_iterations(database, 1)[0]
        for group in planning.start_iteration(database, iteration):
            play(database, group, 0.0)
        work = claim_training(database, iteration)
        train_commits.commit_update(database, work, update_of(work, skipped="no advantage differs from 0"), 3)
        lines.show(load_view(database, "first"))
        lines.show(load_view(database, "first"))
    view = load_view(database, "first")
    assert view.flat[0] == "The last 3 iterations had no training signal: all rewards are equal within each group."
    shown = "\n".join(view.flat)
    for said in (
        "numeric_answer: 0\n",
        "of 6 episodes 0 made a tool call",
        "example answer: ",
        "(agentrl replay 6)",
        "Try: train",
    ):
        assert said in shown
    assert [line for line in written if line in view.flat] == view.flat, "once"
    assert shown in "\n".join(text.strip("\n")[2:] for text, _ in summary(view))


def test_watch_warns_while_most_episodes_fail(database: Database) -> None:
    good, *bad, _ = start(database, submission(tasks=4, tasks_per_iteration=4))
    play(database, good)
    warnings = []
    for group in bad:
        work = claim(database, group)
        for position in range(2):
            fail(database, work, position)
        warnings.append(_failing_line(database, load_view(database, "first")))
    told = "Most episodes of iteration 1 fail, with: the reward raised (agentrl episodes first --status failed)"
    assert warnings == ["", told]


def test_watch_names_the_pages_of_trackers(database: Database) -> None:
    planning.submit(database, submission("first", tasks=1))
    run_reports.add_reports(database, "first", ["tensorboard", "wandb", "mlflow"], 0)
    reports = {report.tracker: report for report in run_reports.list_reports(database, "first")}
    run_reports.record_opened(database, reports["wandb"], "abc", "https://wandb.ai/me/agentrl/runs/abc")
    run_reports.record_failure(database, reports["mlflow"], "mlflow did not answer.")
    view = load_view(database, "first")
    expected = ["mlflow: mlflow did not answer.", "wandb: https://wandb.ai/me/agentrl/runs/abc"]
    assert [line.strip() for line, _ in summary(view) if line.strip() in expected] == expected
    assert [line for line in live_lines(view) if line in expected] == expected


def test_watch_says_what_seconds_are_and_leave_out() -> None:
    parts = [{"of": of, "part": "unexplained", "seconds": 2.0, "share": 1.0} for of in ("run", "episodes")]
    lines = [line.strip() for line in _seconds_lines(RunView({}, seconds=parts, evals=[{}]))]
    assert lines[0] == "seconds of the run: 2.0"
    assert lines[2] == "(unexplained, for example: workers started, checkpoints were written, messages travelled)"
    assert lines[3] == "(not included: the seconds of 1 evaluation)"
    assert lines[6:] == ["(unexplained, for example: they waited for others of their batch, or your agent worked)"]


def test_watch_shows_present_load_of_hosts(database: Database) -> None:
    start(database, submission("first", tasks=1))
    assert load_view(database, "first").machines == []
    gpu = {"name": "G", "share": 0.87, "memory_used": 12 * 2**30, "memory_total": 80 * 2**30}
    work = WorkLoad({"rollout": 1, "tools": 3}, 0, 0)
    record_load(database, "host-a", HostLoad(0.96, 3 * 2**30, 16 * 2**30, [gpu]), work, 152.4)
    expected = "cpu 96%  memory 3.0/16.0 GiB  GPU 87%  GPU memory 12.0/80.0 GiB  sampling 152 tokens/s"
    expected += "  waiting: 1 group, 3 tool calls"
    assert f"now: {expected}" in live_lines(load_view(database, "first"), 140)
    record_load(database, "host-b", HostLoad(None, None, None, None), None, None)
    lines = live_lines(load_view(database, "first"), 140)
    assert lines.index("host-b:") == lines.index(f"host-a: {expected}") + 1
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE machine_loads SET slot = slot - 6"))
    assert load_view(database, "first").machines == []


def _play_with_calls(db: Database, group: int) -> None:
    """Each episode makes a call, every second of which fails."""
    work = claim(db, group)
    made = steps.commit_sampled(db, work.fence, [sampled(work, position, calls=(CALL,)) for position in range(2)])
    for (call,), error in zip(made, (None, "tool_error"), strict=True):
        tool_calls.record_result(db, call, answered("42", error), datetime.now(UTC), "tools:1")
    for position in range(2):
        episode = work.episodes[position]
        turn = replace(
            sampled(work, position, calls=(CALL,)).step, results=(answered("42", "tool_error" if position else None),)
        )
        steps.commit_observed(db, work.fence, [(episode.id or 0, turn)])
        finish(db, work, position, float(position))


def test_watch_screen_of_80_by_24_shows_everything(sqlite: Database) -> None:
    lines = live_lines(going(sqlite, 12), 80, 24)
    assert len(lines) == 23
    assert max(map(len, lines)) <= 80
    assert lines[0] == "first  running  epoch 12 of 22"
    assert lines[2].startswith("iteration 13: 0/2 episodes")
    curves = {line[:14].strip(): line.split()[-3:] for line in lines if "->" in line}
    assert curves["reward"] == ["0.500", "->", "0.500"]
    assert curves["KL to base"] == ["0.010", "->", "0.010"]
    assert curves["KL of update"] == ["0.000", "->", "0.00022"]
    assert curves["entropy"] == ["0.750", "->", "0.750"]
    assert curves["tokens/episode"] == ["2.000", "->", "2.000"]
    assert curves["tool errors"] == ["0.500", "->", "0.500"]
    assert any(line.startswith("held out") and line.endswith("0.250") for line in lines)
    assert any("version 0: 95%" in line and "best 0.250 @0, 3 open" in line for line in lines)
    assert lines[-1].split()[:2] == ["12", "0.5"], "the newest iteration"


def test_watch_screen_shows_more_if_larger(sqlite: Database) -> None:
    view = going(sqlite, 12)
    large = live_lines(view, 120, 50)
    assert sum(line.split()[:2] == [str(number), "0.5"] for number in range(1, 13) for line in large) == 12
    assert any(line.startswith("gradient") for line in large)
    assert any("|***" in line for line in large), "the reward as a plot"
    for height in range(1, 60):
        lines = live_lines(view, 30, height)
        assert len(lines) < max(height, 2)
        assert max(map(len, lines), default=0) <= 30


def test_watch_screen_shortens_what_run_waits_for(sqlite: Database) -> None:
    view = going(sqlite, 2)
    view.warning = "first waits: \x1b[2Jthe server " + "is away " * 100
    lines = live_lines(view, 80, 24)
    assert len(lines) <= 23
    assert [line[:12] for line in lines[-3:]] == ["first waits:", lines[-2][:12], lines[-1][:12]]
    assert "\x1b" not in "".join(lines)
    assert all("away" in line for line in lines[-3:])


def test_watch_defaults_to_newest_run(own_database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--json"]) == 5
    assert "There is no run yet." in capsys.readouterr().err
    for name in ("first", "second"):
        for group in start(own_database, submission(name)):
            play(own_database, group)
    assert main(["watch", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"]["run"], told["progress"]["iteration"]) == ("second", 1)
    assert values(own_database, "SELECT iteration FROM v_iterations") == [1, 1]
