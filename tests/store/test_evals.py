"""A run measures its own policies: evaluations are planned with the versions, keep nothing waiting, and name the best one."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import agentrl
from agentrl.api.curve import MARGIN, WIDTH
from agentrl.cli import maintenance
from agentrl.cli.eval_run import eval_run_of
from agentrl.cli.main import main
from agentrl.cli.resolve_targets import find_policy
from agentrl.workers.requests.eval_config import eval_config, sampling_differences
from agentrl.workers.requests.submit import prepare
from agentrl.workers.stack.process import database as process_database
from agentrl.workflow import checkpoints
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import ConfigError, DatasetError, Fenced, NotFoundError
from agentrl.workflow.models.lookup import base_hash
from agentrl.workflow.plugins import find, names
from agentrl.workflow.runtime.shown_text import cell
from agentrl.workflow.settings import settings
from agentrl.workflow.stats.evaluation import evaluate
from agentrl.workflow.store import control_reads, evals, planning, retention, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.planning import Submission
from agentrl.workflow.store.reads import eval_results, event_rows, iteration_rows, run_rows
from agentrl.workflow.store.run_names import find_run, find_stored_policy, parse_version
from agentrl.workflow.trajectory import Episode
from tests.cli.test_cli import LOADED
from tests.conftest import forget_process
from tests.support.forked_stack import ForkedStack
from tests.support.forked_stack import stack as stack
from tests.support.gate import at_gate, open_gate
from tests.support.played_runs import (
    claim,
    claim_training,
    fail,
    finish,
    play,
    ready,
    start,
    submission,
    task,
    update_of,
    value,
    values,
)
from tests.support.real_stack import SMALL
from tests.support.small_models import tiny_random


class Guessing(Env):
    """Gives a part of the reward itself."""

    def final_reward(self, episode: Episode) -> dict[str, float]:
        """One part."""
        return {"guessed": 1.0}


TRAINED = "SELECT measures_version FROM runs WHERE measures_id = 1 ORDER BY 1"
EXPECTED = "SELECT name || ' ' || status FROM runs WHERE measures_id = 1 ORDER BY id"


def measured(every: int, epochs: int = 4, held_out: int = 2, **fields: Any) -> Submission:
    """A run of one task and iteration per epoch, that measures itself on tasks of its own."""
    run = submission(tasks=1, epochs=epochs, **fields)
    config = build({**build({}).flat(), **_flat(run), "eval.every": every, "eval.tasks": held_out})
    tasks = [replace(task(number), key=f"test/{number}") for number in range(100, 100 + held_out)]
    evaluation = replace(submission("any", kind="eval", tasks=held_out, tasks_per_iteration=held_out), tasks=tasks)
    return replace(run, config=config.model_dump(mode="json"), evaluation=evaluation)


def _flat(run: Submission) -> dict[str, Any]:
    return {f"rollout.{key}": value for key, value in run.config["rollout"].items()} | {
        key: run.config[key] for key in ("name", "epochs", "seed", "env")
    }


def train(db: Database, run: str = "first", **fields: Any) -> train_commits.PublishedUpdate:
    """The run's next iteration, rolled out and trained."""
    iteration = planning.open_iterations(db, find_run(db, run)["id"])[0]
    for group in planning.start_iteration(db, iteration):
        play(db, group)
    work = claim_training(db, iteration)
    path = f"{work.output_dir}/v{work.number + 1:05d}.t{work.token}.{work.key}"
    return train_commits.commit_update(
        db, work, update_of(work, **{"path": path, "sha256": f"sha {work.number + 1}", **fields}), 3
    )


def measure(db: Database, run: str, *rewards: float | None) -> None:
    """Plays an evaluation: the tasks' mean rewards are halves of these; None where all of its episodes fail."""
    (iteration,) = planning.open_iterations(db, find_run(db, run)["id"])
    for group, reward in zip(planning.start_iteration(db, iteration), rewards, strict=True):
        if reward is None:
            work = claim(db, group)
            for position in range(len(work.episodes)):
                fail(db, work, position)
        else:
            play(db, group, reward)
    work = claim_training(db, iteration)
    train_commits.finish_eval(db, work, evaluate(work.groups, eval_results.find_right_episodes(db, work.id)))


def test_eval_measures_first_every_nth_and_last_version(database: Database) -> None:
    planning.submit(database, measured(every=3, epochs=5))
    assert values(database, TRAINED) == [0]
    published = [train(database) for _ in range(5)]
    assert values(database, TRAINED) == [0, 3, 5]
    assert [len(each.measured_by) for each in published] == [0, 0, 1, 0, 1]
    assert values(database, EXPECTED) == ["first-eval-0 running", "first-eval-3 running", "first-eval-5 running"]
    tasks = "SELECT t.key FROM run_tasks m JOIN tasks t ON t.id = m.task_id JOIN runs r ON r.id = m.run_id WHERE r.name = :run"
    assert values(database, f"{tasks} ORDER BY 1", run="first-eval-5") == ["test/100", "test/101"]
    assert value(database, "SELECT count(*) FROM episodes e JOIN runs r ON r.id = e.run_id WHERE measures_version = 3") == 4
    named = "SELECT p.path FROM policies p JOIN runs r ON r.id = p.run_id WHERE r.name = :run AND p.version = 3"
    assert values(database, named, run="first-eval-3") == values(database, named, run="first")
    assert find_run(database, "first")["status"] == "done"
    assert [row["run"] for row in run_rows.list_runs(database).rows] == ["first"]


