"""What no row needs leaves the disk, what one needs stays, whatever dies in between; a database is compacted in use."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from agentrl.cli import maintenance
from agentrl.cli.main import main
from agentrl.workers.jobs.train import _remove_leftovers
from agentrl.workers.stack.process import database as process_database
from agentrl.workflow import checkpoints
from agentrl.workflow.checkpoints import object_store, sealed_folder
from agentrl.workflow.errors import CheckpointError, NotFoundError, ServiceError
from agentrl.workflow.store import planning, retention, run_names, train_commits, vacuum
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import event_rows, run_rows
from agentrl.workflow.store.run_names import find_stored_policy
from agentrl.workflow.store.train_claims import IterationWork
from bench.faults.cluster import small_disk
from tests.conftest import forget_process
from tests.support.forked_stack import ForkedStack
from tests.support.forked_stack import stack as stack
from tests.support.gate import at_gate, open_gate
from tests.support.played_runs import claim_training, play, start, submission, update_of, value, values
from tests.support.real_stack import SIZES, TURNS
from tests.support.small_models import tiny_random

WEIGHTS, OPTIMIZER = 1000, 3000


def fill(folder: Path) -> None:
    (folder / sealed_folder.WEIGHTS).write_bytes(bytes(WEIGHTS))
    (folder / sealed_folder.OPTIMIZER).write_bytes(bytes(OPTIMIZER))


def path_of(work: IterationWork) -> str:
    return f"{work.output_dir}/v{work.number + 1:05d}.t{work.token}.{work.key}"


def folder_of(work: IterationWork) -> Path:
    return Path(path_of(work))


def train(db: Database, work: IterationWork) -> Path:
    """The update of a claimed iteration, with files that are as big as they say."""
    path = path_of(work)
    train_commits.commit_update(db, work, update_of(work, path=path, sha256=checkpoints.write(path, fill)), 3)
    return Path(path)


def make_run(db: Database, out: Path | str, iterations: int, trained: int, name: str = "first") -> list[Path]:
    """A run whose first `trained` iterations are done; its checkpoints, oldest first."""
    start(db, replace(submission(name, tasks=1, epochs=iterations), output_dir=str(out)))
    run = run_names.find_run(db, name)["id"]
    made = []
    for _ in range(trained):
        iteration = planning.open_iterations(db, run)[0]
        for group in planning.start_iteration(db, iteration):
            play(db, group)
        made.append(train(db, claim_training(db, iteration)))
    return made


def gc(db: Database, run: str = "first", keep_last: int | None = None, dry_run: bool = False) -> dict[str, int]:
    (place,) = retention.list_checkpoint_folders(db, (run,))
    return maintenance._collect_run(db, place, keep_last, dry_run)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_gc_keeps_named_adapters_and_two_optimizers(database: Database, tmp_path: Path) -> None:
    made = make_run(database, tmp_path / "out", iterations=4, trained=4)
    assert gc(database) == {"leftovers": 0, "optimizers": 2 * OPTIMIZER, "adapters": 0}
    assert [(folder / sealed_folder.OPTIMIZER).exists() for folder in made] == [False, False, True, True]
    assert all((folder / sealed_folder.WEIGHTS).exists() for folder in made)
    assert sum(gc(database).values()) == 0


def test_gc_removes_adapter_without_episode(database: Database, tmp_path: Path) -> None:
    made = make_run(database, tmp_path / "out", iterations=3, trained=3)
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE iterations SET policy_id = 1"))
    assert gc(database)["adapters"] > 2 * WEIGHTS
    assert names(tmp_path / "out") == {made[-1].name}
    assert values(database, "SELECT version FROM policies WHERE collected_at IS NOT NULL ORDER BY 1") == [1, 2]


def test_gc_removes_leftovers_of_killed_but_not_live_trainers(database: Database, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (published,) = make_run(database, out, iterations=2, trained=1)
    iteration = planning.open_iterations(database, 1)[0]
    for group in planning.start_iteration(database, iteration):
        play(database, group)
    fenced = claim_training(database, iteration, lease=-1)
    live = claim_training(database, iteration)
    writing = folder_of(live).with_name(f"{folder_of(live).name}.tmp")
    kept = {published.name, writing.name, "v00001.t1.another0", "notes.txt", "v1"}
    gone = {folder_of(fenced).name, f"{folder_of(fenced).name}.tmp", f"{published.name}.old", f"v00001.t9.{live.key}.tmp"}
    for name in (kept | gone) - {published.name, "notes.txt"}:
        (out / name).mkdir()
        (out / name / "half").write_bytes(bytes(10))
    (out / "notes.txt").write_text("mine")
    assert gc(database, dry_run=True) == gc(database) == {"leftovers": 40, "optimizers": 0, "adapters": 0}
    assert names(out) == kept
    writing.rename(folder_of(live))
    assert gc(database)["leftovers"] == 0
    train_commits.commit_update(database, live, update_of(live, path=str(folder_of(live)), sha256="x"), 3)
    assert gc(database)["leftovers"] == 0
    assert folder_of(live).exists()


def test_gc_keeps_only_copy_under_temporary_name(database: Database, tmp_path: Path) -> None:
    (made,) = make_run(database, tmp_path / "out", iterations=1, trained=1)
    made.rename(made.with_name(f"{made.name}.old"))
    assert sum(gc(database).values()) == 0
    assert names(tmp_path / "out") == {f"{made.name}.old"}


def test_gc_keep_last_drops_adapters_of_finished_run(database: Database, tmp_path: Path) -> None:
    made = make_run(database, tmp_path / "out", iterations=3, trained=3)
    said = gc(database, keep_last=1, dry_run=True)
    assert all(folder.exists() for folder in made)
    assert value(database, "SELECT count(*) FROM policies WHERE collected_at IS NOT NULL") == 0
    assert gc(database, keep_last=1) == said
    assert said["adapters"] > 2 * (WEIGHTS + OPTIMIZER)
    assert names(tmp_path / "out") == {made[-1].name}
    with pytest.raises(CheckpointError, match=r"first@1 were removed on 20\d\d-\d\d-\d\d\.") as refused:
        find_stored_policy(database, "first", 1)
    assert refused.value.exit_code == 9
    assert find_stored_policy(database, "first", None).path == str(made[-1])
    assert find_stored_policy(database, "first", 0).path == ""
    assert [event["kind"] for event in event_rows.list_events(database, event_rows.EventFilter("first")).rows].count(
        "collected"
    ) == 1


@pytest.mark.parametrize("status", ["running", "paused", "failed"])
def test_gc_keep_last_leaves_what_run_needs_to_continue(database: Database, tmp_path: Path, status: str) -> None:
    made = make_run(database, tmp_path / "out", iterations=4, trained=3)
    if status != "running":
        planning.stop(database, "first", status, "by hand")
    gc(database, keep_last=1)
    over = status == "failed"
    assert names(tmp_path / "out") == {folder.name for folder in (made[1:] if over else made)}
    assert [(folder / sealed_folder.OPTIMIZER).exists() for folder in made[1:]] == [True, True]


@pytest.mark.parametrize("kind", ["eval", "serve"])
def test_gc_keeps_adapter_used_by_another_run(database: Database, tmp_path: Path, kind: str) -> None:
    made = make_run(database, tmp_path / "out", iterations=3, trained=3)
    start(database, replace(submission("second", kind="eval"), policy=find_stored_policy(database, "first", 1)))
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE runs SET kind = :kind WHERE name = 'second'"), {"kind": kind})
    gc(database, keep_last=1)
    assert names(tmp_path / "out") == {made[0].name, made[2].name}
    planning.stop(database, "second", "cancelled")
    gc(database, keep_last=1)
    assert names(tmp_path / "out") == {made[2].name}
    with pytest.raises(CheckpointError, match="second@1 were removed"):
        find_stored_policy(database, "second", 1)


def test_gc_separates_two_runs_in_one_folder(database: Database, tmp_path: Path) -> None:
    mine = make_run(database, tmp_path / "out", iterations=3, trained=3)
    others = make_run(database, tmp_path / "out", iterations=3, trained=3, name="second")
    gc(database, "first", keep_last=1)
    assert names(tmp_path / "out") == {folder.name for folder in (mine[-1], *others)}


@pytest.mark.parametrize(("point", "left"), [("collect.before", 3), ("collect.after", 3), ("waste.removed", 2)])
@pytest.mark.slow
def test_gc_killed_anywhere_is_completed_by_next(home: Path, sqlite: Database, tmp_path: Path, point: str, left: int) -> None:
    made = make_run(sqlite, tmp_path / "out", iterations=3, trained=3)
    (tmp_path / "hits").mkdir()
    asked = {
        "AGENTRL_DATABASE_URL": str(sqlite.url),
        "AGENTRL_FAULT_DIR": str(tmp_path / "hits"),
        "AGENTRL_FAULT": f"{point}:1:kill",
    }
    command = [sys.executable, "-m", "agentrl.cli", "gc", "--keep-last", "1"]
    assert subprocess.run(command, env=os.environ | asked, check=False).returncode == -signal.SIGKILL
    assert len(names(tmp_path / "out")) == left
    for version, folder in enumerate(made[:-1], 1):
        if point == "collect.before":
            assert find_stored_policy(sqlite, "first", version).path == str(folder)
        else:
            with pytest.raises(CheckpointError, match="were removed"):
                find_stored_policy(sqlite, "first", version)
    assert subprocess.run(command, env=os.environ | asked, check=False).returncode == 0
    assert names(tmp_path / "out") == {made[-1].name}
    assert sum(gc(sqlite, keep_last=1).values()) == 0


def test_gc_behind_url_keeps_and_removes_the_same(home: Path, sqlite: Database) -> None:
    url = "memory://agentrl-gc/out"
    made = [folder.name for folder in make_run(sqlite, url, iterations=4, trained=4)]
    assert gc(sqlite)["optimizers"] == 2 * OPTIMIZER
    assert {name for name, files in object_store.sizes(url).items() if sealed_folder.OPTIMIZER in files} == set(made[2:])
    said = gc(sqlite, keep_last=1, dry_run=True)
    assert gc(sqlite, keep_last=1) == said
    assert set(object_store.sizes(url)) == {made[-1]}


def test_gc_names_unknown_run(sqlite: Database) -> None:
    with pytest.raises(NotFoundError, match="There is no run 'nobody'"):
        retention.list_checkpoint_folders(sqlite, ("nobody",))


@pytest.fixture
def here(store_home: Path) -> Iterator[Database]:
    """The database that commands of this process use."""
    forget_process()
    yield process_database()
    process_database().close()
    forget_process()


def test_gc_reports_bytes_by_kind(here: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(here, tmp_path / "out", iterations=3, trained=3)
    make_run(here, tmp_path / "other", iterations=1, trained=1, name="second")
    (tmp_path / "out" / f"v00009.t1.{retention.list_checkpoint_folders(here, ('first',))[0].key}.tmp").mkdir()
    assert main(["gc", "first", "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["dry_run"] is True
    assert said["bytes"] == {"leftovers": 0, "optimizers": OPTIMIZER, "adapters": 0}
    assert main(["gc"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["run", "leftovers", "optimizers", "adapters"],
        ["first", "0", "bytes", "2.9", "KiB", "0", "bytes"],
    ]
    assert lines[-1] == "2.9 KiB were freed."
    assert len(names(tmp_path / "out")) == 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_random(tmp_path / "random")


@pytest.mark.slow
def test_gc_and_vacuum_leave_what_running_run_needs(stack: ForkedStack, model: Path) -> None:
    asked = ("--dataset", "arithmetic", "--model", str(model), "--max-tasks", "12", *SIZES, *TURNS)
    held = "hooks=[tests.support.parity_hook:Lucky,tests.support.gate:AfterSecondUpdate]"
    run = stack.agentrl("submit", *asked, "-s", held, "--epochs", "2", "--name", "busy").strip()
    stack.wait(lambda: at_gate(stack.home, "update"), "two updates")
    stack.agentrl("gc", "--keep-last", "1")
    stack.agentrl("vacuum")
    open_gate(stack.home, "update")
    while run_rows.describe_run(stack.database, run)["status"] == "running":
        stack.agentrl("gc", "--keep-last", "1")
        stack.agentrl("vacuum")
    stack.wait_for(run)
    trained = values(stack.database, "SELECT path FROM policies WHERE kind = 'trained' AND collected_at IS NULL")
    gone = values(stack.database, "SELECT path FROM policies WHERE kind = 'trained' AND collected_at IS NOT NULL")
    assert all(sealed_folder.weights_of(Path(path)).exists() for path in trained)
    assert not any(Path(path).exists() for path in gone)
    assert value(stack.database, "SELECT count(*) FROM iterations WHERE status = 'done'") == 6


# vacuum


def grow(db: Database, rows: int = 3000) -> None:
    """Makes the file bigger, and all of it free again."""
    with db.engine.begin() as tx:
        event = {"run_id": None, "kind": "test", "detail": "x" * 1000}
        tx.execute(text("INSERT INTO events (run_id, kind, detail) VALUES (:run_id, :kind, :detail)"), [event] * rows)
    with db.engine.begin() as tx:
        tx.execute(text("DELETE FROM events"))


def test_vacuum_frees_space_and_keeps_rows(database: Database) -> None:
    start(database, submission())
    grow(database)
    done = vacuum.vacuum(database)
    assert not done.left
    assert done.after < done.before - 2**21 if database.is_sqlite else done.after > 0
    assert value(database, "SELECT count(*) FROM episodes") == 4


def test_vacuum_waits_only_briefly(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacuum, "BUSY_SECONDS", 0.05)
    with sqlite.engine.begin(), pytest.raises(ServiceError, match="is being written to: it was not changed"):
        vacuum.vacuum(sqlite)


def test_vacuum_reports_reader_that_keeps_log(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacuum, "BUSY_SECONDS", 0.05)
    grow(sqlite, 10)
    with sqlite.read() as tx:
        tx.execute(text("SELECT count(*) FROM runs")).scalar_one()
        grow(sqlite, 10)
        assert vacuum.vacuum(sqlite).left
    assert not vacuum.vacuum(sqlite).left


def test_vacuum_of_locked_postgres_table_is_one_sentence(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacuum, "BUSY_SECONDS", 1.0)
    with postgres.engine.begin() as tx:
        tx.execute(text("LOCK TABLE runs IN SHARE UPDATE EXCLUSIVE MODE"))
        with pytest.raises(ServiceError, match="Another process has locked"):
            vacuum.vacuum(postgres)


def test_vacuum_refuses_without_space_for_copy(tmp_path: Path, migrated_file: Path) -> None:
    with small_disk(tmp_path / "disk", "3m") as disk:
        with closing(sqlite3.connect(migrated_file)) as source, closing(sqlite3.connect(disk / "a.db")) as target:
            source.backup(target)
        db = Database(f"sqlite:///{disk / 'a.db'}")
        with db.engine.begin() as tx:
            tx.execute(text("INSERT INTO events (kind, detail) VALUES ('test', :detail)"), {"detail": "x" * 1_600_000})
        db.close()
        with pytest.raises(ServiceError, match=r"Not enough disk space .* MiB free, and \d+ MiB are needed"):
            vacuum.vacuum(db)
        assert value(db, "SELECT length(detail) FROM events") == 1_600_000
        db.close()


def kept_by(db: Database, out: Path, every: int, iterations: int, trained: int, run: str = "first") -> set[str]:
    """The checkpoints, by their version, that a run with epochs of three iterations has after so many."""
    wanted = replace(submission(run, tasks=3, tasks_per_iteration=1, epochs=iterations), output_dir=str(out))
    config = {**wanted.config, "update": {**wanted.config["update"], "save_every": every}, "iterations": iterations}
    made = planning.submit(db, replace(wanted, config=config, epochs=None, length=iterations))
    for _ in range(trained):
        iteration = planning.open_iterations(db, made.id)[0]
        for group in planning.start_iteration(db, iteration):
            play(db, group)
        work = claim_training(db, iteration)
        train(db, work)
        _remove_leftovers(work)
    return {name[:6] for name in names(out)}


def test_gc_with_save_every_keeps_epoch_ends_last_and_current(own_database: Database, tmp_path: Path) -> None:
    assert kept_by(own_database, tmp_path / "going", 4, 9, trained=8) == {"v00003", "v00004", "v00006", "v00007", "v00008"}
    assert kept_by(own_database, tmp_path / "done", 4, 7, 7, "second") == {"v00003", "v00004", "v00006", "v00007"}
    assert sum(gc(own_database, "second").values()) == 0
    assert kept_by(own_database, tmp_path / "one", 1, 4, 4, "third") == {"v00001", "v00002", "v00003", "v00004"}
    with pytest.raises(CheckpointError, match="second@5 were removed"):
        find_stored_policy(own_database, "second", 5)
    assert find_stored_policy(own_database, "second", 6).version == 6


def test_gc_keeps_start_checkpoint_of_another_run_until_its_end(own_database: Database, tmp_path: Path) -> None:
    kept_by(own_database, tmp_path / "out", 9, 8, trained=2)
    planning.submit(own_database, replace(submission("second"), policy=find_stored_policy(own_database, "first", 1)))
    for _ in range(2):
        iteration = planning.open_iterations(own_database, 1)[0]
        for group in planning.start_iteration(own_database, iteration):
            play(own_database, group)
        train(own_database, claim_training(own_database, iteration))
    assert [Path(path).name[:6] for path in retention.drop_unsaved(own_database, 1)] == ["v00002"]
    planning.stop(own_database, "second", "cancelled")
    (gone,) = retention.drop_unsaved(own_database, 1)
    assert Path(gone).name.startswith("v00001")
    assert values(own_database, "SELECT version FROM policies WHERE collected_at IS NOT NULL AND run_id = 1 ORDER BY 1") == [
        1,
        2,
    ]
