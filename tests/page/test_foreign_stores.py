"""The page over a store that is not the reader's own: a folder without the right to write, a login that may only SELECT."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from agentrl.workers.page import read_only
from agentrl.workers.page.export import write_export
from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workflow.errors import AccessDenied
from agentrl.workflow.settings import Settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads.run_rows import find_newest_run
from tests.support.network_machines import wait_until
from tests.support.page_answers import PageOver
from tests.support.played_runs import play, start, submission, values

AS_OTHERS = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
"""Root writes where permissions forbid it; without these it is as anybody."""


def played(database: Database) -> None:
    for group, reward in zip(start(database, submission()), (1.0, 0.25), strict=True):
        play(database, group, reward)


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Path]:
    """A folder that the commands below cannot write, once it is closed to them."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    yield folder
    folder.chmod(0o755)


def copy_into(folder: Path, database: Database, *ends: str) -> None:
    """Copies the database's files and forbids to write there."""
    for end in ends:
        shutil.copy(f"{database.url.database}{end}", folder / f"agentrl.db{end}")
    folder.chmod(0o555)


def run_there(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"AGENTRL_DATABASE_URL": f"sqlite:///{folder / 'agentrl.db'}"}
    command = [*AS_OTHERS, sys.executable, "-P", "-m", "agentrl.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder.parent, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_page_reads_store_in_readonly_folder(sqlite: Database, theirs: Path, killed: bool) -> None:
    """Its last writer closed it, or was killed and left its log."""
    played(sqlite)
    if not killed:
        sqlite.close()
    copy_into(theirs, sqlite, "", *(("-wal", "-shm") if killed else ()))
    before = sorted(theirs.iterdir())
    exported = theirs.parent / "first.html"
    for words, said in (
        (("ui", "--export", "first", "--out", str(exported)), "MB"),
        (("runs",), "first"),
        (("sql", "SELECT reward FROM v_episodes"), "0.25"),
    ):
        done = run_there(theirs, *words)
        assert (done.returncode, said in done.stdout) == (0, True), (words, done.stdout, done.stderr)
    assert exported.stat().st_size > 100_000
    assert sorted(theirs.iterdir()) == before


def test_page_names_index_file_that_copy_lacks(sqlite: Database, theirs: Path) -> None:
    played(sqlite)
    copy_into(theirs, sqlite, "", "-wal")
    done = run_there(theirs, "ui", "--export", "first", "--out", str(theirs.parent / "first.html"))
    assert (done.returncode, "copy the store with its -wal and -shm files" in done.stderr) == (4, True), done.stderr


def reader_of(postgres: Database) -> str:
    return postgres.url.set(username="agentrl_reader").render_as_string(hide_password=False)


def test_page_works_with_postgres_reader_login(postgres: Database, tmp_path: Path) -> None:
    played(postgres)
    where = Settings(database_url=reader_of(postgres))
    page, own = PageOver(where), PageOver(postgres)
    of_run = ("", "/curves", "/ledger", "/lanes", "/tasks", "/events", "/iterations/1", "/episodes", "/annotations",
              "/prompts", "/critic-calls")  # fmt: skip
    others = ("/runs", "/groups/1", "/episodes/1", "/episodes/1/tokens", "/evals", "/views")
    for path in (*(f"/api/runs/1{end}" for end in of_run), *(f"/api{path}" for path in others)):
        assert page.read(path) == own.read(path), path
    assert write_export(ReadOnlyStore(where), "first", tmp_path / "first.html", [], 20_000_000) == ""


def test_page_keeps_one_connection_between_queries(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    played(postgres)
    monkeypatch.setattr(read_only, "SPARE_SECONDS", 1.0)
    url = postgres.url.update_query_dict({"application_name": "the page"}).render_as_string(hide_password=False)
    store = ReadOnlyStore(Settings(database_url=url))
    mine = "SELECT pg_backend_pid() AS pid"
    began, pids = time.monotonic(), set[int]()
    while time.monotonic() - began < 2 * read_only.SPARE_SECONDS:
        (first,) = store.ask(lambda tx: tx.rows(mine, {}))
        pids.add(first["pid"])
    assert pids == {first["pid"]}, "each query keeps the connection for as long again"
    with postgres.engine.begin() as tx:
        tx.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": first["pid"]})
    (third,) = store.ask(lambda tx: tx.rows(mine, {}))
    assert third["pid"] != first["pid"], "a server that was restarted is asked by a new connection"
    with pytest.raises(Exception, match="read-only"):
        store.ask(lambda tx: tx.rows("DELETE FROM runs RETURNING id", {}))
    left = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'the page'"
    wait_until(lambda: values(postgres, left) == [0], "the kept connection being closed")


def test_page_reports_login_without_right_to_read(postgres: Database) -> None:
    with postgres.engine.begin() as tx:
        tx.execute(text("REVOKE SELECT ON runs FROM agentrl_reader"))
    with pytest.raises(AccessDenied, match=r"may not read the store.*runs"):
        find_newest_run(ReadOnlyStore(Settings(database_url=reader_of(postgres))))


def test_page_is_busy_while_file_is_overwritten_then_reads(sqlite: Database) -> None:
    played(sqlite)
    sqlite.close()
    file, page = Path(str(sqlite.url.database)), PageOver(sqlite)
    whole = file.read_bytes()
    assert page.ask("/api/runs")[0] == 200
    for other in (b"x" * 5000, whole[:4096], whole[:20_000] + b"\xff" * 20_000):
        file.write_bytes(other)
        status, said = page.ask("/api/runs")
        assert (status, said["error"].startswith("The store cannot be read")) == (503, True), said
        file.write_bytes(whole)
        assert page.ask("/api/runs")[0] == 200


def test_page_reports_store_replaced_by_other_revision(database: Database) -> None:
    played(database)
    page = PageOver(database)
    assert page.ask("/api/runs")[0] == 200
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = '0001'"))
        tx.execute(text("DROP VIEW v_runs" if database.is_sqlite else "DROP VIEW v_runs CASCADE"))
    assert page.ask("/api/runs")[0] == 503
    status, said = page.ask("/api/runs")
    assert (status, said["hint"]) == (500, "Type: agentrl db upgrade")


def test_page_leaves_nothing_beside_file_of_other_user(sqlite: Database, tmp_path: Path) -> None:
    """Its owner could not write it any more."""
    played(sqlite)
    sqlite.close()
    folder = tmp_path / "shared"
    folder.mkdir()
    file = folder / "agentrl.db"
    shutil.copy(str(sqlite.url.database), file)
    file.chmod(0o444)
    for words in (("ui", "--export", "first", "--out", str(tmp_path / "first.html")), ("runs",), ("sql", "SELECT 1 FROM runs")):
        done = run_there(folder, *words)
        assert done.returncode == 0, (words, done.stderr)
        assert [left.name for left in folder.iterdir()] == ["agentrl.db"], words
