"""Migrations make exactly the tables of `tables.schema`, with their checks, triggers and views, on both databases."""

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import CheckConstraint, Engine, create_engine, inspect, text
from sqlalchemy.exc import ProgrammingError

from agentrl.workflow.errors import ConfigError, ServiceError
from agentrl.workflow.stats.evaluation import evaluate
from agentrl.workflow.store import planning, steps, tool_calls, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import current, downgrade, head, open_database, upgrade
from agentrl.workflow.store.reads import episode_rows
from agentrl.workflow.store.steps import CallRecord
from agentrl.workflow.tables import schema, views
from agentrl.workflow.trajectory import ROOT, Message, messages_of
from tests.store.test_agent_steps import ASKED, MADE, TOOLS, answer, begun, commit, turn
from tests.support.played_runs import CALL, answered, claim, ready, sampled, start, submission, values

UPGRADE = "import sys; from agentrl.workflow.store import connect, migrate; migrate.upgrade(connect.Database(sys.argv[1]))"


def test_the_migrations_make_what_the_rows_declare(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
    assert current(database) == head()


def test_every_check_constraint_is_in_the_database(database: Database) -> None:
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


def test_every_view_and_trigger_is_in_the_database(database: Database) -> None:
    assert set(inspect(database.engine).get_view_names()) == set(views.VIEWS)
    query = "SELECT name FROM sqlite_master WHERE type = 'trigger'" if database.is_sqlite else "SELECT tgname FROM pg_trigger"
    with database.read() as tx:
        triggers = set(tx.execute(text(query)).scalars())
    assert {f"guard_{table}" for table in views.FINAL_STATUSES} <= triggers


@pytest.mark.slow
def test_a_downgrade_to_base_leaves_nothing_and_can_be_upgraded_again(database: Database) -> None:
    downgrade(database, "base")
    found = inspect(database.engine)
    assert found.get_view_names() == []
    assert found.get_table_names() == ["alembic_version"]
    assert current(database) is None
    upgrade(database)
    assert current(database) == head()


def test_an_upgrade_of_an_up_to_date_database_keeps_its_rows(database: Database) -> None:
    with database.engine.begin() as tx:
        tx.execute(schema.events.insert().values(kind="kept"))
    upgrade(database)
    with database.read() as tx:
        assert tx.execute(text("SELECT kind FROM events")).scalars().all() == ["kept"]


def test_calls_of_an_older_database_are_kept_and_count_as_sent_once(database: Database) -> None:
    work = claim(database, start(database, submission())[0])
    refused = CallRecord(CALL.call, "none", answered("no", "too_many_calls"))
    ((call, *_),) = steps.commit_sampled(database, work.fence, [sampled(work, calls=(CALL, CALL, refused))])
    tool_calls.record_result(database, call, answered("42"), datetime.now(UTC), "tools:1")
    downgrade(database, "0003")
    upgrade(database)
    kept = "SELECT tool || ' ' || coalesce(result, '') || ' ' || attempts FROM v_tool_calls ORDER BY call"
    assert values(database, kept) == ["calculator 42 1", "calculator  1", "calculator no 0"]


def test_steps_of_an_older_database_continue_the_one_before_unless_they_began_a_row(database: Database) -> None:
    work = claim(database, start(database, submission())[0])
    first, second = sorted(episode.id for episode in work.episodes)[:2]
    records = [replace(sampled(work), episode=number) for number in (first, second)]
    steps.commit_sampled(database, work.fence, records)
    downgrade(database, "0008")
    with database.engine.begin() as tx:
        tx.execute(text(f"UPDATE steps SET number = 3 WHERE episode_id = {first}"))
        tx.execute(text(f"UPDATE steps SET number = 2, new_row = 'the template' WHERE episode_id = {second}"))
    upgrade(database)
    kept = "SELECT step || ' ' || coalesce(parent_step, -1) || ' ' || chain FROM v_steps WHERE delivered ORDER BY step"
    assert values(database, kept) == ["2 -1 0", "3 2 0"]


def test_chains_taken_back_are_rows_of_tokens_with_all_of_their_prompts(database: Database) -> None:
    work = begun(database)
    asked = Message("user", "and 6*8?")
    whole = turn((*ASKED, Message("assistant", "41"), asked), (), prompt_ids=(7,), parent=0, shared=2, new_row="edited history")
    commit(
        database,
        work,
        answer(work, "a", turn(calls=(MADE,)), (MADE,)),
        replace(answer(work, "b", whole), shared_messages=2, tools=TOOLS),
        answer(work, "c", turn([asked], parent=0), shown={(0, 0): "42"}),
        answer(work, "d", turn([asked], parent=1)),
        answer(work, "e", turn([asked], parent=1, delivered=False)),
    )
    before = episode_rows.find_episode(database, work.episodes[0].id).episode
    assert {step.chain for step in before.steps} == {0, 1, 2}
    downgrade(database, "0008")
    upgrade(database)
    after = episode_rows.find_episode(database, work.episodes[0].id).episode
    assert [after.tokens_of(n) for n in range(5)] == [before.tokens_of(n) for n in range(5)]
    assert [messages_of(after.steps, n) for n in range(5)] == [messages_of(before.steps, n) for n in range(5)]
    assert [step.parent for step in after.steps] == [ROOT, ROOT, ROOT, ROOT, ROOT]
    assert {step.chain for step in after.steps} == {0}
    assert after.steps[1].new_row == "edited history"
    assert values(database, "SELECT kind || status FROM tool_calls") == ["calldone"]
    assert values(database, "SELECT count(*) FROM request_options") == [0]


@pytest.mark.parametrize(("status", "kept"), [("running", "cancelled"), ("done", "done")])
def test_a_served_run_taken_back_is_an_evaluation_that_is_over(database: Database, status: str, kept: str) -> None:
    work = begun(database)
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE runs SET kind = 'serve'"))
        tx.execute(text("UPDATE groups SET kind = 'serve'"))
        tx.execute(
            text(
                "INSERT INTO agent_attempts (episode_id, attempt, run, status, key_hash) "
                "VALUES (:episode, 0, 'a', 'running', 'of its key')"
            ),
            {"episode": work.episodes[0].id},
        )
        tx.execute(text("UPDATE runs SET status = :status"), {"status": status})
    downgrade(database, "0008")
    upgrade(database)
    assert values(database, "SELECT kind || ' ' || status FROM runs") == [f"eval {kept}"]
    assert values(database, "SELECT DISTINCT kind || ' ' || status FROM groups") == ["eval cancelled"]
    assert values(database, "SELECT DISTINCT status FROM episodes") == ["cancelled"]
    assert values(database, "SELECT count(*) FROM agent_attempts") == [0]


def test_of_an_older_evaluation_nothing_tells_whose_its_interval_is(database: Database) -> None:
    work = ready(database, submission(kind="eval"))
    train_commits.finish_eval(database, work, evaluate(work.groups))
    kept = "SELECT mean_reward || ' ' || coalesce(interval_by, 'unknown') FROM v_evals"
    (before,) = values(database, kept)
    downgrade(database, "0005")
    upgrade(database)
    assert before.endswith(" Wilson")
    assert values(database, kept) == [before.replace("Wilson", "unknown")]


def test_what_an_older_database_says_of_iterations_is_counted_as_the_views_count(database: Database) -> None:
    planning.submit(database, submission())
    downgrade(database, "0007")
    told = [
        ("sampling_on", "iteration 0", "1 of 2 groups have variance"),
        ("update_failed", "iteration 9", "iteration 3: it broke"),
        ("failed", "", "iteration 9: iteration 9: it broke"),
        ("worker_lost", "far:7", "its lease on iteration 10 ran out, and was not handed back"),
        ("note", "iteration 0", "iteration 0: somebody's own"),
    ]
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE runs SET status = 'paused', reason = 'iteration 0: only 1 of 4 episodes can train'"))
        tx.execute(schema.events.insert(), [{"kind": kind, "subject": on, "detail": said} for kind, on, said in told])
    upgrade(database)
    assert values(database, "SELECT iteration || ' ' || epoch || ' ' || reason FROM v_iterations, v_runs") == [
        "1 1 iteration 1: only 1 of 4 episodes can train"
    ]
    events = "SELECT subject || '; ' || detail FROM events WHERE kind <> 'submitted' ORDER BY id"
    assert values(database, events) == [
        "iteration 1; 1 of 2 groups have variance",
        "iteration 10; iteration 3: it broke",
        "; iteration 10: iteration 9: it broke",
        "far:7; its lease on iteration 11 ran out, and was not handed back",
        "iteration 0; iteration 0: somebody's own",
    ]
    downgrade(database, "0007")
    assert values(database, events) == [f"{on}; {said}" for _, on, said in told]


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{request.getfixturevalue('tmp_path') / 'new' / 'agentrl.db'}"
    url: str = request.getfixturevalue("empty_postgres")
    return url


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_six_processes_may_upgrade_at_once(empty_url: str) -> None:
    started = [subprocess.Popen([sys.executable, "-c", UPGRADE, empty_url], stderr=subprocess.PIPE) for _ in range(6)]
    ended = [(process.communicate()[1], process.returncode) for process in started]
    assert [code for _, code in ended] == [0] * 6, ended
    database = Database(empty_url)
    assert current(database) == head()
    database.close()


def test_sqlite_is_upgraded_by_whoever_opens_it(sqlite: Database) -> None:
    assert current(sqlite) == head()


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_postgres_that_cannot_keep_every_text_is_refused_with_the_command_to_type(
    postgres_server: Engine, encoding: str
) -> None:
    with postgres_server.connect() as connection:
        connection.execute(text("DROP DATABASE IF EXISTS narrow"))
        connection.execute(text(f"CREATE DATABASE narrow ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"))
    url = postgres_server.url.set(database="narrow").render_as_string(hide_password=False)
    with pytest.raises(ConfigError, match=f"'narrow' is kept in {encoding}, .* CREATE DATABASE narrow_utf8 ENCODING 'UTF8'"):
        open_database(url)


def test_a_postgres_that_was_not_migrated_is_refused_with_the_command_to_type(empty_postgres: str) -> None:
    with pytest.raises(ServiceError, match="agentrl db upgrade"):
        open_database(empty_postgres)


def test_the_reader_role_may_select_from_views_and_not_write(postgres: Database) -> None:
    reader = create_engine(postgres.url.set(username="agentrl_reader"))
    with reader.connect() as connection:
        for name in [*schema.TABLES_FOR_READERS, *views.VIEWS]:
            assert connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() == 0
        for statement in ("INSERT INTO events (kind) VALUES ('x')", "SELECT * FROM service_leases"):
            with pytest.raises(ProgrammingError, match="permission denied"):
                connection.execute(text(statement))
            connection.rollback()
    reader.dispose()


def test_a_database_of_a_newer_agentrl_is_left_alone(database: Database) -> None:
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ServiceError, match=f"newer agentrl .* 9999; known here: {head()}"):
        open_database(database.url.render_as_string(hide_password=False))
    assert current(database) == "9999"
