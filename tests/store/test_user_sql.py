"""`agentrl sql` on SQLite and on a real Postgres: what it answers, and every way out that was tried."""

import json
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from agentrl.workflow.errors import AccessDenied, ConfigError, NotFoundError, ServiceError
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.sql.readonly import MAX_SQL
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import upgrade, weak_passwords
from agentrl.workflow.store.reads.user_sql import rl_f4, rl_i4, run_query
from agentrl.workflow.tables.views import VIEWS
from tests.support.gate import until

IDS = (1, -2, 2**31 - 1, -(2**31), 0)
LOGPROBS = (-0.6931471824645996, 0.0, -1e-42, 3.4e38, float("nan"), -12.25, 1.5)


@pytest.fixture
def asked(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Settings that lead `run_query` to the database."""
    url = database.url.render_as_string(hide_password=False)
    monkeypatch.setenv("AGENTRL_READER_PASSWORD", "it's %secret% :p")
    settings.cache_clear()
    if not database.is_sqlite:
        upgrade(database)  # gives the role its password
    yield Settings(home=tmp_path, database_url=url)
    settings.cache_clear()


def rows_of(database: Database, statement: str) -> int:
    """One number, by the application's own login."""
    with database.read() as tx:
        return int(tx.execute(text(statement)).scalar_one())


def test_weak_passwords_names_guessable_ones_on_postgres(database: Database) -> None:
    where = Settings(reader_password="5f0c1d77a3b94e60", tools_password="short", agents_password="My-AgentRL-password")
    if database.is_sqlite:
        assert weak_passwords(database, where) == []
        return

    def url(password: str) -> str:
        return database.url.set(password=password).render_as_string(hide_password=False)

    weak = ["AGENTRL_TOOLS_PASSWORD", "AGENTRL_AGENTS_PASSWORD"]
    with closing(Database(url("a long enough word"))) as strong:
        assert weak_passwords(strong, where) == weak
    with closing(Database(url("agentrl"))) as guessed:
        owner, *others = weak_passwords(guessed, where)
    assert ("POSTGRES_PASSWORD" in owner, others) == (True, weak)


def test_run_query_gives_columns_and_rows(asked: Settings) -> None:
    columns, rows = run_query(asked, "SELECT 1 AS one, 'a %s :b' AS words, NULL AS nil")
    assert columns == ["one", "words", "nil"]
    assert [tuple(row) for row in rows] == [(1, "a %s :b", None)]


def test_run_query_reads_every_view_with_its_columns(asked: Settings) -> None:
    for view in VIEWS:
        columns, rows = run_query(asked, f"SELECT * FROM {view};  -- with a comment")
        assert len(columns) > 5
        assert not rows


def test_run_query_limits_rows(asked: Settings) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
    _, rows = run_query(asked, endless, limit=7)
    assert [row[0] for row in rows] == list(range(1, 8))


def test_run_query_stops_at_deadline(asked: Settings) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    with pytest.raises(AccessDenied, match="longer than"):
        run_query(asked, endless, seconds=0.3)


ONE_LONG_INSTRUCTION = "SELECT instr(zeroblob(30000000), zeroblob(15000000) || x'01')"


def test_run_query_ends_sqlite_within_one_long_instruction(sqlite: Database, tmp_path: Path) -> None:
    where = Settings(home=tmp_path, database_url=str(sqlite.url))
    with pytest.raises(AccessDenied, match="takes too much work and was stopped"):
        run_query(where, ONE_LONG_INSTRUCTION, seconds=0.1)
    assert run_query(where, "SELECT 1")[1] == [(1,)], "another process answers"


def test_sql_command_obeys_ctrl_c_within_long_instruction(store_home: Path) -> None:
    command = [sys.executable, "-m", "agentrl.cli", "sql", ONE_LONG_INSTRUCTION]
    process = subprocess.Popen(command, env={**os.environ, "AGENTRL_HOME": str(store_home)})
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        until(lambda: bool(children.read_text()))
        reader = Path(f"/proc/{children.read_text().strip()}/stat")
        until(lambda: int(reader.read_text().split()[13]) > 50)  # ticks of processor time: the query runs
        process.send_signal(signal.SIGINT)
        until(lambda: not reader.exists())
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()


ATTACKS = {
    "insert": "INSERT INTO events (kind) VALUES ('x')",
    "delete": "DELETE FROM runs",
    "drop": "DROP VIEW v_runs",
    "create": "CREATE TABLE stolen (a int)",
    "two statements": "SELECT 1; DELETE FROM runs",
    "commit and insert": "commit; insert into events (kind) values ('x')",
    "begin": "BEGIN",
    "commit": "COMMIT",
    "writing cte": "WITH x AS (SELECT 1) INSERT INTO events (kind) SELECT 'x' FROM x",
    "temporary table": "CREATE TEMP TABLE t AS SELECT 1",
}
SQLITE_ATTACKS = {
    "attach": "ATTACH DATABASE '{folder}/stolen.db' AS other",
    "vacuum into": "VACUUM INTO '{folder}/stolen.db'",
    "pragma": "PRAGMA journal_mode = DELETE",
    "pragma writable schema": "PRAGMA writable_schema = ON",
    "pragma as a table": "SELECT * FROM pragma_journal_mode",
    "load extension": "SELECT load_extension('{folder}/evil')",
    "writefile": "SELECT writefile('{folder}/stolen.db', 'x')",
    "detach": "DETACH DATABASE main",
    "savepoint": "SAVEPOINT a",
    "analyze": "ANALYZE",
    "huge blob": "SELECT zeroblob(2000000000)",
    "huge answer": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT zeroblob(60000000) FROM n",
}
POSTGRES_ATTACKS = {
    "copy to program": "COPY (SELECT 1) TO PROGRAM 'touch {folder}/stolen.db'",
    "copy to file": "COPY runs TO '{folder}/stolen.db'",
    "read a file": "SELECT pg_read_file('/etc/passwd')",
    "list a folder": "SELECT pg_ls_dir('/')",
    "large object": "SELECT lo_import('/etc/passwd')",
    "set role": "SET ROLE postgres",
    "read write": "SET TRANSACTION READ WRITE",
    "do": "DO $$ BEGIN DELETE FROM runs; END $$",
    "grant": "GRANT ALL ON runs TO agentrl_reader",
    "leases": "SELECT * FROM service_leases",
    "passwords": "SELECT rolpassword FROM pg_authid",
    "for update": "SELECT * FROM runs FOR UPDATE",
    "sleep past the deadline": "SELECT set_config('statement_timeout', '0', false), pg_sleep(60)",
}


def not_refused(where: Settings, attacks: dict[str, str], folder: Path) -> list[str]:
    """The attacks that got an answer."""
    passed = []
    for name, attack in attacks.items():
        try:
            run_query(where, attack.format(folder=folder), seconds=1)
        except (AccessDenied, ConfigError):
            continue
        passed.append(name)
    return passed


def test_run_query_refuses_all_but_plain_reads(asked: Settings, database: Database, tmp_path: Path) -> None:
    events = rows_of(database, "SELECT count(*) FROM events")
    assert not_refused(asked, ATTACKS, tmp_path) == []
    assert rows_of(database, "SELECT count(*) FROM events") == events
    with pytest.raises(AccessDenied):
        run_query(asked, ATTACKS["commit and insert"])


def test_run_query_touches_no_other_file_on_sqlite(sqlite: Database, tmp_path: Path) -> None:
    where = Settings(home=tmp_path, database_url=str(sqlite.url))
    assert not_refused(where, SQLITE_ATTACKS, tmp_path) == []
    assert not (tmp_path / "stolen.db").exists()


def test_run_query_reader_on_postgres_can_only_read(postgres: Database, tmp_path: Path) -> None:
    where = Settings(home=tmp_path, database_url=postgres.url.render_as_string(hide_password=False))
    assert not_refused(where, POSTGRES_ATTACKS, tmp_path) == []
    assert not (tmp_path / "stolen.db").exists()


def test_run_query_refuses_long_query_and_nul(asked: Settings) -> None:
    with pytest.raises(AccessDenied, match="characters"):
        run_query(asked, "SELECT " + "1 + " * MAX_SQL + "1")
    with pytest.raises(AccessDenied, match="NUL"):
        run_query(asked, "SELECT 1\0")


def test_run_query_error_in_sql_is_bad_input(asked: Settings) -> None:
    for wrong in ("SELECT nothing FROM v_runs", "SELEC 1", "SELECT * FROM nowhere"):
        with pytest.raises(ConfigError):
            run_query(asked, wrong)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("SELECT * FROM v_episode", "Did you mean 'v_episodes'?"),
        ("SELECT * FROM v_episdoes", "Did you mean 'v_episodes'?"),
        ("SELECT statsu FROM v_runs", "Did you mean 'status'?"),
        ("SELECT e.iteraton FROM v_episodes e JOIN v_runs r ON r.run = e.run", "Did you mean 'iteration'?"),
        ("SELECT * FROM nowhere", "List the views: agentrl sql --schema"),
        ("SELECT nothing_like_it FROM v_runs", "List the views: agentrl sql --schema"),
        ("SELECT status", "List the views: agentrl sql --schema"),
        ("SELECT fate FROM v_episodes", "The column fate is in v_ledger: agentrl sql --schema v_ledger"),
    ],
)
def test_run_query_suggests_nearest_view_or_column(asked: Settings, wrong: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="Invalid query") as refused:
        run_query(asked, wrong)
    assert refused.value.hint == hint


