"""Transactions: written together where threads wait for SQLite's turn, undone alone, tried again if the database was away."""

import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import IntegrityError

from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.store import connect
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import open_database


def note(tx: Connection, kind: str) -> str:
    """One event row."""
    tx.execute(text("INSERT INTO events (kind) VALUES (:kind)"), {"kind": kind})
    return kind


def noted(database: Database) -> list[str]:
    """The kinds of all events, in their order."""
    with database.read() as tx:
        return list(tx.execute(text("SELECT kind FROM events ORDER BY id")).scalars())


def test_database_writes_of_threads_happen_once_with_own_results(database: Database) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: database.write(lambda tx: note(tx, f"n{number}")), range(200)))
    assert answers == [f"n{number}" for number in range(200)]
    assert sorted(noted(database)) == sorted(answers)


def until_in_line(database: Database, threads: int) -> None:
    """Waits until so many threads of this process wait for the one that writes."""
    while len(database._group_commit._line) < threads:
        time.sleep(0.001)


def test_database_write_that_raises_undoes_itself_alone(sqlite: Database) -> None:
    """The first holds the turn until the others wait in line, so that they are written together."""
    waiting = threading.Barrier(3)

    def slow(tx: Connection) -> str:
        waiting.wait()
        until_in_line(sqlite, 2)
        return note(tx, "slow")

    def broken(tx: Connection) -> str:
        note(tx, "undone")
        tx.execute(text("INSERT INTO events (kind) VALUES (NULL)"))
        return "never"

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(sqlite.write, slow)
        bad = pool.submit(lambda: (waiting.wait(), sqlite.write(broken)))
        good = pool.submit(lambda: (waiting.wait(), sqlite.write(lambda tx: note(tx, "good"))))
        assert first.result() == "slow"
        assert good.result()[1] == "good"
        with pytest.raises(IntegrityError):
            bad.result()
    assert noted(sqlite) == ["slow", "good"]


def test_database_write_waits_for_other_process(sqlite: Database) -> None:
    other = sqlite3.connect(str(sqlite.url.database), isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.3, lambda: other.execute("COMMIT")).start()
    assert sqlite.write(lambda tx: note(tx, "after")) == "after"
    other.close()


def test_database_reconnects_and_writes_once(postgres: Database) -> None:
    tries = []

    def work(tx: Connection) -> str:
        tries.append(1)
        if len(tries) == 1:
            tx.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        return note(tx, "kept")

    assert postgres.write(work) == "kept"
    assert (len(tries), noted(postgres)) == (2, ["kept"])


def test_database_away_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.2)
    away = Database("postgresql://nobody:secret@127.0.0.1:1/none")
    with pytest.raises(ServiceError, match="does not answer") as caught:
        away.write(lambda tx: note(tx, "never"))
    assert "secret" not in str(caught.value)


def test_database_url_that_is_invalid_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a database URL"):
        Database("not a url")


@pytest.mark.parametrize(
    "url",
    [
        "mysql://a/b",
        "sqlite+other:///x",
        "sqlite://",
        "sqlite:///:memory:",
        "postgresql://u:pw@h:x/n",
        "postgresql://u:p@pw@h/n",
    ],
)
def test_database_url_unsupported_is_refused_without_password(url: str) -> None:
    with pytest.raises(ConfigError, match="AGENTRL_DATABASE_URL") as caught:
        Database(url)
    assert "pw" not in f"{caught.value} {caught.value.hint}"


def test_database_file_or_folder_invalid_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("This is no database, however long one reads in it.\n" * 100)
    for file in ("text.db", ""):
        with pytest.raises(ServiceError, match=r"cannot be used: (file is not a database|unable to open)"):
            open_database(f"sqlite:///{tmp_path / file}")
    with pytest.raises(ServiceError, match="Cannot create"):
        Database(f"sqlite:///{tmp_path / 'text.db' / 'below.db'}")


def test_database_file_that_is_readonly_is_named(sqlite: Database) -> None:
    event.listen(sqlite.engine, "connect", lambda driver, _: driver.execute("PRAGMA query_only = ON"))
    sqlite.close()
    with pytest.raises(ServiceError, match="cannot be used: attempt to write a readonly database"):
        sqlite.write(lambda tx: note(tx, "never"))


def test_database_writes_survive_full_rollback_by_sqlite(sqlite: Database) -> None:
    """A full disk undoes the whole transaction, not one savepoint: nobody may be told that what was undone is kept."""
    with sqlite.read() as tx:
        pages = int(tx.execute(text("PRAGMA page_count")).scalar_one())
    event.listen(sqlite.engine, "connect", lambda driver, _: driver.execute(f"PRAGMA max_page_count = {pages + 4}"))
    sqlite.close()
    waiting = threading.Barrier(4)

    def first(tx: Connection) -> str:
        waiting.wait()
        until_in_line(sqlite, 3)
        return note(tx, "first")

    def late(kind: str) -> str:
        waiting.wait()
        return sqlite.write(lambda tx: note(tx, kind))

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(sqlite.write, first), pool.submit(late, "x" * 1_000_000)]
        futures += [pool.submit(late, "second"), pool.submit(late, "third")]
        told = [future.exception() for future in futures]
    assert [error is None for error in told] == [True, False, True, True]
    assert sorted(noted(sqlite)) == ["first", "second", "third"]


def test_database_read_sees_one_state(database: Database) -> None:
    with database.read() as tx:
        before = tx.execute(text("SELECT count(*) FROM events")).scalar_one()
        database.write(lambda writing: writing.execute(text("INSERT INTO events (kind) VALUES ('between')")))
        assert tx.execute(text("SELECT count(*) FROM events")).scalar_one() == before
    with database.read() as tx:
        assert tx.execute(text("SELECT count(*) FROM events")).scalar_one() == before + 1


def test_database_reopened_keeps_locks_of_its_user(tmp_path: Path) -> None:
    file = tmp_path / "a.db"
    with closing(open_database(f"sqlite:///{file}")) as first:
        first.ask(lambda tx: tx.execute(text("SELECT count(*) FROM runs")).scalar_one())
        assert Path(f"{file}-wal").exists()
        open_database(f"sqlite:///{file}").close()
        looks = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('SELECT count(*) FROM runs'); db.close()"
        subprocess.run([sys.executable, "-c", looks, str(file)], check=True)
        assert Path(f"{file}-wal").exists(), "another process that closes it does not take itself for the last one"
