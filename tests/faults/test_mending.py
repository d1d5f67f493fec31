"""A broken checkpoint is made again from the one before it: the run ends as planned, bit for bit where numerics are exact."""

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from celery.exceptions import Ignore
from sqlalchemy import text

from agentrl.workers.jobs import broken_checkpoints
from agentrl.workers.jobs.model_slot import models
from agentrl.workers.jobs.rollout import _fail_run, rollout
from agentrl.workers.jobs.train import train
from agentrl.workers.requests.eval_config import eval_config, in_one_iteration
from agentrl.workers.requests.submit import prepare
from agentrl.workers.stack import control_loop, dispatch, process
from agentrl.workers.stack.celery_app import make_app
from agentrl.workflow.checkpoints import object_store
from agentrl.workflow.checkpoints.sealed_folder import MANIFEST, MODEL, OPTIMIZER, STATE
from agentrl.workflow.config import RunConfig, build
from agentrl.workflow.control.scheduler import Dispatch, SendRollouts, SendTrain, plan
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import CheckpointError, Fenced
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.runtime import faults
from agentrl.workflow.settings import settings
from agentrl.workflow.store import blocked_runs, control_reads, planning, repair, run_names, train_claims, train_commits
from agentrl.workflow.store import rollout_claims as rollouts
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import event_rows, run_rows
from agentrl.workflow.store.repair import Rebuild
from agentrl.workflow.store.run_names import find_stored_policy
from agentrl.workflow.training.reports import Update
from agentrl.workflow.trajectory import PolicyRef
from tests.conftest import copy_store, forget_process
from tests.support.forked_stack import ForkedStack
from tests.support.forked_stack import stack as stack
from tests.support.gate import at_gate, open_gate
from tests.support.played_runs import claim_training, play, ready, start, submission, update_of, value, values
from tests.support.real_stack import SIZES, TURNS
from tests.support.small_models import tiny_random

bare = Env(rewards={"numeric_answer": 1.0})
ITERATIONS = 4
JOBS = {"rollout": rollout, "train": train}
RUN = "damaged"


@contextmanager
def a_worker(home: Path, migrated: Path) -> Iterator[Database]:
    """The database of this process, which does the jobs of a broker of its own."""
    copy_store(home, migrated)
    with pytest.MonkeyPatch.context() as here:
        here.setenv("AGENTRL_HOME", str(home))
        here.setenv("AGENTRL_REDIS_SERVER", "none")
        for name in ("AGENTRL_DATABASE_URL", "AGENTRL_BROKER_URL"):
            here.delenv(name, raising=False)
        forget_process()
        here.setattr(dispatch, "app", make_app(settings()))
        for name in JOBS:  # in memory means in this process: what other tests sent is still there
            with dispatch.app.connection_for_read() as connection, connection.SimpleQueue(name) as queue:
                queue.clear()
        with closing(process.database()) as database:
            yield database
        restart()
    torch.use_deterministic_algorithms(False)
    forget_process()


def restart() -> None:
    """What is in memory is gone, as with its process."""
    if models._loaded is not None:
        models._loaded.engine.close()
    models._loaded, models._key = None, ""
    process._confirm_hashes.cache_clear()


def do_jobs(until: Callable[[], bool] = lambda: False) -> None:
    """Takes messages and does their jobs, as workers and a control loop would, until nothing is left to send."""
    while not until():
        done = [_do(name) for name in JOBS]
        if not any(done):
            if not plan(control_reads.snapshot(process.database(), settings().lease_seconds)):
                return
            control_loop.send_missing()


def _do(name: str) -> bool:
    with dispatch.app.connection_for_read() as connection, connection.SimpleQueue(name) as queue:
        if not queue.qsize():
            return False
        message = queue.get_nowait()
        message.ack()
    with suppress(Ignore):  # a group is not finished: that counts for chords alone
        JOBS[name](*message.decode()[0])
    return True


def submitted(db: Database, model: Path, out: Path) -> None:
    """The run of these tests."""
    config = build(
        {
            "name": RUN, "env": f"{__name__}:bare", "epochs": 1, "output_dir": str(out),
            "hooks": ("tests.support.parity_hook:Lucky",),
            "dataset.name": "arithmetic", "dataset.max_tasks": 2 * ITERATIONS, "model.path": str(model),
            "model.numerics": "exact", "rollout.tasks_per_iteration": 2, "rollout.group_size": 4,
            "rollout.max_new_tokens": 6, "rollout.max_steps": 1,
        }
    )  # fmt: skip
    planning.submit(db, prepare(db, config).submission)


