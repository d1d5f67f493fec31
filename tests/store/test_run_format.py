"""A store of an older agentrl with an interrupted run: it is upgraded, every read works, and its runs cannot be resumed.

The two dumps are of one store at revision 0012, made by agentrl at commit 18ff0d1: the run `finished`, and `broken-off`, whose
workers were killed in its seventh iteration.
"""

import lzma
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, text

from agentrl.workers.stack.process import database as process_database
from agentrl.workflow.settings import settings
from agentrl.workflow.store import agent_attempts, agent_holds, rollout_claims, train_claims
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import head, upgrade
from agentrl.workflow.store.run_format import RUN_FORMAT
from agentrl.workflow.tables import schema
from tests.conftest import forget_process
from tests.support.agents_stage import group_of
from tests.support.played_runs import LEASE, claim, play, start, submission, values
from tests.support.typed import agentrl

DUMP = Path(__file__).with_name("older_store.sql.xz")
POSTGRES_DUMP = Path(__file__).with_name("older_store_postgres.sql.xz")
REFUSAL = re.compile(
    rf"Run '[a-z-]+' has format 2\. This agentrl can (\w+) only runs of format {RUN_FORMAT}\. Use agentrl at commit "
    r"[0-9a-f]{7}, on a copy of the store from before its upgrade\.\n"
    r"  To read the run with this agentrl: agentrl episodes [a-z-]+\n"
)


@pytest.fixture(params=["sqlite", "postgres"])
def older(home: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """The upgraded store, which the settings name."""
    home.mkdir()
    if request.param == "sqlite":
        with closing(sqlite3.connect(home / "agentrl.db")) as connection:
            connection.executescript(script(DUMP, home))
    else:
        url = request.getfixturevalue("empty_postgres")
        monkeypatch.setenv("AGENTRL_DATABASE_URL", url)
        engine = create_engine(url)
        with engine.begin() as tx:
            tx.exec_driver_sql(script(POSTGRES_DUMP, home).replace("%", "%%"))
        engine.dispose()
    forget_process()
    database = Database(settings().database)
    upgrade(database)
    yield database
    database.close()
    if process_database.made:
        process_database().close()
    forget_process()


def script(dump: Path, home: Path) -> str:
    """Return the statements of a dump whose folder is `home`."""
    return lzma.decompress(dump.read_bytes()).decode().replace("@HERE@", str(home))


def test_upgrade_of_an_older_store_makes_the_declared_tables(older: Database) -> None:
    with older.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []


def test_upgrade_keeps_all_rows_and_pauses_running_runs(older: Database) -> None:
    assert values(older, "SELECT version_num FROM alembic_version") == [head()]
    runs = "SELECT name || ' ' || status || ' ' || format FROM runs ORDER BY id"
    assert values(older, runs) == ["finished done 2", "broken-off paused 2"]
    counts = [values(older, f"SELECT count(*) FROM {table}")[0] for table in ("episodes", "steps", "tool_calls", "iterations")]
    with closing(sqlite3.connect(":memory:")) as before:
        before.executescript(lzma.decompress(DUMP.read_bytes()).decode())
        tables = ("episodes", "steps", "tool_calls", "iterations")
        assert counts == [before.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]
    assert values(older, "SELECT count(*) FROM runs WHERE status = 'running'") == [0]


def test_reads_work_on_an_older_store(older: Database, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ("runs",), ("watch", "broken-off"), ("episodes", "broken-off"), ("replay", "1"), ("why", "1"),
        ("events", "broken-off"), ("replay", "1", "--diff", "2"), ("config", "show", "finished"),
        ("sql", "SELECT * FROM v_runs"), ("sql", "SELECT * FROM v_steps"), ("sql", "SELECT * FROM v_ledger"),
    ):  # fmt: skip
        shown, _ = agentrl(capsys, *words, code=1 if words[0] == "watch" or "--diff" in words else 0)
        assert shown.strip(), words


def test_resume_of_older_run_names_commit_to_use(older: Database, capsys: pytest.CaptureFixture[str]) -> None:
    before = values(older, "SELECT count(*) FROM events")
    for verb, words in (
        ("resume", ("resume", "broken-off")),
        ("resume", ("resume", "finished", "--iterations", "1")),
        ("fork", ("fork", "1", "--step", "0")),
        ("rescore", ("rescore", "finished", "--reward", "numeric_answer")),
        ("verify", ("replay", "1", "--verify", "all")),
    ):
        shown, told = agentrl(capsys, *words, code=6)
        found = REFUSAL.fullmatch(told.removeprefix("agentrl: "))
        assert found, told
        assert (found[1], shown) == (verb, "")
    assert values(older, "SELECT count(*) FROM events") == before
    assert values(older, "SELECT status FROM runs ORDER BY id") == ["done", "paused"]


def test_new_runs_have_run_format(database: Database) -> None:
    start(database, submission())
    assert values(database, "SELECT format FROM runs") == [RUN_FORMAT]


def test_worker_leaves_runs_of_another_format(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    groups = start(database, submission(database.engine.dialect.name))  # each name is told once per process
    set_format(database, RUN_FORMAT + 1)
    for group in groups * 2:
        assert rollout_claims.claim_group(database, group, "a", LEASE) is None
    told = [record.getMessage() for record in caplog.records if "has format" in record.getMessage()]
    assert len(told) == 1
    assert "restart it with the agentrl that submitted the run" in told[0]
    set_format(database, RUN_FORMAT)
    for group in groups:
        play(database, group)
    iteration = values(database, "SELECT id FROM iterations")[0]
    set_format(database, RUN_FORMAT + 1)
    assert train_claims.claim_iteration(database, iteration, "a", LEASE) is None
    set_format(database, RUN_FORMAT)
    assert train_claims.claim_iteration(database, iteration, "a", LEASE) is not None


def test_agents_worker_leaves_runs_of_another_format(database: Database) -> None:
    work = claim(database, group_of(database))
    episode = work.episodes[0].id
    agent_holds.open_attempts(database, work.fence, [episode])
    set_format(database, RUN_FORMAT + 1)
    assert agent_attempts.claim_agent(database, episode, 0, "a:1/x", "0" * 64, LEASE) is None
    set_format(database, RUN_FORMAT)
    assert agent_attempts.claim_agent(database, episode, 0, "a:1/x", "0" * 64, LEASE) is not None


def set_format(database: Database, number: int) -> None:
    """Give all runs the format, as another version of agentrl would."""
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE runs SET format = :number"), {"number": number})