def test_curve_has_held_out_reward_of_every_version(database: Database) -> None:
    planning.submit(database, measured(every=2, epochs=3))
    for _ in range(3):
        train(database)
    for version, rewards in ((0, (0.0, 1.0)), (2, (1.0, 1.0))):
        measure(database, f"first-eval-{version}", *rewards)
    run = agentrl.open(database.url.render_as_string(hide_password=False)).run("first")
    assert run.curve().evals == ((0, 0.25), (2, 0.5))
    measure(database, "first-eval-3", 2.0, 2.0)
    curve = run.curve()
    assert (curve.iterations, curve.evals) == ((1, 2, 3), ((0, 0.25), (2, 0.5), (3, 1.0)))
    frame = curve.to_pandas()
    assert frame["eval"].dropna().to_dict() == {0: 0.25, 2: 0.5, 3: 1.0}
    assert frame["reward"].dropna().to_dict() == dict(zip(curve.iterations, curve.rewards, strict=True))
    drawn = curve._repr_html_().partition("#d62728")[2]
    assert "held out" in drawn
    assert f"{WIDTH - MARGIN:.1f},30.0" in drawn, "the best value, of the last version, is at the upper right"


def test_eval_is_not_planned_without_every(database: Database) -> None:
    planning.submit(database, submission(tasks=1, epochs=2))
    assert train(database).measured_by == ()
    assert value(database, "SELECT count(*) FROM runs") == 1


def test_eval_is_planned_once_by_counting_commit(database: Database) -> None:
    planning.submit(database, measured(every=1))
    (iteration,) = planning.open_iterations(database, 1)
    for group in planning.start_iteration(database, iteration):
        play(database, group)
    fenced = claim_training(database, iteration, lease=-1)
    work = claim_training(database, iteration)
    with pytest.raises(Fenced):
        train_commits.commit_update(database, fenced, update_of(fenced), 3)
    assert values(database, TRAINED) == [0]
    published = train_commits.commit_update(database, work, update_of(work), 3)
    assert train_commits.commit_update(database, work, update_of(work), 3) == published
    assert len(published.measured_by) == 1
    assert values(database, TRAINED) == [0, 1]


def test_training_does_not_wait_for_evals(database: Database) -> None:
    planning.submit(database, measured(every=1, epochs=2))
    train(database)
    train(database)
    assert find_run(database, "first")["status"] == "done"
    waiting = [run.name for run in control_reads.snapshot(database, 60).runs]
    assert waiting == ["first-eval-0", "first-eval-1", "first-eval-2"]
    assert control_reads.count_running_runs(database) == 3


def test_update_commits_in_downgraded_database(database: Database) -> None:
    planning.submit(database, measured(every=1))
    with database.engine.begin() as tx:  # the columns are dropped with what is in them, and come back empty
        tx.execute(text("UPDATE runs SET measures_id = NULL, measures_version = NULL"))
    assert train(database).measured_by == ()
    (said,) = [
        event
        for event in event_rows.list_events(database, event_rows.EventFilter("first")).rows
        if event["kind"] == "not_measured"
    ]
    assert said["subject"] == "version 1"
    assert "agentrl eval --policy first@1" in said["detail"]
    assert find_run(database, "first")["status"] == "running"


def test_update_commits_if_eval_name_is_taken(database: Database) -> None:
    planning.submit(database, submission("first-eval-1", seed=9))
    planning.submit(database, measured(every=1))
    train(database)
    assert values(database, "SELECT name FROM runs WHERE measures_version = 1") == ["first-eval-1-1"]


def test_evals_pause_resume_and_cancel_with_their_run(database: Database) -> None:
    planning.submit(database, measured(every=1))
    planning.stop(database, "first", "paused")
    assert values(database, EXPECTED) == ["first-eval-0 paused"]
    planning.resume(database, "first")
    assert values(database, EXPECTED) == ["first-eval-0 running"]
    measure(database, "first-eval-0", 1.0, 1.0)
    train(database)
    planning.stop(database, "first", "cancelled")
    assert values(database, EXPECTED) == ["first-eval-0 done", "first-eval-1 cancelled"]


def test_eval_of_version_published_while_paused_waits_for_resume(database: Database) -> None:
    planning.submit(database, measured(every=1))
    (iteration,) = planning.open_iterations(database, 1)
    for group in planning.start_iteration(database, iteration):
        play(database, group)
    work = claim_training(database, iteration)
    planning.stop(database, "first", "paused")
    assert train_commits.commit_update(database, work, update_of(work), 3).measured_by == ()
    assert values(database, EXPECTED) == ["first-eval-0 paused", "first-eval-1 paused"]
    planning.resume(database, "first")
    assert len(evals.list_open_evals(database, 1)) == 2


def test_evals_continue_if_paused_run_ends(database: Database) -> None:
    planning.submit(database, measured(every=1, epochs=2))
    train(database)
    (iteration,) = planning.open_iterations(database, 1)
    for group in planning.start_iteration(database, iteration):
        play(database, group)
    work = claim_training(database, iteration)
    planning.stop(database, "first", "paused")
    published = train_commits.commit_update(database, work, update_of(work), 3)
    assert find_run(database, "first")["status"] == "done"
    assert values(database, EXPECTED) == [f"first-eval-{version} running" for version in range(3)]
    assert published.measured_by == tuple(planning.open_iterations(database, find_run(database, "first-eval-2")["id"]))
    for version in range(3):
        measure(database, f"first-eval-{version}", 1.0, 0.0)
    assert control_reads.count_running_runs(database) == 0


