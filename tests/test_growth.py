"""What is read of a grown database reads what it shows: no table that grows is read whole, and no list reads a blob."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError
from stored import CALL, claim, sampled, start, submission

from tests.benchmarks import reads, synthetic
from tests.benchmarks.synthetic import Run
from workflow import db
from workflow.store import observe, steps
from workflow.store.connect import Database
from workflow.store.prepared import Prepared
from workflow.views import VIEWS

GROWING = {"episodes", "steps", "step_tokens", "tool_calls", "tool_sessions", "rewards", "consumptions"}
EPISODES = 1000
IDS = "SELECT id FROM v_episodes"


@pytest.fixture
def grown(database: Database) -> tuple[Database, list[Run]]:
    """One hundredth of what `make bench` reads."""
    with database.engine.begin() as tx:
        runs = synthetic.fill(tx, EPISODES)
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        synthetic.settle(connection)
    return database, runs


def test_a_page_of_episodes_is_the_part_of_the_view_that_meets_the_filters(grown: tuple[Database, list[Run]]) -> None:
    database, _ = grown
    everything = observe.list_episodes(database, "large", {}, EPISODES)
    with database.read() as tx:
        assert [row["id"] for row in everything] == sorted(tx.execute(text(f"{IDS} WHERE run = 'large'")).scalars())
    for filters in reads.FILTERS:
        chosen = [row for row in everything if all(meets(row, name, value) for name, value in filters.items())]
        assert observe.list_episodes(database, "large", filters, 7) == chosen[:7], filters
        assert observe.list_episodes(database, "large", filters, EPISODES, 2) == chosen[2:], filters


def meets(row: observe.Row, name: str, value: Any) -> bool:
    if name == "min_reward":
        return row["reward"] is not None and row["reward"] >= value
    if name == "max_reward":
        return row["reward"] is not None and row["reward"] <= value
    return bool(row[name] >= value if name == "tool_errors" else row[name] == value)


def test_every_view_of_a_grown_database_shows_its_runs(grown: tuple[Database, list[Run]]) -> None:
    database, runs = grown
    views = {name: read for name, read in reads.reads(runs, EPISODES).items() if ": v_" in name}
    assert len(views) == len(runs) * (2 * len(VIEWS) - len(reads.WITHOUT_IDS))
    assert [name for name, read in views.items() if not read(database)] == []


def test_nothing_that_is_listed_reads_a_growing_table_whole_or_a_blob(sqlite: Database) -> None:
    with sqlite.engine.begin() as tx:
        runs = synthetic.fill(tx, EPISODES)
    for name, queries in statements(sqlite, reads.reads(runs, EPISODES)).items():
        for plan in (step for query, values in queries for step in plan_of(sqlite, query, values)):
            scanned = re.match(r"SCAN (\w+)(?! USING .*INDEX)", plan)
            assert scanned is None or aliased(scanned[1], queries) not in GROWING, (name, plan)
        if not name.startswith("find_episode"):
            assert not any("step_tokens" in query for query, _ in queries), name


def statements(database: Database, wanted: dict[str, reads.Read]) -> dict[str, list[tuple[str, object]]]:
    """What each of them asks the database."""
    asked: dict[str, list[tuple[str, object]]] = {}
    for name, read in wanted.items():
        queries = asked.setdefault(name, [])

        def note(connection, cursor, statement, parameters, context, many, queries=queries):  # type: ignore[no-untyped-def]
            queries.append((statement, parameters))

        event.listen(database.engine, "before_cursor_execute", note)
        read(database)
        event.remove(database.engine, "before_cursor_execute", note)
    return asked


def plan_of(database: Database, query: str, values: object) -> Iterator[str]:
    """SQLite's plan, a line for each table."""
    with database.read() as tx:
        yield from (row.detail for row in tx.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values))  # type: ignore[arg-type]


def aliased(name: str, queries: list[tuple[str, object]]) -> str:
    """The table that the plan calls so."""
    texts = " ".join([*(query for query, _ in queries), *VIEWS.values()])
    found = set(re.findall(rf"(?:FROM|JOIN)\s+(\w+)(?: AS)? {name}\b", texts)) & GROWING
    return found.pop() if found else name


def test_a_runs_newest_rows_are_one_range_of_an_index_on_postgres(postgres: Database) -> None:
    with postgres.engine.begin() as tx:
        synthetic.fill(tx, 4 * EPISODES)
    with postgres.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        synthetic.settle(connection)
    for view, index in {"v_steps": "ix_steps_run", "v_tool_calls": "ix_tool_calls_run", "v_rewards": "ix_rewards_run"}.items():
        with postgres.read() as tx:
            query = f"EXPLAIN SELECT * FROM {view} WHERE run = 'old' ORDER BY id DESC LIMIT 50"
            assert index in "\n".join(tx.execute(text(query)).scalars()), view


def test_a_prepared_statement_fails_as_any_other_does(database: Database) -> None:
    twice = Prepared(db.events.insert().inline())
    with pytest.raises(IntegrityError), database.engine.begin() as tx:
        twice.run(tx, {"id": 1, "kind": "first"}, {"id": 1, "kind": "second"})
    with database.read() as tx:
        assert tx.execute(text("SELECT count(*) FROM events")).scalar_one() == 0


def test_steps_and_calls_carry_the_name_of_their_run(database: Database) -> None:
    work = claim(database, start(database, submission())[0])
    steps.commit_sampled(database, work.fence, [sampled(work, calls=(CALL,)), sampled(work, 1)])
    with database.read() as tx:
        assert tx.execute(text("SELECT run FROM steps UNION ALL SELECT run FROM tool_calls")).scalars().all() == ["first"] * 3
