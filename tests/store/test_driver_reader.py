"""What only looks: a listing by the driver alone says what the whole database says, and loads nothing else."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import JSON, Boolean, Column, Float, Integer, LargeBinary, MetaData, String, Table, make_url, null, text

from agentrl import migrations
from agentrl.cli.commands import COMMANDS
from agentrl.workers.page.export import write_export
from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.settings import settings
from agentrl.workflow.store import epoch_ends, run_names
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.driver_reader import (
    DriverTransaction,
    Reader,
    newest_revision,
    postgres_parts,
    select_rows,
    sqlite_path,
)
from agentrl.workflow.store.migrate import downgrade, head, open_database
from agentrl.workflow.store.reads import episode_rows, eval_results, event_rows, iteration_rows, ledger, run_rows
from agentrl.workflow.store.reads.paging import Paging
from agentrl.workflow.tables.column_kinds import DOCUMENTS, FLAGS, MOMENTS
from agentrl.workflow.tables.columns import Utc
from agentrl.workflow.tables.schema import metadata
from tests.cli.test_cli import LOADED, data, run  # noqa: F401 - fixtures

HEAVY = {"torch", "transformers", "celery", "kombu", "redis", "alembic", "sqlalchemy", "psycopg", "rich", "numpy", "mako"}


MAY_BE_EMPTY = {"list_evals", "sampled_on", "most_frequent_failure", "policy_at"}


def reader(database: Database) -> Reader:
    """One that the driver must suffice for."""

    def refuse() -> Database:
        raise AssertionError("the whole database was opened")

    return Reader(database.url.render_as_string(hide_password=False), refuse)


LISTS: dict[str, Callable[[Any], object]] = {
    "list_runs": lambda db: run_rows.list_runs(db).rows,
    "describe_run": lambda db: run_rows.describe_run(db, "by-hand"),
    "by number": lambda db: run_rows.describe_run(db, "1"),
    "list_iterations": lambda db: iteration_rows.list_iterations(db, iteration_rows.IterationFilter("by-hand")).rows,
    "list_evals": lambda db: eval_results.list_evals(db, eval_results.EvalFilter("by-hand")).rows,
    "progress": lambda db: run_rows.count_progress(db, "by-hand"),
    "sampled_on": lambda db: run_rows.why_sampling_on(db, "by-hand"),
    "most_frequent_failure": lambda db: run_rows.find_most_frequent_failure(db, "by-hand"),
    "list_episodes": lambda db: (
        episode_rows.list_episodes(db, episode_rows.EpisodeFilter("by-hand", min_reward=1.0, task="train/1"), Paging(7)).rows
    ),
    "list_events": lambda db: event_rows.list_events(db, event_rows.EventFilter("by-hand")).rows,
    "find_episode": lambda db: episode_rows.find_episode(db, 1),
    "why": lambda db: ledger.explain_fate(db, 1),
    "find_run": lambda db: run_names.find_run(db, "by-hand"),
    "newest policy": lambda db: run_names.find_policy(db, "by-hand", None),
    "policy by epoch": lambda db: run_names.find_stored_policy(db, "1", epoch_ends.Epoch(1)),
    "policy_at": lambda db: run_names.find_policy_at(db, run_names.find_policy(db, "by-hand", None)["path"]),
    "ends": lambda db: epoch_ends.load_epoch_ends(db, 1),
    "measured_tasks": lambda db: eval_results.load_measured_tasks(db, 1),
    "task_means": lambda db: eval_results.load_task_means(db, 1),
    "done_episodes": lambda db: eval_results.load_done_episodes(db, 1),
    "right_episodes": lambda db: eval_results.find_right_episodes(db, 1),
}


def test_driver_reader_reads_what_database_reads(data: Database, run: str) -> None:  # noqa: F811
    for name, query in LISTS.items():
        found = query(reader(data))
        assert repr(found) == repr(query(data)), name
        assert found or name in MAY_BE_EMPTY, name


SAMPLES: dict[type, Any] = {
    Boolean: True, Integer: 7, Float: 0.5, String: "x", LargeBinary: b"\0x", JSON: {"a": [1, None]},
    Utc: datetime(2026, 1, 2, 3, 4, 5, 678_900, UTC),
}  # fmt: skip
"""Type of a column -> a value of it."""


def test_select_rows_reads_every_column_of_the_tables(database: Database) -> None:
    """A table has each column that any table has, with its name and type, so that a new one is tested as well."""
    columns = {column.name: column for table in metadata.tables.values() for column in table.columns}
    samples = Table("samples", MetaData(), *(Column(name, column.type) for name, column in columns.items()))
    row = {name: next(SAMPLES[kind] for kind in SAMPLES if isinstance(column.type, kind)) for name, column in columns.items()}
    nulls: dict[str, Any] = {name: null() for name in columns}
    with database.engine.begin() as tx:
        samples.create(tx)
        tx.execute(samples.insert(), row)
        tx.execute(samples.insert().values(nulls))
    for source in (database, reader(database)):
        full, nothing = source.ask(lambda tx: select_rows(tx, "SELECT * FROM samples"))
        assert {name: bytes(value) if isinstance(value, memoryview) else value for name, value in full.items()} == row
        assert {name: type(value) for name, value in full.items() if type(row[name]) is bool} == dict.fromkeys(FLAGS, bool)
        assert set(nothing.values()) == {None}


TYPED = {16: FLAGS, 114: DOCUMENTS, 1184: MOMENTS}
"""Postgres' number of a type that SQLite has not -> the names of columns of that type."""


