"""A run is made longer, once for each request, and comes to what the run comes to that was planned so long."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update

from agentrl.workers.requests.submit import prepare
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import MAX_INT, build
from agentrl.workflow.errors import AgentRLError, CheckpointError, ConfigError, ConflictError, StateError
from agentrl.workflow.settings import settings
from agentrl.workflow.store import planning, retention, run_names, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.extend_run import extend
from agentrl.workflow.store.planning import Submission
from agentrl.workflow.store.reads import event_rows, run_rows
from agentrl.workflow.tables import schema as tables
from agentrl.workflow.tables.step_values import JOIN_PROMPT_IDS, PROMPT_IDS
from tests.faults.test_mending import a_worker, do_jobs, facts, restart
from tests.support.played_runs import claim_training, play, ready, submission, update_of, value, values
from tests.support.small_models import tiny_random

PLANNED = """
    SELECT i.number || ' ' || i.epoch || ' ' || p.version FROM iterations i JOIN policies p ON p.id = i.policy_id
    ORDER BY i.id"""


def trained(db: Database) -> train_commits.PublishedUpdate:
    """The run's next iteration, rolled out and trained."""
    iteration = planning.open_iterations(db, 1)[0]
    for group in planning.start_iteration(db, iteration):
        play(db, group)
    work = claim_training(db, iteration)
    return train_commits.commit_update(db, work, update_of(work, path=f"out/v{work.number + 1}"), 3)


def done(db: Database, wanted: Submission) -> None:
    """The run, trained to its end."""
    planning.submit(db, wanted)
    for _ in range(wanted.iterations):
        trained(db)
    assert run_names.find_run(db, "first")["status"] == "done"


def test_extend_continues_finished_run_with_newest_policy(database: Database) -> None:
    done(database, submission(tasks=3, epochs=1))
    assert extend(database, "first", "a", epochs=2)["iterations"] == 2
    row = run_names.find_run(database, "first")
    assert (row["status"], row["iterations"], row["epochs"], row["finished_at"]) == ("running", 6, 3, None)
    assert values(database, PLANNED) == ["0 0 0", "1 0 1", "2 1 2"]
    for _ in range(4):
        trained(database)
    assert run_names.find_run(database, "first")["status"] == "done"
    planned = submission(tasks=3, epochs=3)
    assert run_names.find_run(database, "first")["config"] == planned.config
    assert event_rows.list_events(database, event_rows.EventFilter("first")).rows[-2]["detail"] == "2 -> 6 iterations"


def test_extend_lengthens_running_run_without_duplicate_plans(database: Database) -> None:
    planning.submit(database, submission(tasks=3, epochs=1))
    extend(database, "first", "a", iterations=2)
    assert values(database, PLANNED) == ["0 0 0"]
    row = run_names.find_run(database, "first")
    assert (row["epochs"], row["config"]["epochs"], row["config"]["iterations"]) == (2, 2, None)
    trained(database)
    extend(database, "first", "b", iterations=1)
    assert run_names.find_run(database, "first")["config"]["iterations"] == 5
    assert values(database, PLANNED) == ["0 0 0", "1 0 1"]


@pytest.mark.parametrize(("committed", "planned"), [(0, ["0 0 0", "1 1 0"]), (2, ["0 0 0", "1 1 0", "2 2 1", "3 3 2"])])
def test_extend_plans_overlapping_iterations_with_right_version(database: Database, committed: int, planned: list[str]) -> None:
    planning.submit(database, submission(tasks=1, epochs=2, max_staleness=1))
    for _ in range(committed):
        trained(database)
    extend(database, "first", "a", iterations=3)
    assert values(database, PLANNED) == planned


def test_extend_concurrently_adds_each_once(database: Database) -> None:
    done(database, submission())
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda n: extend(database, "first", f"{n // 2}", iterations=1), range(20)))
    assert run_names.find_run(database, "first")["iterations"] == 11
    assert values(database, PLANNED) == ["0 0 0", "1 1 1"]


