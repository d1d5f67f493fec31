"""`RUN@epoch3` and `runs/NAME/epoch_3` are the checkpoint that ended that epoch, and no link leads nowhere."""

import json
import os
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from sqlalchemy import text

from agentrl.cli import resolve_targets
from agentrl.cli.main import main
from agentrl.workers.jobs import train as train_job
from agentrl.workflow import checkpoints
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.checkpoints.epoch_links import EpochEnds, link_epochs
from agentrl.workflow.errors import CheckpointError, ConfigError, NotFoundError
from agentrl.workflow.settings import settings
from agentrl.workflow.store import epoch_ends, planning, run_names, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.epoch_ends import Epoch
from agentrl.workflow.store.run_names import find_stored_policy, parse_version
from tests.support.played_runs import claim_training, play, start, submission, update_of
from tests.support.published import published
from tests.support.small_models import tiny_random

ALL_WEIGHTS = {"lora_r": 0}


def fill(folder: Path) -> None:
    (folder / sealed_folder.WEIGHTS).write_bytes(bytes(10))
    (folder / sealed_folder.STATE).write_text("{}")


def trained(db: Database, out: Path, epochs: int, tasks: int, versions: int, links: bool = True) -> list[Path]:
    """A run of two tasks an iteration, up to that version; after each commit the links are made as the train job does."""
    start(db, replace(submission("first", tasks=tasks, epochs=epochs), output_dir=str(out)))
    return go_on(db, versions, links)


def go_on(db: Database, versions: int, links: bool = True) -> list[Path]:
    """So many more versions of the run."""
    made = []
    for _ in range(versions):
        iteration = planning.open_iterations(db, run_id(db))[0]
        for group in planning.start_iteration(db, iteration):
            play(db, group)
        work = claim_training(db, iteration)
        folder = Path(work.output_dir) / f"v{work.number + 1:05d}.t{work.token}.{work.key}"
        train_commits.commit_update(db, work, update_of(work, path=str(folder), sha256=checkpoints.write(str(folder), fill)), 3)
        if links:
            train_job._link_epoch(work, work.number + 1)
        made.append(folder)
    return made


def leads(out: Path) -> dict[str, str]:
    """Where the folder's links lead."""
    return {entry.name: os.readlink(entry) for entry in out.iterdir() if entry.is_symlink()}


def run_id(db: Database, name: str = "first") -> int:
    return int(run_names.find_run(db, name)["id"])


@pytest.fixture
def job_database(database: Database, monkeypatch: pytest.MonkeyPatch) -> Database:
    """Each database in turn, as that of the train job."""
    monkeypatch.setattr(train_job, "database", lambda: database)
    return database


