"""The databases that tests use in turn: each equals a fresh one when it is lent."""

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url, text

from agentrl.workflow.store.migrate import open_database
from tests.support.played_runs import claim, start, submission
from tests.support.postgres_pool import SMALL_TABLE_BYTES, PostgresPool


@pytest.fixture
def pool(postgres_server: Engine, migrated_name: str) -> Iterator[PostgresPool]:
    """A pool that no other test has used."""
    pool = PostgresPool(postgres_server, migrated_name)
    yield pool
    pool.close()


def dump(url: str) -> str:
    """Return what pg_dump writes: schema, rights, settings, rows and the next value of each sequence."""
    programs = query_value(url, "SELECT setting FROM pg_config WHERE name = 'BINDIR'")
    plain_url = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    lines = subprocess.run([f"{programs}/pg_dump", "--create", plain_url], check=True, capture_output=True, text=True).stdout
    return "".join(line for line in lines.splitlines(keepends=True) if not line.startswith(("\\restrict", "\\unrestrict")))


def execute(url: str, statement: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(statement))
    engine.dispose()


def query_value(url: str, query: str) -> Any:
    engine = create_engine(url)
    with engine.connect() as connection:
        value = connection.execute(text(query)).scalar_one()
    engine.dispose()
    return value


def fill(url: str, tasks: int) -> None:
    """Write rows into most tables."""
    database = open_database(url)
    claim(database, start(database, submission(tasks=tasks))[0])
    database.close()


@pytest.mark.parametrize("tasks", [2, 2000])
def test_pool_lends_filled_database_as_a_fresh_one(pool: PostgresPool, tasks: int) -> None:
    """Few rows are deleted, many truncated."""
    with pool.lend() as url:
        fresh = dump(url)
        fill(url, tasks)
        size = query_value(url, "SELECT pg_relation_size('tasks')")
        assert dump(url) != fresh
    assert (size > SMALL_TABLE_BYTES) == (tasks == 2000)
    with pool.lend() as again:
        assert again == url
        assert dump(again) == fresh


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TABLE other (id integer)",
        "DROP VIEW v_iterations CASCADE",
        "CREATE FUNCTION other() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
        "CREATE INDEX other ON runs (name)",
        "ALTER TABLE runs ADD COLUMN other integer",
        "ALTER TABLE runs DISABLE TRIGGER ALL",
        "ALTER SEQUENCE runs_id_seq INCREMENT 2",
        "GRANT SELECT ON runs TO PUBLIC",
        "REVOKE USAGE ON SCHEMA public FROM PUBLIC",
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET work_mem = 64', current_database()); END $$",
        "UPDATE alembic_version SET version_num = '9999'",
        "ANALYZE pg_class",
    ],
)
def test_pool_drops_database_that_changed_in_more_than_rows(pool: PostgresPool, change: str) -> None:
    with pool.lend() as url:
        execute(url, change)
    with pool.lend() as other:
        assert other != url


def test_pool_ends_sessions_and_their_locks(pool: PostgresPool) -> None:
    with pool.lend() as url:
        engine = create_engine(url)
        left_open = engine.connect()
        left_open.execute(text("SELECT pg_advisory_lock(1), set_config('search_path', 'nowhere', false)"))
        left_open.execute(text("LOCK TABLE public.runs"))
    with pool.lend() as again:
        assert again == url
        execute(again, "SET lock_timeout = '1s'; SELECT pg_advisory_lock(1), count(*) FROM runs")
    left_open.invalidate()
    left_open.close()
    engine.dispose()