def paused_at(db: Database, model: Path, newest: int) -> list[Path]:
    """The run when it has published that version, paused, its worker gone; its checkpoints, oldest first."""
    submitted(db, model, settings().root / "out")
    do_jobs(until=lambda: value(db, "SELECT max(version) FROM policies") == newest)
    planning.stop(db, RUN, "paused")
    restart()
    return [Path(path) for path in values(db, "SELECT path FROM policies WHERE version > 0 ORDER BY version")]


def facts(db: Database) -> dict[str, Any]:
    """What runs that are the same have in common."""
    queries = {
        "tokens": "SELECT s.episode_id, t.sampled_ids FROM step_tokens t JOIN steps s ON s.id = t.step_id ORDER BY 1, s.number",
        "trained": "SELECT iteration_id, episode_id, advantage FROM consumptions ORDER BY 2",
        "published": "SELECT version, kind, sha256 FROM policies ORDER BY 1",
        "iterations": "SELECT number, status, trainable, mean_reward FROM iterations ORDER BY 1",
    }
    with db.read() as tx:
        return {name: [tuple(row) for row in tx.execute(text(query))] for name, query in queries.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("model") / "random", width=16)


@pytest.fixture(scope="module")
def undamaged(model: Path, tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> dict[str, Any]:
    """What the run makes without a fault."""
    with a_worker(tmp_path_factory.mktemp("undamaged"), migrated_file) as db:
        submitted(db, model, settings().root / "out")
        do_jobs()
        assert run_rows.describe_run(db, RUN)["status"] == "done"
        assert value(db, "SELECT count(*) FROM policies WHERE kind = 'trained'") == ITERATIONS
        assert value(db, "SELECT count(*) FROM v_iterations WHERE tflops > 0") == ITERATIONS  # the job keeps what it cost
        return facts(db)


@pytest.fixture
def worker(tmp_path: Path, migrated_file: Path) -> Iterator[Database]:
    with a_worker(tmp_path / "home", migrated_file) as db:
        yield db


def events(db: Database, kind: str) -> list[str]:
    found = [event for event in event_rows.list_events(db, event_rows.EventFilter(RUN)).rows if event["kind"] == kind]
    return [f"{event['subject']}: {event['detail']}" for event in found]


def truncate(folder: Path) -> None:
    (folder / MODEL).write_bytes((folder / MODEL).read_bytes()[:1000])


def zero(folder: Path) -> None:
    (folder / MODEL).write_bytes(bytes((folder / MODEL).stat().st_size))


def lose_optimizer(folder: Path) -> None:
    (folder / OPTIMIZER).unlink()


def cut_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:20])


def flip_weights(folder: Path) -> None:
    flip(folder / MODEL)


def flip_optimizer(folder: Path) -> None:
    flip(folder / OPTIMIZER)


def flip_state(folder: Path) -> None:
    flip(folder / STATE)