def test_epoch_names_version_after_its_last_iteration(job_database: Database, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = trained(job_database, out, epochs=3, tasks=3, versions=5)  # two iterations an epoch
    assert find_stored_policy(job_database, "first", Epoch(1)).path == str(made[1])
    assert find_stored_policy(job_database, "first", Epoch(2)).version == 4
    for epoch in (3, 4, 0, 10**19):
        with pytest.raises(NotFoundError, match=f"Epoch {epoch} of 'first' has not ended"):
            find_stored_policy(job_database, "first", Epoch(epoch))
    assert leads(out) == {"epoch_1": made[1].name, "epoch_2": made[3].name}
    assert (out / "epoch_2" / sealed_folder.WEIGHTS).is_file()


def test_epoch_cut_short_has_no_link(job_database: Database, tmp_path: Path) -> None:
    trained(job_database, tmp_path / "out", epochs=2, tasks=3, versions=2)
    with job_database.engine.begin() as tx:
        tx.execute(text("UPDATE runs SET iterations = 3"))
    go_on(job_database, 1)
    assert run_names.find_run(job_database, "first")["status"] == "done"
    with pytest.raises(NotFoundError, match="Epoch 2 of 'first' has not ended"):
        find_stored_policy(job_database, "first", Epoch(2))
    assert leads(tmp_path / "out").keys() == {"epoch_1"}


def test_epoch_link_lost_by_death_is_made_on_use(own_database: Database, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = trained(own_database, out, epochs=2, tasks=2, versions=2, links=False)
    assert leads(out) == {}
    config, ref = resolve_targets.find_policy(str(out / "epoch_1"))
    assert (config.name, ref.path) == ("first", str(made[0]))
    assert leads(out) == {"epoch_1": made[0].name, "epoch_2": made[1].name}
    assert resolve_targets.find_policy("first@epoch2")[1].path == str(made[1])
    assert resolve_targets.find_policy(str(out / "epoch_2") + "/")[1].version == 2


@pytest.mark.slow
def test_epoch_link_is_found_below_data_folder(own_database: Database) -> None:
    made = trained(own_database, settings().root / "runs" / "first", epochs=1, tasks=2, versions=1)
    assert resolve_targets.find_policy("runs/first/epoch_1")[1].path == str(made[0])


def test_gc_removes_epoch_link_before_its_target(own_database: Database, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = trained(own_database, out, epochs=3, tasks=2, versions=3)
    assert main(["gc", "--keep-last", "1", "--dry-run"]) == 0
    assert len(leads(out)) == 3
    assert main(["gc", "--keep-last", "1"]) == 0
    assert {entry.name for entry in out.iterdir()} == {made[2].name, "epoch_3"}
    with pytest.raises(CheckpointError, match="were removed"):
        resolve_targets.find_policy(str(out / "epoch_1"))
    assert leads(out) == {"epoch_3": made[2].name}


def test_epoch_link_follows_rebuilt_checkpoint(job_database: Database, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (made,) = trained(job_database, out, epochs=1, tasks=2, versions=1)
    again = made.with_name(made.name.replace(".t", ".r"))
    made.rename(again)
    with job_database.engine.begin() as tx:
        tx.execute(text("UPDATE policies SET path = :path WHERE version = 1"), {"path": str(again)})
    link_epochs(epoch_ends.load_epoch_ends(job_database, run_id(job_database)))
    assert leads(out) == {"epoch_1": again.name}


def test_epoch_links_leave_foreign_entries_alone(tmp_path: Path) -> None:
    for name in ("v00001.t1.mine", "v00002.t1.mine", "v00001.t1.hers", "epoch_2"):
        (tmp_path / name).mkdir()
    (tmp_path / "epoch_1").symlink_to("v00001.t1.hers")
    (tmp_path / "epoch_4").symlink_to("v00004.t1.hers")
    (tmp_path / "epoch_best").symlink_to("nowhere")
    (tmp_path / "epoch_5").symlink_to("v00001.t1.hers")
    (tmp_path / "epoch_6").symlink_to("epoch_2")
    mine = EpochEnds(str(tmp_path), "mine", {1: "v00001.t1.mine", 2: "v00002.t1.mine", 3: "v00003.t1.mine"})
    left = {"epoch_6": "epoch_2", "epoch_best": "nowhere"}
    link_epochs(replace(mine, newest=False))
    assert leads(tmp_path) == {"epoch_1": "v00001.t1.hers", "epoch_5": "v00001.t1.hers", **left}
    link_epochs(mine)
    assert leads(tmp_path) == {"epoch_1": "v00001.t1.mine", **left}
    assert (tmp_path / "epoch_2").is_dir()
    link_epochs(EpochEnds("s3://bucket/run", "mine", {1: "v00001.t1.mine"}))


def test_epoch_links_in_shared_folder_are_of_youngest_run(own_database: Database, tmp_path: Path) -> None:
    out = tmp_path / "out"
    older = trained(own_database, out, epochs=2, tasks=2, versions=2)
    assert leads(out) == {"epoch_1": older[0].name, "epoch_2": older[1].name}
    planning.submit(own_database, replace(submission("second", tasks=2, epochs=2), output_dir=str(out)))
    assert not epoch_ends.load_epoch_ends(own_database, run_id(own_database)).newest
    with pytest.raises(NotFoundError, match="Epoch 2 of 'second' has not ended"):
        resolve_targets.find_policy(str(out / "epoch_2"))
    link_epochs(epoch_ends.load_epoch_ends(own_database, run_id(own_database, "second")))
    assert leads(out) == {}
    link_epochs(epoch_ends.load_epoch_ends(own_database, run_id(own_database)))
    assert leads(out) == {}, "an older run has none"
    assert resolve_targets.find_policy("first@epoch2")[1].path == str(older[1])


def test_parse_version_takes_number_best_or_epoch() -> None:
    assert [parse_version(word) for word in ("3", "v3", "best", "epoch3")] == [3, 3, "best", Epoch(3)]
    for word in ("", "x", "epoch", "epoch-1", "epochv1", "epoch3x", "vepoch3", "1" * 30, "epoch" + "1" * 30):
        with pytest.raises(ConfigError, match="is not a policy version"):
            parse_version(word)


def test_epoch_path_works_in_eval_merge_and_chat(
    own_database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.cli import evaluate

    base = tiny_random(tmp_path / "base")
    out = settings().root / "runs" / "first"
    made = published(own_database, base, out, ALL_WEIGHTS, versions=2, epochs=2)
    link_epochs(epoch_ends.load_epoch_ends(own_database, run_id(own_database)))
    place = os.path.relpath(out / "epoch_2")
    assert main(["merge", place, "--out", str(tmp_path / "plain"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 2
    words = ("arithmetic", "test", 4, {})
    assert [evaluate.eval_run_of(name, *words)[1].path for name in (place, "first@epoch1")] == [str(made[1]), str(made[0])]
    monkeypatch.setattr("sys.stdin", StringIO())  # nobody says a word
    assert main(["chat", "--model-path", "runs/first/epoch_2"]) == 0