def test_extend_during_last_commit_continues_run(database: Database) -> None:
    work = ready(database, submission())
    with ThreadPoolExecutor(2) as pool:
        longer = pool.submit(extend, database, "first", "a", iterations=1)
        pool.submit(train_commits.commit_update, database, work, update_of(work), 3).result()
        longer.result()
    assert run_names.find_run(database, "first")["status"] == "running"
    assert values(database, PLANNED) == ["0 0 0", "1 1 1"]


def test_extend_resumes_paused_or_failed_run(database: Database) -> None:
    planning.submit(database, submission())
    planning.stop(database, "first", "paused", "by hand")
    extend(database, "first", "a", iterations=1)
    assert run_names.find_run(database, "first")["status"] == "running"
    planning.stop(database, "first", "failed", "it broke")
    extend(database, "first", "b", iterations=1)
    row = run_names.find_run(database, "first")
    assert (row["status"], row["reason"], row["iterations"]) == ("running", "", 3)


def test_finished_run_changes_status_only_to_be_extended(database: Database) -> None:
    done(database, submission())
    with pytest.raises(Exception, match="keeps its status"), database.engine.begin() as tx:
        tx.execute(text("UPDATE runs SET status = 'running'"))
    with pytest.raises(Exception, match="keeps its status"), database.engine.begin() as tx:
        tx.execute(text("UPDATE runs SET status = 'failed', iterations = iterations + 1"))


def _decaying(db: Database) -> None:
    config = submission().config
    planning.submit(db, replace(submission(), config={**config, "update": {**config["update"], "decay": "linear"}}))


def _cancelled(db: Database) -> None:
    planning.submit(db, submission())
    planning.stop(db, "first", "cancelled")


def _long(db: Database) -> None:
    planning.submit(db, submission())
    with db.engine.begin() as tx:
        tx.execute(update(tables.runs).values(iterations=MAX_INT))


def _collected(db: Database) -> None:
    done(db, submission())
    with db.engine.begin() as tx:
        tx.execute(update(tables.policies).where(tables.policies.c.version == 1).values(collected_at=datetime.now(UTC)))


@pytest.mark.parametrize(
    ("made", "error", "said"),
    [
        (_decaying, ConfigError, r"falls to 0 at its end \(update.decay=linear\)"),
        (_cancelled, StateError, "cancelled and cannot be extended"),
        (_long, ConfigError, "the maximum is"),
        (_collected, CheckpointError, "first@1 were removed on .*iteration 2 needs them"),
        (lambda db: planning.submit(db, submission(kind="eval")), StateError, "does not train"),
    ],
)
def test_extend_refusal_changes_nothing(
    database: Database, made: Callable[[Database], None], error: type[AgentRLError], said: str
) -> None:
    made(database)
    before = run_names.find_run(database, "first")
    with pytest.raises(error, match=said) as raised:
        extend(database, "first", "a", iterations=1)
    assert raised.value.hint
    assert run_names.find_run(database, "first") == before


def test_extend_refuses_run_on_stored_episodes(database: Database) -> None:
    done(database, submission())
    stored = replace(submission("second"), tasks=(), groups=values(database, "SELECT id FROM groups"))
    planning.submit(database, stored)
    with pytest.raises(StateError, match="stored episodes, each of them once"):
        extend(database, "second", "a", iterations=1)


def test_submit_with_other_length_explains_extend(database: Database) -> None:
    planning.submit(database, submission())
    with pytest.raises(ConflictError, match="another length: 1 iteration") as raised:
        planning.submit(database, submission(epochs=2))
    assert "agentrl resume first --epochs N" in (raised.value.hint or "")
    extend(database, "first", "a", epochs=1)
    assert not planning.submit(database, submission(epochs=2)).created


def test_gc_keeps_checkpoint_of_extended_run(database: Database) -> None:
    done(database, submission(tasks=1, epochs=4, max_staleness=1))
    kept = retention.collect(database, 1, [f"v{version}" for version in range(1, 5)], keep_last=1)
    assert set(kept.referenced) == {"v3", "v4"}
    extend(database, "first", "a", iterations=2)
    assert values(database, PLANNED)[-2:] == ["4 4 3", "5 5 4"]