def flip(file: Path) -> None:
    """One bit, in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (truncate, "another sha256 than the record"),
        (zero, "another sha256 than the record"),
        (flip_weights, "another sha256 than the record"),
        (shutil.rmtree, "is missing"),
        (flip_optimizer, "optimizer.safetensors was altered"),
        (lose_optimizer, "optimizer.safetensors is missing"),
        (flip_state, "state.json was altered"),
        (cut_manifest, "manifest.json cannot be read"),
    ],
)
@pytest.mark.slow
def test_rebuild_of_damaged_checkpoint_ends_run_identically(
    worker: Database, model: Path, undamaged: dict[str, Any], damage: Callable[[Path], None], found: str
) -> None:
    *_, newest = paused_at(worker, model, 2)
    damage(newest)
    planning.resume(worker, RUN)
    do_jobs()
    assert run_rows.describe_run(worker, RUN)["status"] == "done"
    assert facts(worker) == undamaged
    (said,) = events(worker, "checkpoint_broken")
    assert said.startswith("version 2: ")
    assert found in said
    assert [text.partition(": ")[0] for text in events(worker, "checkpoint_rebuilt")] == ["version 2"]
    assert "bit for bit" in events(worker, "checkpoint_rebuilt")[0]
    assert value(worker, "SELECT max(losses) FROM iterations") == value(worker, "SELECT max(losses) FROM groups") == 0


@pytest.mark.slow
@pytest.mark.parametrize("point", ["checkpoint.sealed", "commit_rebuild.before", "commit_rebuild.after"])
def test_rebuild_survives_loss_of_trainer(
    worker: Database, model: Path, undamaged: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    *_, newest = paused_at(worker, model, 2)
    flip_weights(newest)
    monkeypatch.setenv("AGENTRL_FAULT_DIR", str(tmp_path))
    monkeypatch.setenv("AGENTRL_FAULT", f"{point}:1:raise")
    faults._plan.cache_clear()
    planning.resume(worker, RUN)
    do_jobs()
    faults._plan.cache_clear()
    assert facts(worker) == undamaged
    assert len(events(worker, "checkpoint_rebuilt")) == 1
    # After the commit the claim is over, so that nothing of it has failed.
    assert len(events(worker, "update_failed")) == (point != "commit_rebuild.after")


def test_rebuild_uses_restored_files(worker: Database, model: Path, undamaged: dict[str, Any]) -> None:
    first, second = paused_at(worker, model, 2)
    for folder in (first, second):
        folder.rename(folder.with_name(f"{folder.name}.away"))
    planning.resume(worker, RUN)
    do_jobs()
    assert run_rows.describe_run(worker, RUN)["status"] == "failed"
    for folder in (first, second):
        folder.with_name(f"{folder.name}.away").rename(folder)
    planning.resume(worker, RUN)
    do_jobs()
    assert facts(worker) == undamaged
    assert events(worker, "checkpoint_rebuilt") == ["version 2: the folder is intact again"]


def test_restored_policy_of_other_run_lacks_optimizer(worker: Database, model: Path) -> None:
    *_, newest = paused_at(worker, model, 1)
    theirs = newest.rename(newest.with_name("v00001.t1.theirs"))
    (theirs / OPTIMIZER).unlink()
    with worker.engine.begin() as tx:  # as `submit --policy` writes it
        tx.execute(text("UPDATE policies SET path = :path WHERE version = 1"), {"path": str(theirs)})
    repair.mark_broken(worker, value(worker, "SELECT id FROM runs"), str(theirs), "it was away")
    planning.resume(worker, RUN)
    do_jobs(until=lambda: bool(events(worker, "checkpoint_rebuilt")))
    assert events(worker, "checkpoint_rebuilt") == ["version 1: the folder is intact again"]
    assert run_rows.describe_run(worker, RUN)["status"] == "running"


def measured(db: Database) -> str:
    """An evaluation of the run's newest policy; its name."""
    config = in_one_iteration(
        db, eval_config(RunConfig.model_validate(run_names.find_run(db, RUN)["config"]), None, "train", 2, {})
    )
    return planning.submit(db, prepare(db, config, "eval", find_stored_policy(db, RUN, None)).submission).name


def test_eval_of_damaged_checkpoint_ends_after_rebuild(worker: Database, model: Path) -> None:
    *_, newest = paused_at(worker, model, 2)
    flip_weights(newest)
    measure = measured(worker)
    planning.resume(worker, RUN)
    planning.stop(worker, measure, "paused")
    do_jobs(until=lambda: bool(events(worker, "checkpoint_broken")))
    planning.resume(worker, measure)
    do_jobs()
    assert {run["run"]: (run["status"], run["reason"]) for run in run_rows.list_runs(worker).rows} == {
        RUN: ("done", ""),
        measure: ("done", ""),
    }
    assert "bit for bit" in events(worker, "checkpoint_rebuilt")[0]


def test_eval_of_damaged_checkpoint_names_rebuilding_run(worker: Database, model: Path) -> None:
    *_, newest = paused_at(worker, model, 2)
    truncate(newest)
    measure = measured(worker)
    do_jobs()
    failed = run_rows.describe_run(worker, measure)
    assert failed["status"] == "failed"
    assert failed["reason"].startswith(f"'{newest}/{MODEL}' has sha256 ")
    told = f"was altered. `agentrl resume {RUN}` rebuilds it, then type `agentrl resume {measure}`."
    assert failed["reason"].endswith(told)
    planning.resume(worker, RUN)
    do_jobs(until=lambda: bool(events(worker, "checkpoint_rebuilt")))
    planning.resume(worker, measure)
    do_jobs()
    assert run_rows.describe_run(worker, measure)["status"] == "done"


