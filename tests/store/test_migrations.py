"""Migrations make exactly the tables of `tables.schema`, with their checks, triggers and views, on both databases."""

import subprocess
import sys

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import CheckConstraint, Engine, create_engine, inspect, text
from sqlalchemy.exc import ProgrammingError

from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import current, downgrade, head, open_database, upgrade
from agentrl.workflow.tables import create_views, schema
from agentrl.workflow.tables.views import VIEWS

UPGRADE = "import sys; from agentrl.workflow.store import connect, migrate; migrate.upgrade(connect.Database(sys.argv[1]))"


def test_migrations_make_declared_tables(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
    assert current(database) == head()


def test_migrations_make_every_check_constraint(database: Database) -> None:
    declared = {
        (table.name, str(constraint.name))
        for table in schema.metadata.tables.values()
        for constraint in table.constraints
        if isinstance(constraint, CheckConstraint)
    }
    found = inspect(database.engine)
    present = {(table, check["name"]) for table in found.get_table_names() for check in found.get_check_constraints(table)}
    assert declared <= {(table, str(name)) for table, name in present}
    assert declared


def test_migrations_make_every_view_and_trigger(database: Database) -> None:
    assert set(inspect(database.engine).get_view_names()) == set(VIEWS)
    query = "SELECT name FROM sqlite_master WHERE type = 'trigger'" if database.is_sqlite else "SELECT tgname FROM pg_trigger"
    with database.read() as tx:
        triggers = set(tx.execute(text(query)).scalars())
    assert {f"guard_{table}" for table in create_views.FINAL_STATUSES} <= triggers


@pytest.mark.slow
def test_downgrade_to_base_leaves_nothing_and_can_be_undone(database: Database) -> None:
    downgrade(database, "base")
    found = inspect(database.engine)
    assert found.get_view_names() == []
    assert found.get_table_names() == ["alembic_version"]
    assert current(database) is None
    upgrade(database)
    assert current(database) == head()


def test_upgrade_of_current_database_keeps_rows(database: Database) -> None:
    with database.engine.begin() as tx:
        tx.execute(schema.events.insert().values(kind="kept"))
    upgrade(database)
    with database.read() as tx:
        assert tx.execute(text("SELECT kind FROM events")).scalars().all() == ["kept"]


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{request.getfixturevalue('tmp_path') / 'new' / 'agentrl.db'}"
    url: str = request.getfixturevalue("empty_postgres")
    return url


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_upgrade_by_six_processes_at_once_succeeds(empty_url: str) -> None:
    started = [subprocess.Popen([sys.executable, "-c", UPGRADE, empty_url], stderr=subprocess.PIPE) for _ in range(6)]
    ended = [(process.communicate()[1], process.returncode) for process in started]
    assert [code for _, code in ended] == [0] * 6, ended
    database = Database(empty_url)
    assert current(database) == head()
    database.close()


def test_upgrade_of_sqlite_happens_on_open(sqlite: Database) -> None:
    assert current(sqlite) == head()


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_postgres_with_narrow_encoding_is_refused_with_command(postgres_server: Engine, encoding: str) -> None:
    with postgres_server.connect() as connection:
        connection.execute(text("DROP DATABASE IF EXISTS narrow"))
        connection.execute(text(f"CREATE DATABASE narrow ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"))
    url = postgres_server.url.set(database="narrow").render_as_string(hide_password=False)
    with pytest.raises(
        ConfigError, match=f"'narrow' has the encoding {encoding}, .* CREATE DATABASE narrow_utf8 ENCODING 'UTF8'"
    ):
        open_database(url)


def test_postgres_without_migrations_is_refused_with_command(empty_postgres: str) -> None:
    with pytest.raises(ServiceError, match="agentrl db upgrade"):
        open_database(empty_postgres)


def test_reader_role_selects_from_views_only(postgres: Database) -> None:
    reader = create_engine(postgres.url.set(username="agentrl_reader"))
    with reader.connect() as connection:
        for name in [*schema.TABLES_FOR_READERS, *VIEWS]:
            assert connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() == 0
        for statement in ("INSERT INTO events (kind) VALUES ('x')", "SELECT * FROM service_leases"):
            with pytest.raises(ProgrammingError, match="permission denied"):
                connection.execute(text(statement))
            connection.rollback()
    reader.dispose()


def test_database_of_newer_agentrl_is_left_alone(database: Database) -> None:
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ServiceError, match=f"newer agentrl .* 9999; known here: {head()}"):
        open_database(database.url.render_as_string(hide_password=False))
    assert current(database) == "9999"


def test_database_before_first_migration_names_commit_to_use(database: Database) -> None:
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = '0011'"))
    refusal = r"is at revision 0011, and this agentrl upgrades from 0012 on"
    with pytest.raises(ServiceError, match=refusal) as opened:
        open_database(database.url.render_as_string(hide_password=False))
    assert "commit 18ff0d1 first (`agentrl db upgrade`)" in opened.value.hint
    with pytest.raises(ServiceError, match=refusal):
        upgrade(database)
    assert current(database) == "0011"
