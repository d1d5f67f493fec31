"""How two runs differ, and where a run's seconds went, on SQLite and Postgres."""

import pytest

from agentrl.workflow.errors import NotFoundError
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads.run_differences import load_run_differences
from agentrl.workflow.store.reads.run_seconds import load_run_seconds
from tests.support.played_runs import value
from tests.support.question_store import add_runs


def test_differences_list_tasks_that_differ_most_first(database: Database) -> None:
    add_runs(database)
    differences = load_run_differences(database, "code", "agents")
    assert {row["key"] for row in differences.config} == {"epochs", "seed"}
    assert differences.shared == 2
    assert [(row["one"], row["other"]) for row in differences.tasks] == [(0.25, 0.5)]
    (task,) = differences.tasks
    query = "SELECT reward FROM episodes WHERE id = :id"
    assert [value(database, query, id=task[f"{side}_episode"]) for side in ("one", "other")] == [0.0, 1.0]
    with pytest.raises(NotFoundError):
        load_run_differences(database, "code", "never")


def test_seconds_name_parts_of_iterations_and_episodes(database: Database) -> None:
    add_runs(database)
    parts = {(row["of"], row["part"]): row["seconds"] for row in load_run_seconds(database, "code")}
    assert parts["episodes", "tools"] == pytest.approx(8.0)  # 16 calls of half a second
    assert all(type(seconds) is float and seconds > 0 for seconds in parts.values())
    assert {row["of"] for row in load_run_seconds(database, "1", episodes=False)} == {"run"}