def test_eval_paused_alone_stays_paused_when_run_ends(database: Database) -> None:
    planning.submit(database, measured(every=1, epochs=1))
    planning.stop(database, "first-eval-0", "paused")
    train(database)
    assert values(database, EXPECTED) == ["first-eval-0 paused", "first-eval-1 running"]


@pytest.mark.parametrize("staleness", [0, 1])
def test_iteration_shows_eval_of_its_sampling_version(database: Database, staleness: int) -> None:
    planning.submit(database, measured(every=1, epochs=3, max_staleness=staleness))
    for version in range(4):
        measure(database, f"first-eval-{version}", version / 4, version / 4)
        if version < 3:
            train(database)
    shown = {
        row["policy_version"]: row["mean_reward"]
        for row in eval_results.list_evals(database, eval_results.EvalFilter("first")).rows
    }
    rows = iteration_rows.list_iterations(database, iteration_rows.IterationFilter("first")).rows
    assert [row["policy_version"] for row in rows] == [max(0, number - staleness) for number in range(3)]
    assert [row["eval_reward"] for row in rows] == [shown[row["policy_version"]] for row in rows]
    assert len(set(shown.values())) == 4


def test_best_version_has_name_and_is_first_of_equals(database: Database) -> None:
    planning.submit(database, measured(every=1))
    with pytest.raises(NotFoundError, match="No policy version of 'first' was evaluated yet"):
        find_stored_policy(database, "first", "best")
    with pytest.raises(NotFoundError, match="'first' has no policy version 99; 0 is the newest"):
        find_stored_policy(database, "first", 99)
    for version, rewards in enumerate([(0.0, 1.0), (1.0, 1.0), (1.0, 1.0)]):
        measure(database, f"first-eval-{version}", *rewards)
        train(database)
    assert find_stored_policy(database, "first", parse_version("best")).version == 1
    row = run_rows.describe_run(database, "first")
    assert (row["best_version"], row["best_reward"], row["eval_reward"]) == (1, 0.5, 0.5)
    assert [
        row["eval_reward"] for row in iteration_rows.list_iterations(database, iteration_rows.IterationFilter("first")).rows
    ] == [0.25, 0.5, 0.5, None]
    planning.submit(database, submission("second"))
    with pytest.raises(NotFoundError, match="--eval-every"):
        find_stored_policy(database, "second", "best")


def test_best_version_ignores_eval_with_mostly_failed_episodes(database: Database) -> None:
    planning.submit(database, measured(every=1, held_out=4))
    measure(database, "first-eval-0", 0.5, 0.5, 0.5, 0.5)
    train(database)
    measure(database, "first-eval-1", 1.0, None, None, None)
    row = run_rows.describe_run(database, "first")
    assert (row["best_version"], row["best_reward"]) == (0, 0.25)
    assert [
        (e["policy_version"], e["errors"]) for e in eval_results.list_evals(database, eval_results.EvalFilter("first")).rows
    ] == [(0, 0), (1, 6)]


def test_correctness_is_heaviest_part_or_named_by_env(database: Database) -> None:
    for name, manifest in (("by-weight", {}), ("by-name", {"right_by": {"correct": ["format"]}})):
        wanted = submission(name, kind="eval")
        work = ready(database, replace(wanted, manifest={**wanted.manifest, **manifest}))
        right = eval_results.find_right_episodes(database, work.id)
        assert right == ({group.episodes[1].id for group in work.groups} if name == "by-weight" else set())
        train_commits.finish_eval(database, work, evaluate(work.groups, right))
        (found,) = eval_results.find_evals(database, name)
        assert (found["config"]["name"], found["created_at"].tzinfo) == ("by-name" if manifest else "by-weight", UTC)
        row = eval_results.find_result(database, name)
        assert (row["tasks"], row["accuracy"]) == (2, 0.5 if name == "by-weight" else 0.0)
        assert row["pass_at"] == ({"1": 0.5, "2": 1.0} if name == "by-weight" else {"1": 0.0, "2": 0.0})


half, guessing = Env(rewards={"numeric_answer": 0.5}), Guessing(rewards={"format": 0.1})


@pytest.mark.parametrize(
    ("env", "parts"), [("math", "numeric_answer"), (f"{__name__}:half", "numeric_answer"), (f"{__name__}:guessing", "guessed")]
)
def test_correctness_ignores_rewards_added_by_run(home: Path, model: Path, database: Database, env: str, parts: str) -> None:
    rewards = {"overlong": 2.0, "numeric_answer": 0.1}
    planning.submit(database, prepare(None, asked(model, env=env, rewards=rewards, rollout__group_size=2), "eval").submission)
    iteration, *_ = planning.open_iterations(database, 1)
    for group in planning.start_iteration(database, iteration):
        work = claim(database, group)
        for position in range(2):
            finish(database, work, position, parts={parts: float(position), "overlong": -1.0, "format": 0.5})
    work = claim_training(database, iteration)
    assert eval_results.find_right_episodes(database, work.id) == {group.episodes[1].id for group in work.groups}