def test_upgrade_sets_reader_password_of_settings(asked: Settings, database: Database) -> None:
    if not database.is_sqlite:
        stored = "SELECT count(*) FROM pg_authid WHERE rolname = 'agentrl_reader' AND rolpassword IS NOT NULL AND NOT rolsuper"
        assert rows_of(database, stored) == 1
    assert run_query(asked, "SELECT 1")[1]


def test_run_query_ignores_options_of_url(postgres: Database, tmp_path: Path) -> None:
    url = postgres.url.update_query_dict({"connect_timeout": "7", "client_encoding": "latin1", "application_name": "mine"})
    where = Settings(home=tmp_path, database_url=url.render_as_string(hide_password=False))
    _, rows = run_query(where, "SELECT current_setting('application_name') AS name, '\u65e5' AS day")
    assert [tuple(row) for row in rows] == [("mine", "\u65e5")]


def test_run_query_refuses_login_that_may_write(postgres: Database, tmp_path: Path) -> None:
    url = postgres.url.render_as_string(hide_password=False)
    with pytest.raises(AccessDenied, match="has the right to write"):
        run_query(Settings(home=tmp_path, database_url=url, database_reader_url=url), "SELECT 1")


def test_run_query_without_reader_login_says_what_to_do(postgres: Database, tmp_path: Path) -> None:
    url = postgres.url.render_as_string(hide_password=False)
    nobody = postgres.url.set(username="nobody_like_that").render_as_string(hide_password=False)
    with pytest.raises(AccessDenied, match="AGENTRL_DATABASE_READER_URL"):
        run_query(Settings(home=tmp_path, database_url=url, database_reader_url=nobody), "SELECT 1")


