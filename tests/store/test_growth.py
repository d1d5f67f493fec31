"""What is read of a grown database that nobody has analysed does the work of what it shows, not of what is stored.

SQLite counts its instructions, which no busy machine moves: a page costs the same in a run of four times the iterations, a sum
over the run four times as much, and neither feels the other runs. No table that grows is read whole, no list reads a blob.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError

from agentrl.cli.main import main
from agentrl.workers.stack import process
from agentrl.workflow.store import steps, tool_calls, train_commits, vacuum
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import open_database
from agentrl.workflow.store.prepared_statements import PreparedStatement
from agentrl.workflow.store.reads import episode_rows, ledger
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter, list_episodes
from agentrl.workflow.store.reads.paging import Paging
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.create_views import view_sql
from agentrl.workflow.tables.views import VIEWS, EpisodeRow
from bench.performance import reads, synthetic
from bench.performance.databases import analyse, analysed
from bench.performance.synthetic import PER_ITERATION, Run
from tests.conftest import copy_store, forget_process
from tests.support.played_runs import CALL, answered, claim, fail, ready, sampled, start, submission, update_of

pytestmark = pytest.mark.slow

GROWING = {"episodes", "steps", "step_tokens", "tool_calls", "tool_sessions", "rewards", "consumptions"}
SMALL = {"old": 2, "large": 5, "live": 2}
"""One hundredth of what `make bench` reads: runs with their iterations."""
TIMES = 4
UNIT = 20
"""Instructions of SQLite between two counts."""
ALL = 1000
SLACK = 300
"""Instructions that a statement may take more for nothing: a page of an index more to search."""
WHOLE_EPISODES = (
    "find_episode",
    "find_origin",
    "fork_point",
    "chosen",
    "claim a group",
    "an update reads",
    "whatif",
    "500 episodes",
)
IDS = "SELECT id FROM v_episodes"

Seen = Callable[..., tuple[Database, list[Run]]]


@pytest.fixture
def grown(database: Database) -> tuple[Database, list[Run]]:
    """A small database of three runs."""
    with database.engine.begin() as tx:
        return database, synthetic.fill(tx, SMALL)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Seen:
    """Databases of such runs, each made once."""

    @cache
    def made(shape: tuple[tuple[str, int], ...], counted: bool) -> tuple[Database, list[Run]]:
        folder = tmp_path_factory.mktemp("grown")
        copy_store(folder, migrated_file)
        database = open_database(f"sqlite:///{folder / 'agentrl.db'}")
        with database.engine.begin() as tx:
            runs = synthetic.fill(tx, dict(shape))
        if counted:
            analyse(database)
        return database, runs

    return lambda shape, counted=False: made(tuple(shape.items()), counted)


def test_episodes_page_equals_filtered_view(grown: tuple[Database, list[Run]]) -> None:
    database, _ = grown
    everything = list_large(database, {}, size=ALL)
    with database.read() as tx:
        assert [row["id"] for row in everything] == sorted(tx.execute(text(f"{IDS} WHERE run = 'large'")).scalars())
    for filters in reads.FILTERS:
        chosen = [row for row in everything if all(meets(row, name, value) for name, value in filters.items())]
        assert list_large(database, filters, size=7) == chosen[:7], filters
        assert list_large(database, filters, size=ALL, offset=2) == chosen[2:], filters


def list_large(database: Database, filters: Mapping[str, Any], **paging: int) -> list[EpisodeRow]:
    return list(list_episodes(database, EpisodeFilter("large", **filters), Paging(**paging)).rows)


def meets(row: EpisodeRow, name: str, value: Any) -> bool:
    if name == "min_reward":
        return row["reward"] is not None and row["reward"] >= value
    if name == "max_reward":
        return row["reward"] is not None and row["reward"] <= value
    return bool(row[name] >= value if name == "tool_errors" else row[name] == value)


def test_views_of_grown_database_show_its_runs(grown: tuple[Database, list[Run]]) -> None:
    database, runs = grown
    of_runs = [reads.pages_of(run) | reads.lists(run) for run in runs]
    views = {name: read for found in of_runs for name, read in found.items() if ": v_" in name}
    assert len(views) == len(runs) * (2 * (len(VIEWS) - len(reads.OF_NO_RUN)) - len(reads.WITHOUT_IDS))
    assert [name for name, read in views.items() if not read(database)] == []


def test_page_cost_is_independent_of_run_length(seen: Seen) -> None:
    small, large = (
        work(
            database, reads.pages(1) | reads.pages(PER_ITERATION + 1) | reads.pages_of(run) | reads.loads(run) | filled_pages()
        )
        for database, (run, *_) in (seen({"mine": size, "live": 2}) for size in (5, 5 * TIMES))
    )
    assert {name: (small[name], large[name]) for name in small if large[name] > 1.2 * small[name] + SLACK} == {}


@pytest.mark.parametrize("view", ["v_steps", "v_tool_calls", "v_rewards"])
def test_page_cost_is_unchanged_by_analyze(seen: Seen, view: str) -> None:
    small, large = (
        work(database, {name: read for name, read in (reads.whole_database() | reads.pages_of(run)).items() if view in name})
        for database, (run, *_) in (seen({"mine": size, "live": 2}, counted=True) for size in (5, 5 * TIMES))
    )
    assert len(small) == 4
    assert {name: (small[name], large[name]) for name in small if large[name] > 1.2 * small[name] + SLACK} == {}


def filled_pages() -> dict[str, reads.Read]:
    """What is read of no run, save what shows runs and iterations: neither database has a page of those."""
    listed = ("list_runs", *(f": {view}" for view in reads.LISTED))
    return {what: read for what, read in reads.whole_database().items() if not what.removesuffix(", newest").endswith(listed)}


def test_run_sums_cost_grows_linearly_with_run(seen: Seen) -> None:
    small, large = (
        work(database, reads.lists(run) | reads.sums(run))
        for database, (run, *_) in (seen({"mine": size, "live": 2}) for size in (5, 5 * TIMES))
    )
    assert {name: (small[name], large[name]) for name in small if large[name] > 1.2 * TIMES * small[name] + SLACK} == {}
    assert large["why"] > 2 * small["why"]  # it counts, and what it counts


def test_run_reads_cost_nothing_for_other_runs(seen: Seen) -> None:
    few, many = (
        work(database, reads.pages(1) | reads.pages_of(run) | reads.loads(run) | reads.lists(run) | of_the_run_alone(run))
        for database, (run, *_) in (seen({"mine": 5, "other": size, "live": 2}) for size in (2, 30))
    )
    assert {name: (few[name], many[name]) for name in few if many[name] > 1.2 * few[name] + SLACK} == {}


def test_last_episode_cost_ignores_newer_evaluations(grown: tuple[Database, list[Run]]) -> None:
    database, (first, *_) = grown
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE runs SET kind = 'eval' WHERE id <> :id"), {"id": first.id})
    found = episode_rows.find_last_episode(database)
    assert found is not None
    assert found[1] == first.name
    if database.engine.dialect.name == "sqlite":
        assert work(database, {"last episode": episode_rows.find_last_episode})["last episode"] < SLACK


def of_the_run_alone(run: Run) -> dict[str, reads.Read]:
    return {name: read for name, read in reads.sums(run).items() if "all runs" not in name and name != "question 3"}


def work(database: Database, wanted: Mapping[str, reads.Read]) -> dict[str, int]:
    """How many instructions of SQLite each takes."""
    counted = count()

    def watch(connection: Any, *_: object) -> None:
        connection.set_progress_handler(lambda: next(counted) < 0, UNIT)

    event.listen(database.engine, "checkout", watch)
    found = {}
    for name, read in wanted.items():
        before = next(counted)
        read(database)
        found[name] = UNIT * (next(counted) - before - 1)
    event.remove(database.engine, "checkout", watch)
    return found


def test_reads_scan_no_growing_table_and_show_no_blob(seen: Seen) -> None:
    database, runs = seen(SMALL)
    wanted = reads.reads(runs, 1000)
    for run in runs:
        wanted |= reads.loads(run)
    for name, queries in statements(database, wanted).items():
        if name.startswith("of no run"):
            continue  # a page of a whole table is its first rows, or its last
        for plan in (step for query, values in queries for step in plan_of(database, query, values)):
            scanned = re.match(r"SCAN (\w+)(?! USING .*INDEX)", plan)
            assert scanned is None or aliased(scanned[1], queries) not in GROWING, (name, plan)
        if not name.endswith(WHOLE_EPISODES):
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
    texts = " ".join([*(query for query, _ in queries), *map(view_sql, VIEWS.values())])
    found = set(re.findall(rf"(?:FROM|JOIN)\s+(\w+)(?: AS)? {name}\b", texts)) & GROWING
    return found.pop() if found else name


def test_newest_rows_of_run_are_one_index_range_on_postgres(postgres: Database) -> None:
    with postgres.engine.begin() as tx:
        synthetic.fill(tx, {name: TIMES * iterations for name, iterations in SMALL.items()})
    analyse(postgres)
    for view, index in {"v_steps": "ix_steps_run", "v_tool_calls": "ix_tool_calls_run", "v_rewards": "ix_rewards_run"}.items():
        with postgres.read() as tx:
            query = f"EXPLAIN SELECT * FROM {view} WHERE run = 'old' ORDER BY id DESC LIMIT 50"
            assert index in "\n".join(tx.execute(text(query)).scalars()), view


def test_prepared_statement_raises_like_any_other(database: Database) -> None:
    twice = PreparedStatement(schema.events.insert().inline())
    with pytest.raises(IntegrityError), database.engine.begin() as tx:
        twice.run(tx, {"id": 1, "kind": "first"}, {"id": 1, "kind": "second"})
    with database.read() as tx:
        assert tx.execute(text("SELECT count(*) FROM events")).scalar_one() == 0


def test_step_and_call_rows_have_name_of_run(database: Database) -> None:
    work = claim(database, start(database, submission())[0])
    steps.commit_sampled(database, work.fence, [sampled(work, calls=(CALL,)), sampled(work, 1)])
    with database.read() as tx:
        assert tx.execute(text("SELECT run FROM steps UNION ALL SELECT run FROM tool_calls")).scalars().all() == ["first"] * 3


def test_synthetic_database_fills_what_a_run_fills(sqlite: Database, seen: Seen) -> None:
    second = ready(sqlite, submission(tasks=4))
    train_commits.commit_update(sqlite, second, update_of(second, dropped={0: "too few"}), 3)
    with_call = claim(sqlite, groups_of(sqlite)[0])
    ((call,),) = steps.commit_sampled(sqlite, with_call.fence, [sampled(with_call, calls=(CALL,))])
    tool_calls.record_result(sqlite, call, answered(), datetime.now(UTC), "host:1")
    fail(sqlite, with_call, 1)
    assert filled(sqlite) - filled(seen(SMALL)[0]) - NOT_OF_EVERY_RUN == set()


NOT_OF_EVERY_RUN = {
    ("groups", "dropped"),
    ("iterations", "dropped_groups"),
    ("steps", "thought"),
    ("tool_calls", "cpu_seconds"),
    ("policies", "broken"),
}
"""What only some runs fill, and no plan depends on."""


def groups_of(database: Database) -> list[int]:
    """The open groups of the only run."""
    with database.read() as tx:
        return list(tx.execute(text("SELECT id FROM groups WHERE status = 'planned' ORDER BY id")).scalars())


def filled(database: Database) -> set[tuple[str, str]]:
    """The columns that hold more than what they begin with."""
    with database.read() as tx:
        return {
            (table.name, column.name)
            for table in schema.metadata.tables.values()
            for column in table.c
            if tx.execute(
                text(f"SELECT 1 FROM {table.name} WHERE CAST(\"{column.name}\" AS TEXT) NOT IN ('', '0', '0.0') LIMIT 1")
            ).first()
        }


# statistics


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_vacuum_writes_no_statistics_into_sqlite(database: Database) -> None:
    with database.engine.begin() as tx:
        synthetic.fill(tx, SMALL)
    vacuum.vacuum(database)
    assert not analysed(database)
    analyse(database)
    assert analysed(database), "the probe sees statistics"


# `why` of a long run


def test_why_command_shows_iterations_of_episodes_and_total(
    home: Path, seen: Seen, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    database, _ = seen({"mine": 20, "live": 2})
    monkeypatch.setenv("AGENTRL_DATABASE_URL", database.url.render_as_string(hide_password=False))
    forget_process()
    assert main(["why", str(10 * PER_ITERATION + 1)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if "128 " in line] == [str(number) for number in range(8, 15)]
    assert "11 <-" in shown
    assert f"all 20 {20 * PER_ITERATION}" in " ".join(shown.split())
    assert main(["why", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["iteration"] for row in told["iterations"]] == list(range(1, 21))
    assert [sum(row[fate] for fate in ledger.FATES) for row in told["iterations"]] == [PER_ITERATION] * 20
    process.database().close()
    forget_process()