tied = Guessing(rewards={"numeric_answer": 1.0})
named = Guessing(rewards={"format": 0.1}, correct=("guessed",))
heavy = Guessing(rewards={"numeric_answer": 2.0})


@pytest.mark.parametrize(
    ("env", "parts"),
    [("guessing", None), ("tied", None), ("named", "guessed"), ("half", "numeric_answer"), ("heavy", "numeric_answer")],
)
def test_correctness_ignores_rewards_added_by_hook(
    home: Path, model: Path, database: Database, env: str, parts: str | None
) -> None:
    config = asked(model, env=f"{__name__}:{env}", hooks=("tests.support.parity_hook:Lucky",), rollout__group_size=2)
    planning.submit(database, prepare(None, config, "eval").submission)
    iteration, *_ = planning.open_iterations(database, 1)
    for group in planning.start_iteration(database, iteration):
        work = claim(database, group)
        for position in range(2):
            given = {"format": 1.0, "numeric_answer": 1.0, "guessed": 1.0, "luck": float(not position)}
            finish(database, work, position, parts=given | ({parts: 2.0 * position} if parts else {}))
    work = claim_training(database, iteration)
    right = {group.episodes[1].id for group in work.groups} if parts else None
    assert eval_results.find_right_episodes(database, work.id) == right
    train_commits.finish_eval(database, work, evaluate(work.groups, right))
    assert eval_results.find_result(database, work.run)["accuracy"] == (0.5 if parts else None)


@pytest.mark.parametrize("name", names("envs"))
def test_shipped_env_names_its_correctness_rewards(name: str) -> None:
    env: Env = find("envs", name)
    assert bool(env.correct) == bool(env.rewards)  # "plain" has none: the run brings them
    assert set(env.correct) <= env.rewards.keys()


# checkpoints


def fill(folder: Path) -> None:
    (folder / sealed_folder.WEIGHTS).write_bytes(bytes(10))
    (folder / sealed_folder.OPTIMIZER).write_bytes(bytes(30))
    (folder / sealed_folder.STATE).write_text("{}")


def train_for_real(db: Database) -> Path:
    """As `train`, with files."""
    run = find_run(db, "first")
    version = len(values(db, "SELECT id FROM policies WHERE run_id = 1"))
    path = f"{run['output_dir']}/v{version:05d}.t1.{run['manifest']['id'][:8]}"
    train(db, path=path, sha256=checkpoints.write(path, fill))
    return Path(path)


def test_gc_never_removes_best_checkpoint(database: Database, tmp_path: Path) -> None:
    planning.submit(database, replace(measured(every=1, epochs=3), output_dir=str(tmp_path / "out")))
    made = [train_for_real(database) for _ in range(3)]
    for version, reward in enumerate([0.0, 1.0, 0.5, 0.5]):
        measure(database, f"first-eval-{version}", reward, reward)
    (place,) = retention.list_checkpoint_folders(database, ("first",))
    maintenance._collect_run(database, place, 1, dry_run=False)
    assert {folder.name for folder in (tmp_path / "out").iterdir()} == {made[0].name, made[2].name}
    assert find_stored_policy(database, "first", "best").path == str(made[0])


@pytest.fixture
def here(store_home: Path) -> Iterator[Database]:
    """The database that commands of this process use."""
    forget_process()
    yield process_database()
    process_database().close()
    forget_process()


def test_policy_is_named_by_checkpoint_folder(here: Database, tmp_path: Path) -> None:
    planning.submit(here, replace(measured(every=1, epochs=2), output_dir=str(tmp_path / "out")))
    made = [train_for_real(here) for _ in range(2)]
    config, policy = find_policy(str(made[0]))
    assert (config.name, policy.version, policy.path) == ("first", 1, str(made[0]))
    strange = tmp_path / "strange"
    checkpoints.write(str(strange), fill)
    with pytest.raises(NotFoundError, match="is a checkpoint of a run that is not in this database"):
        find_policy(str(strange))


# compare


def evaluation(db: Database, name: str, *rewards: float | None, base: str = "hash", **fields: Any) -> None:
    """An evaluation of its own that is done; fields are the submission's."""
    wanted = submission(name, kind="eval", tasks=len(rewards), tasks_per_iteration=len(rewards))
    planning.submit(db, replace(wanted, policy=replace(wanted.policy, base_hash=base), **fields))
    measure(db, name, *rewards)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["compare", *words]) == code
    found = capsys.readouterr()
    return found.err if code else found.out