# real jobs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_random(tmp_path_factory.mktemp("model") / "random", width=16)


def submitted(db: Database, model: Path, **more: Any) -> None:
    """A run of epochs of two iterations, so long as is said."""
    config = build(
        {
            "name": "first", "env": "tests.faults.test_mending:bare", **more, "output_dir": str(settings().root / "out"),
            "hooks": ("tests.support.parity_hook:Lucky",), "dataset.name": "arithmetic", "dataset.max_tasks": 4,
            "model.path": str(model),
            "model.numerics": "exact", "rollout.tasks_per_iteration": 2, "rollout.group_size": 4, "rollout.max_new_tokens": 6,
            "rollout.max_steps": 1, "update.warmup": 3, "algorithm.kl_coef": 0.05, "algorithm.kl_target": 0.01,
        }
    )  # fmt: skip
    planning.submit(db, prepare(db, config).submission)


def came_to(db: Database) -> dict[str, Any]:
    """All that the run stored, and what its last checkpoint holds."""
    run = run_rows.describe_run(db, "first")
    assert run["status"] == "done"
    tokens = f"""
        SELECT {PROMPT_IDS}, t.sampled_ids, t.behavior_logprobs FROM step_tokens t JOIN steps s ON s.id = t.step_id
        {JOIN_PROMPT_IDS} ORDER BY s.episode_id, s.number"""
    with db.read() as tx:
        stored = [tuple(map(bytes, row)) for row in tx.execute(text(tokens))]
    last = Path(value(db, "SELECT path FROM policies ORDER BY version DESC LIMIT 1"))
    files = {
        name: (last / name).read_bytes()
        for name in (sealed_folder.weights_of(last).name, sealed_folder.OPTIMIZER, sealed_folder.STATE)
    }
    row = run_names.find_run(db, "first")
    of_run = {name: row[name] for name in ("epochs", "iterations")} | {"length": row["config"]["epochs"]}
    return {**facts(db), "stored": stored, "files": files, "run": of_run}


@pytest.fixture
def worker(tmp_path: Path, migrated_file: Path) -> Iterator[Database]:
    with a_worker(tmp_path / "home", migrated_file) as db:
        yield db


@pytest.mark.slow
def test_run_extended_twice_equals_run_planned_that_long(
    worker: Database, model: Path, tmp_path: Path, migrated_file: Path
) -> None:
    submitted(worker, model, iterations=1)
    do_jobs()
    assert run_rows.describe_run(worker, "first")["status"] == "done"
    restart()  # by another process
    extend(worker, "first", "a", iterations=1)
    do_jobs(until=lambda: value(worker, "SELECT count(*) FROM steps") > 10)
    extend(worker, "first", "b", epochs=1)  # while it goes on
    do_jobs()
    extended = came_to(worker)
    with a_worker(tmp_path / "planned", migrated_file) as db:
        submitted(db, model, iterations=4)
        do_jobs()
        planned = came_to(db)
    assert len(planned["stored"]) == 4 * 2 * 4
    assert extended == planned


@pytest.mark.slow
def test_run_extended_equals_planned_if_checkpoints_are_dropped(
    worker: Database, model: Path, tmp_path: Path, migrated_file: Path
) -> None:
    submitted(worker, model, iterations=3, **{"update.save_every": 100})
    do_jobs()
    assert {folder.name[:6] for folder in (settings().root / "out").glob("v*")} == {"v00002", "v00003"}
    restart()
    extend(worker, "first", "a", iterations=1)
    do_jobs()
    assert {folder.name[:6] for folder in (settings().root / "out").glob("v*")} == {"v00002", "v00004"}
    extended = came_to(worker)
    with a_worker(tmp_path / "planned", migrated_file) as db:
        submitted(db, model, iterations=4)
        do_jobs()
        assert came_to(db) == extended