@pytest.mark.parametrize("data", ["postgres"], indirect=True)
def test_result_columns_of_a_type_have_a_declared_name(
    data: Database,  # noqa: F811
    run: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Postgres knows the type of each result column; SQLite's is found by the column's name."""
    queries: set[str] = set()
    rows = DriverTransaction.rows

    def checked(tx: Any, query: str, parameters: Any) -> Any:
        queries.add(query)
        cursor = tx._connection.execute(tx.text(query), parameters)
        for column in cursor.description:
            for number, names in TYPED.items():
                assert (column.type_code == number) == (column.name in names), (column.name, query)
        return rows(tx, query, parameters)

    monkeypatch.setattr(DriverTransaction, "rows", checked)
    for query in LISTS.values():
        query(reader(data))
    write_export(ReadOnlyStore(settings()), "by-hand", tmp_path / "first.html", [], 20_000_000)
    assert len(queries) > 80


@pytest.mark.parametrize("data", ["postgres"], indirect=True)
def test_driver_reader_times_are_in_utc(data: Database, run: str) -> None:  # noqa: F811
    before = run_rows.describe_run(data, "by-hand")["created_at"]
    with data.engine.begin() as tx:
        tx.execute(text(f"ALTER DATABASE {data.url.database} SET timezone TO 'Asia/Tokyo'"))
    data.engine.dispose()
    for database in (data, reader(data)):
        told = run_rows.describe_run(database, "by-hand")["created_at"]
        assert (told, told.tzinfo) == (before, UTC)


def test_driver_reader_finds_no_missing_row(data: Database, run: str) -> None:  # noqa: F811
    for database in (data, reader(data)):
        with pytest.raises(NotFoundError, match="no run 'nobody'"):
            run_rows.describe_run(database, "nobody")
        with pytest.raises(NotFoundError, match="no episode 99"):
            episode_rows.find_episode(database, 99)


def test_driver_reader_leaves_old_revision_to_upgrade(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'old.db'}"
    old = open_database(url)
    downgrade(old, "0012")
    old.close()
    opened: list[Database] = []

    def whole() -> Database:
        opened.append(open_database(url))
        return opened[0]

    asked = Reader(url, whole)
    assert run_rows.list_runs(asked).rows == ()
    assert run_rows.list_runs(asked).rows == ()
    assert len(opened) == 1
    opened[0].close()
    assert run_rows.list_runs(Reader(url, lambda: pytest.fail("it is upgraded"))).rows == ()


def test_read_is_part_of_given_transaction(data: Database, run: str) -> None:  # noqa: F811
    with data.engine.begin() as tx:
        tx.execute(text("UPDATE runs SET reason = 'seen inside'"))
        assert run_names.find_run(tx, "by-hand", "reason") == {"reason": "seen inside"}
        assert run_names.find_run(data, "by-hand", "reason") == {"reason": ""}
        tx.rollback()
    for source in (data, reader(data)):
        assert source.ask(lambda tx: run_names.find_run(tx, "by-hand")) == run_names.find_run(data, "by-hand")


def test_driver_reader_newest_revision_is_migrations_head() -> None:
    script = ScriptDirectory(str(Path(str(migrations.__file__)).parent))
    assert newest_revision() == head() == script.get_current_head()


NAMES = st.text(alphabet="abcXYZ019_-./%20 @:?#&=[]é", min_size=1, max_size=12)


@given(NAMES)
def test_driver_reader_parses_sqlite_url_like_sqlalchemy(path: str) -> None:
    url = f"sqlite:///{path}"
    found = sqlite_path(url)
    assert found is None or str(found) == str(Path(str(make_url(url).database)))


@given(NAMES, NAMES, NAMES, st.sampled_from(["", "?host=/tmp/pg", "?host=%2Ftmp%2Fpg&port=7", "?sslmode=require"]))
def test_driver_reader_parses_postgres_url_like_sqlalchemy(user: str, word: str, host: str, more: str) -> None:
    for url in (f"postgresql://{user}:{word}@{host}:5432/some{more}", f"postgresql+psycopg://{user}@{host}/some{more}"):
        parts = postgres_parts(url)
        if parts:
            known = make_url(url)
            wanted = {**known.translate_connect_args(username="user", database="dbname"), **known.query}
            assert parts == {key: str(value) for key, value in wanted.items() if value not in ("", None)} or "host" in more


def _loaded(words: list[str], **environment: str) -> set[str]:
    done = _python([LOADED, *words], **environment)
    return set(done.rpartition("|")[2].split())


def _python(words: list[str], **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", *words],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False,
    ).stdout  # fmt: skip


READING = [
    "runs", "runs --json", "episodes by-hand", "replay 1", "why 1", "events by-hand", "sql SELECT(1)", "config show", "tools",
]  # fmt: skip

LOADED_AFTER_EACH = """
import contextlib, io, json, sys
from agentrl.cli.main import main
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        main(command.split())
    print(json.dumps([command, output.getvalue(), sorted(sys.modules)]))
"""


def test_reading_commands_load_neither_sqlalchemy_nor_broker(run: str) -> None:  # noqa: F811
    """One process runs them one after the other: what one loads is there after the others too."""
    answers = [json.loads(line) for line in _python([LOADED_AFTER_EACH, *READING]).splitlines()]
    assert [command for command, _, _ in answers] == READING
    postgres = "postgresql" in settings().database
    for command, output, modules in answers:
        assert not HEAVY.intersection(modules) - ({"psycopg", "sqlalchemy"} if postgres or command == "tools" else set()), (
            command
        )
        assert output.strip(), command


def test_import_contract_names_every_reading_command() -> None:
    contract = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert not [entry.where for entry in COMMANDS.values() if f'"{entry.where.partition(":")[0]}"' not in contract]


@pytest.mark.parametrize("words", ["--help", "submit --help", "--version"])
def test_help_imports_only_its_command(tmp_path: Path, words: str) -> None:
    modules = _loaded(words.split(), AGENTRL_HOME=str(tmp_path / "home"))
    assert not HEAVY & modules
    own = {entry.where.partition(":")[0] for name, entry in COMMANDS.items() if name in words}
    others = {entry.where.partition(":")[0] for entry in COMMANDS.values()} - own
    assert not others & modules
    assert "submit" in words or "pydantic" not in modules