def test_run_query_without_postgres_is_service_error(tmp_path: Path) -> None:
    where = Settings(home=tmp_path, database_url="postgresql://someone:secret@127.0.0.1:1/nothing")
    with pytest.raises(ServiceError) as caught:
        run_query(where, "SELECT 1")
    assert "secret" not in str(caught.value)


def test_run_query_before_first_run_makes_no_database(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        run_query(Settings(home=tmp_path / "home"), "SELECT 1")
    assert not (tmp_path / "home").exists()


def test_run_query_reads_while_another_writes(sqlite: Database, tmp_path: Path) -> None:
    writer = sqlite3.connect(str(sqlite.url.database), isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("INSERT INTO events (kind) VALUES ('x')")
    _, rows = run_query(Settings(home=tmp_path, database_url=str(sqlite.url)), "SELECT count(*) FROM events")
    assert [tuple(row) for row in rows] == [(0,)]
    writer.close()


def test_packed_ids_and_logprobs_are_json_on_both_databases(asked: Settings, database: Database) -> None:
    ids = struct.pack(f"<{len(IDS)}i", *IDS).hex()
    logprobs = struct.pack(f"<{len(LOGPROBS)}f", *LOGPROBS)
    blob = "X'{}'" if database.is_sqlite else "'\\x{}'::bytea"
    asking = f"SELECT rl_i4({blob.format(ids)}), rl_f4({blob.format(logprobs.hex())}), rl_i4({blob.format('')}), rl_f4(NULL)"
    _, ((got_ids, got_logprobs, empty, nothing),) = run_query(asked, asking)
    expected = [None if value != value else value for value in struct.unpack(f"<{len(LOGPROBS)}f", logprobs)]
    assert json.loads(got_ids) == list(IDS)
    assert json.loads(got_logprobs) == expected
    assert json.loads(empty) == []
    assert nothing is None


@pytest.mark.slow
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_rl_f4_shows_packed_floats(values: list[float]) -> None:
    assert json.loads(rl_f4(struct.pack(f"<{len(values)}f", *values)) or "") == values


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_rl_i4_shows_packed_ids(values: list[int]) -> None:
    assert json.loads(rl_i4(struct.pack(f"<{len(values)}i", *values)) or "") == values


def test_run_query_numbers_columns_of_same_name(asked: Settings) -> None:
    assert run_query(asked, "SELECT 1 AS a, 2 AS a, 3 AS a_2, 4 AS a")[0] == ["a", "a_2", "a_2_2", "a_3"]


def test_run_query_refuses_lone_surrogate(asked: Settings) -> None:
    with pytest.raises(ConfigError, match="surrogate"):
        run_query(asked, "SELECT '\udcff'")


def test_run_query_reads_database_in_readonly_folder(sqlite: Database, short_folder: Path) -> None:
    sqlite.close()
    shutil.copy(str(sqlite.url.database), short_folder / "sealed.db")
    short_folder.chmod(0o555)
    code = "import os, pathlib, sys\nfrom agentrl.workflow.sql.readonly import open_sqlite\n"
    code += "os.getuid() or os.setuid(65534)  # nothing is sealed for root\n"
    code += "rows = open_sqlite(pathlib.Path(sys.argv[1]), 1.0).execute('SELECT * FROM v_runs')  # as this process's user\n"
    code += "print(rows.description[0][0])"
    words = [sys.executable, "-c", code, str(short_folder / "sealed.db")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "id\n", done.stderr


def test_run_query_refuses_invalid_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("This is no database.\n" * 1000)
    for file in (tmp_path / "text.db", tmp_path):
        with pytest.raises(ServiceError, match="cannot be read"):
            run_query(Settings(database_url=f"sqlite:///{file}"), "SELECT * FROM v_runs")
