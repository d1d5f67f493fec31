"""Every route of the page over a store whose numbers are not finite, or whose JSON is damaged: it answers."""

from itertools import cycle

import pytest
from sqlalchemy import JSON, text

from agentrl.workflow.store.connect import Database
from agentrl.workflow.tables import schema
from agentrl.workflow.tables.column_kinds import MOMENTS
from tests.support.hostile_rows import MIXED, fill_with
from tests.support.page_answers import PageOver

ROUTES = (
    "runs", "runs/1", "runs/2", "runs/1/verdict", "runs/1/curves", "runs/1/iterations/1", "runs/1/episodes", "groups/1",
    "groups/2", "episodes/1", "episodes/2", "episodes/3", "episodes/1/tokens", "runs/1/tasks/1", "runs/1/tasks", "runs/1/lanes",
    "runs/1/events", "evals", "runs/1/prompts", "runs/1/annotations", "runs/1/series?view=v_rewards&column=value",
    "runs/1/ledger", "compare?a=3&b=4",
)  # fmt: skip


@pytest.mark.parametrize("number", ["9e999", "-9e999", MIXED])
def test_routes_answer_infinity_as_null(sqlite: Database, number: str) -> None:
    with sqlite.engine.begin() as tx:
        fill_with(tx, number)
    page = PageOver(sqlite)
    for route in ROUTES:
        page.read(f"/api/{route}")


DAMAGES = ('{"a": ', f'{{"a": {"1" * 5000}}}', "[" * 5000 + "]" * 5000)
"""JSON that was cut, with a number of too many digits, nested deeper than any stack allows: one function reads them all."""


def test_routes_answer_damaged_times_as_null(sqlite: Database) -> None:
    with sqlite.engine.begin() as tx:
        fill_with(tx, "1.0")
    page = PageOver(sqlite)
    columns = [column for table in schema.metadata.sorted_tables for column in table.columns if column.name in MOMENTS]
    for column in columns:
        with sqlite.engine.begin() as tx:
            tx.execute(text(f"UPDATE {column.table.name} SET {column.name} = 'yesterday' WHERE rowid % 2 = 1"))
    answers = {route: page.ask(f"/api/{route}") for route in ROUTES}
    assert {route: document for route, (status, document) in answers.items() if status >= 500} == {}


def test_routes_answer_damaged_json_as_null_without_hiding_rows(sqlite: Database) -> None:
    """Each column of JSON is damaged alone, the columns by turns in each way."""
    with sqlite.engine.begin() as tx:
        fill_with(tx, "1.0")
    page = PageOver(sqlite)
    columns = [column for table in schema.metadata.sorted_tables for column in table.columns if isinstance(column.type, JSON)]
    for column, damage in zip(columns, cycle(DAMAGES)):
        table = column.table
        if (table.name, column.name) == ("runs", "manifest"):  # SQLite itself looks into it, to find forks
            continue
        with sqlite.engine.begin() as tx:
            tx.execute(text(f"CREATE TEMP TABLE kept AS SELECT rowid AS n, {column.name} AS was FROM {table.name}"))
            tx.execute(text(f"UPDATE {table.name} SET {column.name} = :damage WHERE rowid % 2 = 1"), {"damage": damage})
        told = {route: page.ask(f"/api/{route}") for route in ROUTES}
        assert {route: said for route, (status, said) in told.items() if status >= 500} == {}, (table.name, column.name)
        with sqlite.engine.begin() as tx:
            back = f"(SELECT was FROM kept WHERE n = {table.name}.rowid)"
            tx.execute(text(f"UPDATE {table.name} SET {column.name} = {back}"))
            tx.execute(text("DROP TABLE kept"))
