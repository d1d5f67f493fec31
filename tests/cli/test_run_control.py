"""`agentrl resume` where the run moves while the command looks at it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.cli import ensure_workers
from agentrl.cli.main import main
from agentrl.workflow.dataset_rows.sources import hash_source
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from tests.support.played_runs import submission


@pytest.fixture
def stranded(own_database: Database) -> Database:
    """The process's own store with a run that nobody works on."""
    planning.submit(own_database, submission("first"))
    return own_database


def sets(database: Database, status: str) -> Any:
    """Workers that bring the run to that status as soon as they are there."""

    def ready(*_: object, **__: object) -> list[str]:
        with database.engine.begin() as tx:
            tx.execute(text("UPDATE runs SET status = :status"), {"status": status})
        return []

    return ready


def test_resume_succeeds_if_run_ends_meanwhile(
    stranded: Database, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ensure_workers, "ready_workers", sets(stranded, "done"))
    assert main(["resume", "first"]) == 0
    assert "first: done (was running)" in capsys.readouterr().out
    assert main(["resume", "first"]) == 6  # now there was nothing to do from the beginning


def test_resume_fails_if_run_is_cancelled_meanwhile(
    stranded: Database, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ensure_workers, "ready_workers", sets(stranded, "cancelled"))
    assert main(["resume", "first"]) == 6
    assert "is cancelled" in capsys.readouterr().err


def test_resume_notices_a_dataset_file_that_has_changed(
    own_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ensure_workers, "ready_workers", sets(own_database, "done"))
    file = tmp_path / "rows.jsonl"
    for number, rows in enumerate(("a", "b")):
        file.write_text("a")
        asked = replace(
            submission(f"run{number}"), manifest={"id": str(number), "datasets": {str(file): hash_source(str(file), "train")}}
        )
        planning.submit(own_database, asked)
        file.write_text(rows)
        assert main(["resume", f"run{number}"]) == 0
        assert (f"{file} has changed since run{number} was submitted" in capsys.readouterr().err) == (rows == "b")