def test_pass_that_is_out_of_time_sends_one_message(worker: Database) -> None:
    for name in ("first", "second"):
        planning.submit(worker, submission(name))
    assert [control_loop.send_missing(0.0) for _ in range(2)] == [1, 0]
    assert plan(control_reads.snapshot(worker, settings().lease_seconds)) == []


def test_cleanup_failure_ends_no_job(worker: Database, model: Path) -> None:
    first, _ = paused_at(worker, model, 2)
    (first / OPTIMIZER).unlink()
    (first / OPTIMIZER).mkdir()  # which no unlink removes
    planning.resume(worker, RUN)
    do_jobs()
    assert run_rows.describe_run(worker, RUN)["status"] == "done"
    assert (first / OPTIMIZER).is_dir()


def test_groups_are_handed_back_without_checkpoint_store(
    worker: Database, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused_at(worker, model, 1)
    monkeypatch.setattr(object_store, "RETRY_SECONDS", 0.0)
    planning.resume(worker, RUN)
    with worker.engine.begin() as tx:
        tx.execute(text("UPDATE policies SET path = 'http://127.0.0.1:1/run/v1' WHERE version = 1"))
    group, *_ = values(worker, "SELECT id FROM groups WHERE status <> 'done'")
    work = rollouts.claim_group(worker, group, "host:1/a", 60)
    assert work is not None
    _fail_run([work], CheckpointError("Some reader found it not whole."))
    assert value(worker, "SELECT worker FROM groups WHERE id = :id", id=group) == ""
    assert run_rows.describe_run(worker, RUN)["status"] == "running"


def test_rebuild_without_previous_checkpoint_fails_run(worker: Database, model: Path) -> None:
    whole, first, second = paused_at(worker, model, 3)
    flip_weights(first)
    truncate(second)
    planning.resume(worker, RUN)
    do_jobs()
    run = run_rows.describe_run(worker, RUN)
    assert run["status"] == "failed"
    assert "Version 3 of 'damaged' is broken and cannot be rebuilt" in run["reason"]
    assert f"The checkpoint '{first}' is damaged: model.safetensors was altered" in run["reason"]
    assert "the last intact version is 1." in run["reason"]
    assert "agentrl submit --from-episodes damaged --policy damaged@1." in run["reason"]
    assert events(worker, "checkpoint_rebuilt") == []
    assert value(worker, "SELECT count(*) FROM episodes WHERE status = 'planned'") == 8
    assert whole.exists()


def test_rebuild_after_skipped_update_covers_both_versions(worker: Database, model: Path) -> None:
    *_, newest = paused_at(worker, model, 2)
    with worker.engine.begin() as tx:  # as if iteration 1 had been skipped: version 2 is version 1
        tx.execute(text("UPDATE policies SET kind = 'alias', path = (SELECT path FROM policies WHERE version = 1),"
                        " sha256 = (SELECT sha256 FROM policies WHERE version = 1) WHERE version = 2"))  # fmt: skip
    (path,) = set(values(worker, "SELECT path FROM policies WHERE version > 0"))
    zero(Path(path))
    planning.resume(worker, RUN)
    do_jobs(until=lambda: bool(events(worker, "checkpoint_rebuilt")))
    assert len(set(values(worker, "SELECT path FROM policies WHERE version IN (1, 2)"))) == 1
    assert values(worker, "SELECT broken FROM policies WHERE broken <> ''") == []
    assert newest.exists()


def test_rebuild_refuses_weights_of_another_run(worker: Database, model: Path) -> None:
    *_, newest = paused_at(worker, model, 1)
    with worker.engine.begin() as tx:  # as `submit --policy` writes it
        tx.execute(text("UPDATE policies SET path = :path WHERE version = 0"), {"path": str(newest)})
        tx.execute(text("UPDATE iterations SET number = -1 WHERE status = 'done'"))
        tx.execute(text("UPDATE iterations SET number = 0, policy_id = 1 WHERE status <> 'done'"))
    truncate(newest)
    with worker.engine.begin() as tx:
        tx.execute(text("DELETE FROM policies WHERE version = 1"))
    planning.resume(worker, RUN)
    do_jobs()
    assert "cannot be rebuilt (it was copied from another run); no earlier version is intact." in value(
        worker, "SELECT reason FROM runs"
    )


# by hand


def broken(db: Database) -> train_claims.IterationWork:
    """A run whose version 1 is marked as broken, claimed to make it again."""
    work = ready(db, submission(epochs=2))
    train_commits.commit_update(db, work, update_of(work), 3)
    waiting = repair.mark_broken(db, work.run_id, "out/v1", "it is gone")
    assert waiting == planning.open_iterations(db, work.run_id)[0]
    assert waiting is not None
    return claim_training(db, waiting)


def test_broken_checkpoint_holds_back_rollouts(database: Database) -> None:
    work = ready(database, submission(epochs=2))
    following = train_commits.commit_update(database, work, update_of(work), 3).next_iteration
    assert [type(action) for action in plan(control_reads.snapshot(database, 60))] == [Dispatch]
    repair.mark_broken(database, work.run_id, "out/v1", "it is gone")
    assert plan(control_reads.snapshot(database, 60)) == [SendTrain(following)]
    planning.mark_train_sent(database, following)
    assert plan(control_reads.snapshot(database, 60)) == []
    claimed = claim_training(database, following)
    assert (claimed.rebuilds, claimed.groups) == (True, ())
    (made,) = values(database, "SELECT id FROM policies WHERE version = 1")
    rebuild = repair.load_rebuild(database, claimed)
    assert (rebuild.broken.version, rebuild.start.version, rebuild.groups) == (1, 0, work.groups)
    repair.commit_rebuild(database, claimed, rebuild.broken, "out/v1.again", "abc")
    repair.commit_rebuild(database, claimed, rebuild.broken, "out/v1.again", "abc")  # the commit's answer was lost
    assert values(database, "SELECT path FROM policies WHERE id = :id", id=made) == ["out/v1.again"]
    assert [event["kind"] for event in event_rows.list_events(database, event_rows.EventFilter("first")).rows].count(
        "checkpoint_rebuilt"
    ) == 1
    assert [type(action) for action in plan(control_reads.snapshot(database, 60))] == [SendRollouts]


def test_rebuild_is_claimed_by_one_of_two_trainers(database: Database) -> None:
    work = broken(database)
    assert train_claims.claim_iteration(database, work.id, "another", 60) is None
    train_claims.hand_back_iteration(database, work.id, work.token)
    heir = claim_training(database, work.id)
    rebuild = repair.load_rebuild(database, work)
    with pytest.raises(Fenced):
        repair.commit_rebuild(database, work, rebuild.broken, "out/mine", "abc")
    repair.commit_rebuild(database, heir, rebuild.broken, "out/theirs", "abc")
    assert value(database, "SELECT path FROM policies WHERE version = 1") == "out/theirs"


def test_rebuild_uses_recorded_advantages_of_rewards(database: Database) -> None:
    """A critic's values, and a KL in the reward, are rounded otherwise on another machine."""
    work = ready(database, submission())
    broken = replace(work.policy, path="out/v1", version=1)
    credit = {episode.id: 0.5 for group in work.groups for episode in group.episodes if episode.id is not None}

    def check(apart: float, without: int = 0, **algorithm: Any) -> None:
        config = {**work.config, "algorithm": {**work.config["algorithm"], **algorithm}}
        found = {episode: value + apart for episode, value in list(credit.items())[without:]}
        rebuild = Rebuild(broken, work.policy, work.groups, credit)
        broken_checkpoints.check_same_update(work, Experiment.load(config), rebuild, Update(advantages=found))

    of_the_model: list[dict[str, Any]] = [{"name": "ppo"}, {"name": "rloo", "kl_coef": 0.1, "kl_in": "reward"}]
    for algorithm in of_the_model:
        check(1e-3, **algorithm)
        with pytest.raises(CheckpointError, match="the recomputed advantages differ from the recorded ones"):
            check(0.0, without=1, **algorithm)
    check(1e-7)
    with pytest.raises(CheckpointError, match="the recomputed advantages differ from the recorded ones"):
        check(1e-5)


def test_rebuild_report_that_is_late_changes_nothing(database: Database) -> None:
    work = broken(database)
    repair.commit_rebuild(database, work, repair.load_rebuild(database, work).broken, "out/again", "other")
    repair.mark_broken(database, work.run_id, "out/v1", "a slow worker saw it")
    assert values(database, "SELECT broken FROM policies WHERE broken <> ''") == []
    assert "differ in rounding" in event_rows.list_events(database, event_rows.EventFilter("first")).rows[-1]["detail"]


def test_rebuild_commit_repeated_is_recognised(database: Database) -> None:
    work = broken(database)
    rebuild = repair.load_rebuild(database, work)
    assert not repair.is_checkpoint_named(database, "out/again")
    repair.commit_rebuild(database, work, rebuild.broken, "out/again", "abc")
    train_commits.fail_run(database, work.run_id, "thought lost")
    planning.resume(database, "first")
    for group in values(database, "SELECT id FROM groups WHERE status = 'planned'"):
        play(database, group)
    heir = claim_training(database, work.id)
    assert heir.token != work.token
    repair.commit_rebuild(database, work, rebuild.broken, "out/again", "abc")
    assert repair.is_checkpoint_named(database, "out/again")
    with pytest.raises(Fenced):
        repair.commit_rebuild(database, work, rebuild.broken, "out/another", "abc")


def test_broken_mark_is_on_newest_version_only(database: Database) -> None:
    work = ready(database, submission(epochs=3))
    following = train_commits.commit_update(database, work, update_of(work), 3).next_iteration
    assert following is not None
    for group in planning.start_iteration(database, following):
        play(database, group)
    second = claim_training(database, following)
    assert repair.mark_broken(database, work.run_id, "out/v1", "gone while it was trained on") == following
    train_commits.commit_update(database, second, update_of(second, path="out/v2", sha256="def"), 3)
    assert values(database, "SELECT broken FROM policies WHERE broken <> ''") == []
    # It still names an iteration: else the slow worker would end the run.
    assert repair.mark_broken(database, work.run_id, "out/v1", "a slow worker saw it") is not None
    assert values(database, "SELECT broken FROM policies WHERE broken <> ''") == []
    assert repair.mark_broken(database, work.run_id, "out/v2", "it is gone") is not None


def test_group_claim_waits_for_broken_checkpoint(database: Database) -> None:
    work = ready(database, submission(epochs=2))
    following = train_commits.commit_update(database, work, update_of(work), 3).next_iteration
    assert following is not None
    group, *_ = groups = planning.start_iteration(database, following)
    planning.mark_groups_sent(database, groups)
    repair.mark_broken(database, work.run_id, "out/v1", "it is gone")
    assert rollouts.claim_group(database, group, "host:1/a", 60) is None
    again = claim_training(database, following)
    repair.commit_rebuild(database, again, repair.load_rebuild(database, again).broken, "out/again", "abc")
    assert [type(action) for action in plan(control_reads.snapshot(database, 60))] == [
        SendRollouts
    ]  # their messages were refused
    assert rollouts.claim_group(database, group, "host:1/a", 60) is not None


def evaluated(db: Database, version: int = 1) -> list[int]:
    """The groups of an evaluation of the policy out/vN."""
    policy = PolicyRef("tiny", "hash", f"out/v{version}", "abc", version)
    return start(db, replace(submission("measure", kind="eval"), policy=policy))


def test_eval_waits_for_rebuild_by_running_run(database: Database) -> None:
    work = ready(database, submission(epochs=2))
    following = train_commits.commit_update(database, work, update_of(work), 3).next_iteration
    assert following is not None
    planning.mark_groups_sent(database, planning.start_iteration(database, following))
    group, *_ = evaluated(database)
    measure = run_names.find_run(database, "measure")["id"]
    assert repair.mark_broken(database, measure, "out/v1", "it is gone") == following
    assert repair.mark_broken(database, measure, "out/v1", "so a second worker says") == following
    assert rollouts.claim_group(database, group, "host:1/a", 60) is None
    assert blocked_runs.find_wait_reason(database, measure) == "first is rebuilding its checkpoint (it is gone)."
    assert blocked_runs.find_wait_reason(database, work.run_id) == ""
    assert plan(control_reads.snapshot(database, 60)) == [SendTrain(following)]
    again = claim_training(database, following)
    repair.commit_rebuild(database, again, repair.load_rebuild(database, again).broken, "out/again", "abc")
    assert blocked_runs.find_wait_reason(database, measure) == ""
    assert repair.recovery_hint(database, "measure", "out/v1") == (
        "It was rebuilt in another folder: type `agentrl resume measure`."
    )
    assert [type(action) for action in plan(control_reads.snapshot(database, 60))] == [SendRollouts, SendRollouts]
    claimed = rollouts.claim_group(database, group, "host:1/a", 60)
    assert claimed is not None
    assert claimed.policy.path == "out/again"
    assert (
        repair.mark_broken(database, measure, "out/v1", "a slow worker saw it")
        == planning.open_iterations(database, measure)[0]
    )
    assert values(database, "SELECT broken FROM policies WHERE broken <> ''") == []


def test_eval_does_not_wait_without_rebuilding_run(database: Database) -> None:
    work = ready(database, submission(epochs=3))
    following = train_commits.commit_update(database, work, update_of(work), 3).next_iteration
    assert following is not None
    group, *_ = evaluated(database)
    planning.stop(database, "first", "paused")
    measure = run_names.find_run(database, "measure")["id"]
    assert repair.mark_broken(database, measure, "out/v1", "gone") is None
    resumed = "`agentrl resume first` rebuilds it, then type `agentrl resume measure`."
    assert repair.recovery_hint(database, "measure", "out/v1") == resumed
    planning.resume(database, "first")
    assert repair.mark_broken(database, measure, "out/v1", "gone") == following
    for kept in ("measure", "first"):
        assert blocked_runs.find_wait_reason(database, measure) == "first is rebuilding its checkpoint (gone)."
        planning.stop(database, kept, "paused")
        assert blocked_runs.find_wait_reason(database, measure) == ""
        planning.resume(database, kept)
    planning.stop(database, "first", "paused")  # then nobody makes it again, and the evaluation's workers find that out
    assert rollouts.claim_group(database, group, "host:1/a", 60) is not None
    planning.resume(database, "first")
    again = claim_training(database, following)
    repair.commit_rebuild(database, again, repair.load_rebuild(database, again).broken, "out/v1", "abc")
    for open_group in planning.start_iteration(database, following):
        play(database, open_group)
    second = claim_training(database, following)
    train_commits.commit_update(database, second, update_of(second, path="out/v2", sha256="def"), 3)
    assert repair.mark_broken(database, measure, "out/v1", "gone, and left behind") is None
    assert repair.recovery_hint(database, "measure", "out/v1") == "Put the files back and type `agentrl resume measure`."
    assert values(database, "SELECT broken FROM policies WHERE broken <> ''") == []


@pytest.mark.slow
def test_rebuild_by_real_workers_continues_run(stack: ForkedStack, short_folder: Path, model: Path) -> None:
    asked = ("--dataset", "arithmetic", "--model", str(model), "--max-tasks", "16", *SIZES, *TURNS)
    held = "hooks=[tests.support.parity_hook:Lucky,tests.support.gate:AfterSecondUpdate]"
    run = stack.agentrl("submit", *asked, "-s", held, "--name", "cut").strip()
    stack.wait(lambda: at_gate(stack.home, "update"), "two updates")
    planning.stop(stack.database, run, "paused")
    open_gate(stack.home, "update")
    stack.stop()
    truncate(Path(find_stored_policy(stack.database, run, None).path))
    (short_folder / "hits").mkdir()  # and the trainer is killed when it has made it again but for the commit
    stack.environment |= {"AGENTRL_FAULT_DIR": str(short_folder / "hits"), "AGENTRL_FAULT": "commit_rebuild.before:1:kill"}
    stack.fork_each()
    stack.agentrl("resume", run)
    stack.fork_after("rollout,train", -signal.SIGKILL)
    stack.wait_for(run)
    assert (short_folder / "hits" / "commit_rebuild.before").stat().st_size == 2
    assert "checkpoint_rebuilt" in stack.agentrl("events", run)
    assert value(stack.database, "SELECT count(*) FROM iterations WHERE status = 'done'") == 4
