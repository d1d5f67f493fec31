"""The run that comes with the package: it opens, is upgraded, and shows what there is to be seen."""

import lzma
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.workers.page import demo
from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.settings import Settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import current, downgrade, head, open_database
from tests.support.demo_store import ELSEWHERE, pack
from tests.support.page_answers import PageOver

MAX_BYTES = 400_000


@pytest.fixture
def opened() -> Iterator[Settings]:
    """The demo's settings."""
    found = demo.open_demo()
    yield found
    shutil.rmtree(found.root)


@pytest.fixture
def shown(opened: Settings) -> Iterator[Database]:
    """Its database."""
    database = open_database(opened.database)
    yield database
    database.close()


def page_over(where: Settings, database: Database) -> PageOver:
    page = PageOver(database)
    page._app.state.store.settings = where
    return page


def test_demo_is_small() -> None:
    assert sum(file.stat().st_size for file in demo.DATA.iterdir()) <= MAX_BYTES


def test_demo_is_copied_at_current_revision(opened: Settings, shown: Database) -> None:
    assert current(shown) == head()
    assert opened.root != demo.DATA
    before = (demo.DATA / demo.PACKED).read_bytes()
    with shown.engine.begin() as tx:
        tx.exec_driver_sql("DELETE FROM run_notes")
    assert (demo.DATA / demo.PACKED).read_bytes() == before


def test_demo_shows_every_kind_of_record(opened: Settings, shown: Database) -> None:
    page = page_over(opened, shown)
    runs = {row["run"]: row for row in page.read("/api/runs")["rows"]}
    assert {*runs} == {"demo", "demo-rloo", "demo-fork"}
    assert {row["status"] for row in runs.values()} == {"done"}
    assert runs["demo"]["tags"]
    number = runs["demo"]["id"]
    told = page.read(f"/api/runs/{number}")
    assert told["notes"]
    assert told["has"]["annotations"]
    assert told["has"]["evals"]
    assert "demo-fork" in [child["run"] for child in told["children"]]
    curves = page.read(f"/api/runs/{number}/curves")
    reward = [row[curves["columns"].index("reward")] for row in curves["rows"]]
    assert sum(reward[-3:]) > sum(reward[:3])  # it learns
    assert len(curves["evals"]) >= 3
    best = page.read(f"/api/runs/{number}/episodes", sort="-calls", size=1)["rows"][0]
    assert best["tool_calls"] >= 1


def test_demo_tokens_have_texts_without_model(opened: Settings, shown: Database) -> None:
    page = page_over(opened, shown)
    episode = page.read("/api/runs/1/episodes", size=1)["rows"][0]["id"]
    tokens = page.read(f"/api/episodes/{episode}/tokens")
    assert not tokens["why_no_texts"]
    assert "".join(tokens["texts"])
    assert any(each is not None for each in tokens["logprobs"])


def test_demo_names_no_folder_or_machine(opened: Settings) -> None:
    with lzma.open(demo.DATA / demo.PACKED) as packed:
        rows = packed.read()
    assert b"/tmp/arl-demo" not in rows
    assert b"/root/" not in rows
    assert b"/home/" not in rows.replace(b"/demo/home", b"")
    assert ELSEWHERE.encode() in rows


def test_demo_of_older_revision_is_upgraded(opened: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Database(opened.database)
    downgrade(old, "0012")
    old.close()
    pack(opened.root / "agentrl.db", tmp_path / "data", opened.root)
    shutil.copy(demo.DATA / demo.TOKENIZER, tmp_path / "data")
    monkeypatch.setattr(demo, "DATA", tmp_path / "data")
    again = demo.open_demo()
    with closing(sqlite3.connect(again.root / "agentrl.db")) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == (head(),)
        assert connection.execute("SELECT count(*) FROM v_runs WHERE run = 'demo'").fetchone() == (1,)
    shutil.rmtree(again.root)


def test_demo_missing_from_installation_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "DATA", tmp_path)
    with pytest.raises(NotFoundError, match="does not contain the demo"):
        demo.open_demo()