def test_compare_pairs_by_task_and_fits_80_columns(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation(here, "before", 0.0, 0.0, 1.0, 1.0, None)
    evaluation(here, "after", 1.0, 1.0, 1.0, 0.5, 1.0)
    lines = said(capsys, "before", "after").splitlines()
    assert lines == [
        "4 tasks of gsm8k (train)",
        "  A  mean 0.25  accuracy 0.25  n 8  errors 2  before",
        "  B  mean 0.4375  accuracy 0.375  n 10  errors 0  after",
        "  B - A  0.1875  95% Student [-0.4092, 0.7842]  p 0.5 (exact)",
        "  B better on 2, worse on 1, equal on 1",
        "  B - A of accuracy  0.125  95% Student [-0.6367, 0.8867]  p 1 (exact)",
        "  B right more often on 2, less on 1, as often on 1",
        "  1 task left out: one side has no done episode",
    ]
    assert max(map(len, lines)) <= 80


def test_compare_loads_neither_sqlalchemy_nor_broker(here: Database) -> None:
    for name, reward in (("before", 0.0), ("after", 1.0)):
        evaluation(here, name, reward, reward)
    command = [sys.executable, "-c", LOADED, "compare", "before", "after"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said, _, modules = done.stdout.rpartition("|")
    assert "B - A  0.5 " in said
    assert not {"sqlalchemy", "celery", "redis", "torch", "numpy"} & set(modules.split())


def test_compare_of_one_task_has_no_bounds_and_json_null(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation(here, "before", 0.0)
    evaluation(here, "after", 1.0)
    assert "  B - A  0.5  95% Student [-inf, inf]  p 1 (exact)" in said(capsys, "before", "after").splitlines()
    document = json.loads(said(capsys, "before", "after", "--json"), parse_constant=pytest.fail)
    assert (document["difference"], document["low"], document["high"]) == (0.5, None, None)
    assert document["interval_by"] == document["accuracy"]["interval_by"] == "Student"


def test_compare_resolves_policies_to_newest_evals(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    planning.submit(here, measured(every=1, epochs=2))
    train(here)
    train(here)
    for version, rewards in enumerate([(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)]):
        measure(here, f"first-eval-{version}", *rewards)
    assert "first-eval-1" in said(capsys, "first@0", "first@1")
    assert "B - A  0.5 " in said(capsys, "first-eval-0", "first@best")
    assert "B - A  0.5 " in said(capsys, "first@0", "first")


def test_compare_accepts_two_evals_of_same_weights_but_not_one(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation(here, "older", 1.0, 0.0)
    for run in ("one", "other"):
        planning.submit(here, replace(submission(run), policy=replace(submission(run).policy, base_hash="hash")))
    assert main(["compare", "one", "other"]) == 2
    assert "have the same weights, and only one evaluation: older." in capsys.readouterr().err
    assert main(["compare", "one", "other", "--runs"]) == 0
    assert "cannot be compared on the same tasks yet. 'one' and 'other' have the same weights" in capsys.readouterr().err
    evaluation(here, "newer", 1.0, 1.0)
    assert remarks(capsys, "one", "other") == []
    shown = said(capsys, "one", "other")
    assert "older" in shown
    assert "newer" in shown


def remarks(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What is said beside the comparison."""
    capsys.readouterr()
    assert main(["compare", *words]) == 0
    return capsys.readouterr().err.splitlines()


def test_compare_falls_back_to_newest_evals_of_same_tasks(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    for name, base in (("one-old", "one"), ("other-old", "other"), ("one-older", "one")):
        evaluation(here, name, 1.0, 0.0, base=base)
    evaluation(here, "other-new", 1.0, base="other")
    evaluation(here, "one-new", 1.0, 1.0, 0.0, base="one")
    for side, named in (("one", "one-named"), ("other", "other-named")):
        wanted = submission(named)
        planning.submit(here, replace(wanted, policy=replace(wanted.policy, base_hash=side)))
    shown = said(capsys, "one-named", "other-named")
    assert shown.splitlines()[1:3] == [
        "  A  mean 0.25  accuracy 0.25  n 4  errors 0  one-older",
        "  B  mean 0.25  accuracy 0.25  n 4  errors 0  other-old",
    ]
    (remark,) = remarks(capsys, "one-named", "other-named")
    made = [cell(row["created_at"]) for name in ("one-older", "other-old") for row in eval_results.find_evals(here, name)]
    assert remark == (
        "Their newest evaluations differ in tasks; compared are the newest that agree: "
        f"one-older of {made[0]} and other-old of {made[1]} (UTC)."
    )
    assert remarks(capsys, "one-old", "other-old") == []


def test_compare_prefers_evals_of_the_run_itself(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    planning.submit(here, measured(every=1, epochs=1))
    train(here)
    measure(here, "first-eval-0", 0.0, 0.0)
    measure(here, "first-eval-1", 1.0, 0.0)
    before = said(capsys, "first@0", "first")
    other = measured(every=1, epochs=1)
    planning.submit(here, replace(other, name="later", config=other.config | {"name": "later"}))
    measure(here, "later-eval-0", 1.0, 1.0)
    assert said(capsys, "first@0", "first") == before
    assert remarks(capsys, "first@0", "first") == []
    assert "later-eval-0" in said(capsys, "later@0", "first")


def test_compare_prefers_the_same_rewards_to_newer_ones(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    by_hand = {"agentrl": "0", "id": "x", "of": ""}
    evaluation(here, "one-alike", 1.0, 0.0, base="one", manifest=by_hand)
    evaluation(here, "other", 1.0, 1.0, base="other", manifest=by_hand)
    evaluation(here, "one-newer", 1.0, 1.0, base="one", manifest=by_hand, weights={"numeric_answer": 5.0}, code_hash="new")
    for side in ("one", "other"):
        wanted = submission(f"{side}-named")
        planning.submit(here, replace(wanted, policy=replace(wanted.policy, base_hash=side)))
    assert "one-alike" in said(capsys, "one-named", "other-named")
    (remark,) = remarks(capsys, "one-named", "other-named")
    assert remark.startswith("Their newest evaluations differ in rewards; compared are the newest that agree: one-alike of ")


def test_compare_rejects_eval_with_other_limits(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    by_hand = {"agentrl": "0", "id": "x", "of": ""}
    evaluation(here, "one-alike", 1.0, 0.0, base="one", manifest=by_hand)
    evaluation(here, "other", 1.0, 1.0, base="other", manifest=by_hand)
    short = dict(submission("any", kind="eval").config)
    short["rollout"] = {**short["rollout"], "max_new_tokens": 8}
    evaluation(here, "one-short", 1.0, 1.0, base="one", manifest=by_hand, config=short)
    for side in ("one", "other"):
        wanted = submission(f"{side}-named")
        planning.submit(here, replace(wanted, policy=replace(wanted.policy, base_hash=side)))
    assert "one-alike" in said(capsys, "one-named", "other-named")
    (remark,) = remarks(capsys, "one-named", "other-named")
    assert remark.startswith("Their newest evaluations differ in limits; compared are the newest that agree: one-alike of ")
    assert any("rollout.max_new_tokens" in remark for remark in remarks(capsys, "one-short", "other-named"))


def test_eval_has_limits_and_env_of_options(home: Path, model: Path) -> None:
    limits = {"max_new_tokens": 9, "max_steps": 2, "top_k": 1, "group_size": 1}
    config, _ = eval_run_of(str(model), "arithmetic", "test", 3, limits, "qa")
    stored = prepare(None, config, "eval").submission.config
    assert stored["env"] == "qa"
    assert {key: stored["rollout"][key] for key in limits} == limits
    usual, _ = eval_run_of(str(model), "arithmetic", "test", 3, {})
    assert set(sampling_differences(stored, prepare(None, usual, "eval").submission.config)) == {
        "rollout.max_new_tokens", "rollout.max_steps", "rollout.top_k", "env",
    }  # fmt: skip
    nowhere, _ = eval_run_of(str(model), "arithmetic", "test", 3, {}, "nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        prepare(None, nowhere, "eval")


def test_eval_config_keeps_env_and_rewards_for_other_dataset(home: Path, model: Path) -> None:
    asked = {"model.path": str(model), "dataset.name": "arithmetic", "env": "plain", "rewards": {"length": 0.5}}
    config = build(asked)
    other = eval_config(config, "qa", None, 2, {})
    assert (other.env, other.rewards, other.dataset.split) == ("plain", {"length": 0.5}, "test")
    named = eval_config(config, "qa", None, 2, {}, "qa", rewards={"text_answer": 1.0})
    assert (named.env, named.rewards) == ("qa", {"text_answer": 1.0})


def test_compare_with_other_rewards_compares_only_correctness(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    tells = {"agentrl": "0", "id": "x", "right_by": {"correct": ["numeric_answer"], "weights": {}, "gives": False}}
    evaluation(here, "one", 1.0, 0.0, 0.0, manifest=tells)
    more = {"numeric_answer": 5.0, "brevity": 0.5}
    evaluation(here, "other", 1.0, 1.0, 0.0, base="other", manifest=tells, weights=more, code_hash="new")
    lines = said(capsys, "one", "other").splitlines()
    assert not any(line.startswith("  B - A  ") for line in lines)
    assert "  B - A of accuracy  0.1667  95% Student [-0.5504, 0.8838]  p 1 (exact)" in lines
    assert remarks(capsys, "one", "other") == [
        "Means are not compared: the rewards differ (A numeric_answer x 1, format x 0.5; B numeric_answer x 5, brevity x 0.5); "
        "accuracy is."
    ]
    document = json.loads(said(capsys, "one", "other", "--json"))
    assert (document["rewards_differ"], document["difference"], document["p_value"]) == (True, None, None)
    assert (document["accuracy"]["won"], document["accuracy"]["lost"], document["accuracy"]["tied"]) == (1, 0, 2)
    assert document["b"]["rewards"] == more


def test_compare_omits_accuracies_of_different_parts(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation(here, "one", 1.0, 0.0)
    evaluation(here, "other", 1.0, 1.0, base="other", weights={"numeric_answer": 1.0, "format": 2.0}, code_hash="new")
    document = json.loads(said(capsys, "one", "other", "--json"))
    assert (document["accuracy"], document["difference"]) == (None, None)
    assert remarks(capsys, "one", "other")[-1] == ("Accuracies are not compared: they come from different reward parts.")


def test_compare_reports_other_code_of_same_rewards(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation(here, "one", 1.0, 0.0)
    evaluation(here, "other", 1.0, 1.0, base="other", code_hash="mended")
    assert remarks(capsys, "one", "other") == [
        "Their rewards were computed by different code, which may explain the difference."
    ]
    assert "B - A  0.25 " in said(capsys, "one", "other")
    weights = submission().weights
    evaluation(here, "watched", 1.0, 1.0, base="third", weights={**weights, "brevity": 0.0}, code_hash="of more")
    assert remarks(capsys, "one", "watched") == []


def test_compare_finds_tiny_model_by_measured_dataset(here: Database, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = settings().models_dir / "tiny-arithmetic"
    tiny_random(made)
    arithmetic = build({"dataset.name": "arithmetic", "env": "math"}).model_dump(mode="json")
    for name, rewards, config in (("of-tiny", (1.0, 0.0), {}), ("of-demo", (1.0, 1.0), {})):
        base = base_hash(made) if name == "of-tiny" else "other"
        evaluation(here, name, *rewards, base=base, config=arithmetic | {"name": name} | config)
    demo = submission("demo")
    planning.submit(here, replace(demo, policy=replace(demo.policy, base_hash="other")))
    assert "of-tiny" in said(capsys, "tiny", "demo")
    assert "of-demo" in said(capsys, "tiny", "demo", "--dataset", "arithmetic")
    told = said(capsys, "tiny", "of-demo", "--dataset", "gsm8k", code=5)
    assert "'tiny' has no finished evaluation --dataset gsm8k." in told
    assert "agentrl runs" in said(capsys, "tiny", "nope", code=5)


def test_compare_says_how_to_measure_missing_eval(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation(here, "one", 1.0, 0.0)
    told = said(capsys, "tiny", "one", code=5).splitlines()
    assert told[1].strip() == "agentrl eval --policy tiny --dataset gsm8k --split train -n 2"


def test_compare_names_differing_sampling_options(here: Database, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"rollout.temperature": 0.5, "rollout.max_steps": 8, "rollout.tasks_per_iteration": 2, "env": "arithmetic"}
    evaluation(here, "one", 1.0, 0.0)
    evaluation(here, "other", 1.0, 1.0, base="other", config=build(asked).model_dump(mode="json"))
    older = dict(submission("older", kind="eval").config)  # of before an option was there
    older["rollout"] = {key: value for key, value in older["rollout"].items() if key != "min_p"}
    evaluation(here, "older", 1.0, 1.0, base="third", config=older)
    assert remarks(capsys, "one", "other") == [
        "They were sampled differently (rollout.temperature 1 and 0.5, rollout.max_steps 4 and 8, env math and arithmetic), "
        "which may explain the difference."
    ]
    assert remarks(capsys, "one", "older") == []


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["one", "shorter"], 2, "one has 2 tasks, shorter has 1, and they share 1."),
        (["one", "elsewhere"], 2, "'one' was measured on gsm8k (train), and 'elsewhere' on gsm8k (test)."),
        (["one", "open"], 6, "The evaluation 'open' has no result: it is running."),
        (["one", "trained"], 5, "'trained' has no finished evaluation."),
        (["one", "one", "--dataset", "code"], 5, "'one' has no finished evaluation --dataset code."),
    ],
)
def test_compare_refusal_says_what_to_type(
    here: Database, capsys: pytest.CaptureFixture[str], words: list[str], code: int, sentence: str
) -> None:
    evaluation(here, "one", 1.0, 0.0)
    evaluation(here, "shorter", 1.0, base="other")
    split = build({"dataset.split": "test"}).model_dump(mode="json")
    config = dict(submission("elsewhere", kind="eval").config) | {"dataset": split["dataset"]}
    evaluation(here, "elsewhere", 1.0, 0.0, base="third", config=config)
    start(here, submission("open", kind="eval"))
    trained = submission("trained")
    planning.submit(here, replace(trained, policy=replace(trained.policy, base_hash="fourth")))
    told = said(capsys, *words, code=code).splitlines()
    assert told[0] == f"agentrl: {sentence}"
    assert "agentrl " in told[1]


# options


@pytest.mark.parametrize("key", ["split", "dataset", "tasks", "group_size"])
def test_eval_option_without_every_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} has no effect without eval.every"):
        build({f"eval.{key}": 7 if key in ("tasks", "group_size") else "other"})


def asked(model: Path, **keys: Any) -> RunConfig:
    """A run on 4 tasks of arithmetic."""
    known = {"dataset.name": "arithmetic", "dataset.max_tasks": 4, "model.path": str(model)}
    return build({**known, **{key.replace("__", "."): value for key, value in keys.items()}})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("model") / "random")


def test_submit_names_held_out_tasks_and_options_of_evals(home: Path, model: Path) -> None:
    prepared = prepare(None, asked(model, eval__every=2, eval__tasks=6, eval__samples=3, rollout__max_staleness=1))
    evaluation = prepared.submission.evaluation
    assert evaluation is not None
    assert prepared.remarks == ()
    assert {task.key.partition("/")[0] for task in evaluation.tasks} == {"test"}
    assert (len(evaluation.tasks), evaluation.group_size, evaluation.iterations, evaluation.kind) == (6, 3, 1, "eval")
    assert (evaluation.policy, evaluation.weights) == (prepared.submission.policy, prepared.submission.weights)
    assert (evaluation.config["rollout"]["max_staleness"], evaluation.config["eval"]["every"]) == (0, None)
    assert prepare(None, asked(model)).submission.evaluation is None


def test_submit_reports_tasks_both_trained_and_held_out(home: Path, model: Path) -> None:
    (remark,) = prepare(None, asked(model, eval__every=1, eval__split="train", eval__tasks=6)).remarks
    assert remark.startswith("4 of the 6 held-out tasks are training tasks too")


def test_submit_refuses_missing_held_out_tasks_before_writing(home: Path, model: Path) -> None:
    with pytest.raises(DatasetError, match="validation"):
        prepare(None, asked(model, eval__every=1, eval__split="validation"))


def test_evaluation_of_rows_is_in_env_of_run(home: Path, model: Path, tmp_path: Path) -> None:
    """Rows have no env of their own; a dataset that has one is evaluated in it."""
    rows = str(tmp_path / "rows.jsonl")
    Path(rows).write_text('{"question": "What is 2 plus 3?", "answer": "5"}\n')

    def env_of_evaluation(trained: str, held_out: str, **keys: Any) -> Any:
        keys |= {"dataset__name": trained, "eval__every": 1, "eval__tasks": 1}
        config = asked(model, eval__dataset=held_out, eval__split="train", **keys)
        evaluation = prepare(None, config).submission.evaluation
        assert evaluation is not None
        return evaluation.config["env"]

    other = str(tmp_path / "other.jsonl")
    Path(other).write_text(Path(rows).read_text().replace("2", "4"))
    assert env_of_evaluation(rows, other, env="arithmetic") == "arithmetic"
    assert env_of_evaluation("arithmetic", rows) == "arithmetic"
    assert env_of_evaluation(rows, "arithmetic", env="plain", rewards={"numeric_answer": 1.0}) == "arithmetic"


# whole


@pytest.mark.slow
def test_run_with_evals_survives_kill_and_names_best_version(stack: ForkedStack, model: Path) -> None:
    words = ("--dataset", "arithmetic", "--model", str(model), "--max-tasks", "8", "--eval-every", "1", "-s", "eval.tasks=6")
    run = stack.agentrl(
        "submit", *words, *SMALL, "-s", "hooks=[tests.support.parity_hook:Lucky,tests.support.gate:InEvaluation]"
    ).strip()
    stack.wait(lambda: at_gate(stack.home, "rollout"), "an evaluation that has begun")
    stack.kill_worker("rollout,train")
    open_gate(stack.home, "rollout")
    followed = stack.agentrl("watch", run)
    assert followed.count("\nheld out  version ") + followed.startswith("held out  version ") == 3
    lost = value(stack.database, "SELECT max(losses) FROM groups WHERE kind = 'eval'")
    assert lost == 1, "the kill struck in the middle"
    measures = json.loads(stack.agentrl("watch", run, "--json"))["evals"]
    assert [(row["policy_version"], row["status"], row["episodes"]) for row in measures] == [(v, "done", 6) for v in range(3)]
    of_evals = "SELECT count(*) FROM consumptions c JOIN episodes e ON e.id = c.episode_id JOIN runs r ON r.id = e.run_id"
    assert value(stack.database, f"{of_evals} WHERE r.kind = 'eval'") == 0
    (listed,) = json.loads(stack.agentrl("runs", "--json"))
    assert listed["best_reward"] == max(row["mean_reward"] for row in measures)
    listing = f"SELECT eval_reward FROM v_iterations WHERE run = '{run}' ORDER BY iteration"
    assert values(stack.database, listing) == [row["mean_reward"] for row in measures[:-1]]
    stack.agentrl("gc", "--keep-last", "1")
    best = json.loads(stack.agentrl("eval", "--policy", f"{run}@best", "-n", "6", "--json"))
    assert best["mean_reward"] == pytest.approx(listed["best_reward"])  # the same draws again
    path = value(
        stack.database, f"SELECT path FROM policies p JOIN runs r ON r.id = p.run_id WHERE r.name = '{run}' AND version = 2"
    )
    file = stack.home / "own.jsonl"
    file.write_text('{"question": "The capital of France?", "answer": "Paris"}\n')
    scored = stack.command("eval", "--policy", path, "--dataset", str(file), "--reward", "text_answer")
    assert scored.returncode == 0, scored.stderr
    assert re.search(r"env \w+ \((no prompt|prompt \w{8})\), rewards numeric_answer x 0, text_answer x 1\n", scored.stderr)
    assert f"on {file} (train)" in scored.stdout
    again = json.loads(stack.agentrl("eval", "--policy", path, "-n", "6", "--group-size", "2", "--json"))
    assert (again["episodes"], set(again["pass_at"])) == (12, {"1", "2"})
    stored = stack.agentrl("submit", "--from-episodes", run, "--eval-every", "1", "-s", "eval.tasks=2", "--wait").strip()
    said = json.loads(stack.agentrl("watch", stored, "--json"))["evals"]
    assert [(row["policy_version"], row["episodes"]) for row in said][:1] == [(0, 2)]
    assert said[-1]["policy_version"] == len(json.loads(stack.agentrl("watch", stored, "--json"))["iterations"])
    compared = json.loads(stack.agentrl("compare", f"{run}@best", path, "--json"))
    assert compared["tasks"] == compared["won"] + compared["lost"] + compared["tied"] == 6
    assert 0 < compared["p_value"] <= 1


@pytest.mark.slow
def test_run_with_evals_learns_identically_to_run_without(stack: ForkedStack, model: Path) -> None:
    words = ("--dataset", "arithmetic", "--model", str(model), "--max-tasks", "8", "-s", "model.numerics=exact", *SMALL)
    measuring = ("--eval-every", "1", "-s", "eval.tasks=4")
    stack.agentrl("submit", *words, "--name", "measured", *measuring, "--wait")
    stack.agentrl("submit", *words, "--name", "unmeasured", "--wait")
    query = "SELECT p.sha256 FROM policies p JOIN runs r ON r.id = p.run_id WHERE r.name = :run ORDER BY version"
    learned = values(stack.database, query, run="measured")
    assert len(set(learned)) == 3
    assert learned == values(stack.database, query, run="unmeasured")
