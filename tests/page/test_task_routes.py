"""What the page is told of tasks, on both databases: when each was solved, never, its best and worst episode, its groups."""

from dataclasses import replace
from typing import Any

from sqlalchemy import update

from agentrl.workflow.store import planning, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import task_rows
from agentrl.workflow.store.reads.task_rows import TASK_ORDERS
from agentrl.workflow.tables import schema as tables
from tests.support.grown_stores import grown_postgres, grown_sqlite, grown_store  # noqa: F401 - fixtures
from tests.support.page_answers import PageOver
from tests.support.played_runs import claim_training, play, submission, update_of, values


def played(database: Database, *iterations: tuple[float, ...], **fields: Any) -> None:
    """A run of two tasks: in each iteration the second episode of each task's group has that reward, the first one 0. `fields`
    are those of the submission.
    """
    planning.submit(database, replace(submission(epochs=len(iterations)), **fields))
    for rewards in iterations:
        (iteration,) = planning.open_iterations(database, 1)
        groups = planning.start_iteration(database, iteration)
        planning.mark_groups_sent(database, groups)
        by_task = sorted(groups, key=lambda group: values(database, "SELECT task_id FROM groups WHERE id = :id", id=group))
        for group, reward in zip(by_task, rewards, strict=True):
            play(database, group, reward)
        work = claim_training(database, iteration)
        train_commits.commit_update(database, work, update_of(work), 3)


def test_tasks_route_shows_iteration_that_solved_task(database: Database) -> None:
    played(database, (0.5, 1.0), (1.0, 0.25), (0.0, 0.5))
    found = PageOver(database).read("/api/runs/1/tasks", sort="id")
    one, other = found["rows"]
    assert (one["first_solved"], other["first_solved"]) == (2, 1)
    assert not one["never_solved"]
    assert found["solved_means"] == "an episode is right: numeric_answer at full value"
    assert one["points"] == [[1, 0.25], [2, 0.5], [3, 0.0]]
    assert (one["solved_groups"], one["judged_groups"], other["solved_groups"]) == (1, 3, 1)
    assert (one["groups"], one["mean_reward"], one["last_reward"], one["role"]) == (3, 0.25, 0.0, "train")
    assert one["best"]["reward"] == 1.0
    assert one["worst"]["reward"] == 0.0
    assert values(database, "SELECT reward FROM episodes WHERE id = :id", id=one["best"]["episode"]) == [1.0]


def test_tasks_route_reports_task_never_solved(database: Database) -> None:
    played(database, (0.5, 0.9))
    for row in PageOver(database).read("/api/runs/1/tasks")["rows"]:
        assert row["never_solved"]
        assert row["first_solved"] is None


def test_tasks_route_filters_by_outcome(database: Database) -> None:
    played(database, (0.5, 1.0), (0.5, 0.5), (0.25, 0.0))
    page = PageOver(database)
    tasks = {row["task"]: row for row in page.read("/api/runs/1/tasks")["rows"]}
    named = {outcome: page.read("/api/runs/1/tasks", outcome=outcome)["rows"] for outcome in task_rows.TASK_OUTCOMES}
    assert {outcome: [row["task"] for row in rows] for outcome, rows in named.items()} == {
        "solved": [task for task, row in tasks.items() if row["first_solved"] == 1],
        "never_solved": [task for task, row in tasks.items() if row["never_solved"]],
        "no_longer_solved": [task for task, row in tasks.items() if row["no_longer_solved"]],
    }
    assert all(len(rows) == 1 for rows in named.values())
    assert named["no_longer_solved"][0]["last_solved"] == 1
    assert named["no_longer_solved"][0]["question"].startswith("What is 6*")
    assert page.ask("/api/runs/1/tasks", outcome="solvd")[0] == 422


def test_tasks_route_sorts_by_change_and_last_reward(database: Database) -> None:
    played(database, (0.5, 0.75), (1.0, 0.0), (0.25, 1.0))
    page = PageOver(database)
    for sort, column, expected in (("change", "change", [-0.125, 0.125]), ("last", "last_reward", [0.125, 0.5])):
        for way in ("", "-"):
            rows = page.read("/api/runs/1/tasks", sort=f"{way}{sort}")["rows"]
            assert [row[column] for row in rows] == (expected[::-1] if way else expected), sort
    query = "SELECT max(id) FROM groups WHERE task_id = :id"
    (newest,) = values(database, query, id=page.read("/api/runs/1/tasks", sort="change")["rows"][0]["task_id"])
    with database.engine.begin() as tx:  # a group without a reward is not the last one
        tx.execute(update(tables.groups).where(tables.groups.c.id == newest).values(mean_reward=None))
    assert [row["change"] for row in page.read("/api/runs/1/tasks", sort="-change")["rows"]] == [0.25, 0.125]


def test_tasks_route_counts_reward_of_one_as_solved_by_default(database: Database) -> None:
    played(database, (0.5, 1.0), weights={})
    found = PageOver(database).read("/api/runs/1/tasks", sort="id")
    assert [row["first_solved"] for row in found["rows"]] == [None, 1]
    assert found["solved_means"] == "an episode's reward is 1 or more"


grown = grown_store({"large": 3})


def whole_list(page: PageOver, run: int, **asked: Any) -> list[dict[str, Any]]:
    """The rows of all pages."""
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        answered = page.read(f"/api/runs/{run}/tasks", cursor=cursor, **asked)
        found += answered["rows"]
        cursor = answered["next"]
        if not cursor:
            return found


def test_tasks_route_pages_each_task_once_in_every_order(grown: Database) -> None:
    page = PageOver(grown)
    columns = {"id": "task_id", "reward": "mean_reward", "last": "last_reward", "solved": "solved_groups"}
    ends = ("best", "worst")
    for order in TASK_ORDERS:
        for way in ("", "-"):
            rows = whole_list(page, 1, sort=f"{way}{order}", size=20)
            assert len({row["task_id"] for row in rows}) == len(rows) == 48
            cells = [row[columns.get(order, order)] for row in rows]
            shown = [cell["reward"] if order in ends else cell for cell in cells if cell is not None]
            assert order in ("task", "reference") or shown == sorted(shown, reverse=bool(way)), order
    assert [row["task_id"] for row in whole_list(page, 1, size=7)] == list(range(1, 49))


def test_tasks_route_searches_key_and_reference(grown: Database) -> None:
    page = PageOver(grown)
    assert {row["task"] for row in whole_list(page, 1, text="TRAIN/4")} == {f"train/{n}" for n in (4, *range(40, 48))}
    assert page.read("/api/runs/1/tasks", text="100%")["rows"] == []


def test_tasks_route_of_stored_groups_has_their_tasks(grown: Database) -> None:
    (run,) = values(grown, "SELECT id FROM runs WHERE name = 'again'")
    page = PageOver(grown)
    found = whole_list(page, run, size=1000)
    assert len(found) == 32
    sampled = {row["task_id"]: row["first_solved"] for row in whole_list(page, 1, size=1000)}
    seen = {row["task_id"]: row["first_solved"] for row in found if row["first_solved"] is not None}
    assert seen == {task: first for task, first in sampled.items() if first is not None and first <= 2}
    assert seen


def test_tasks_route_refuses_unknown_order_cursor_and_size(grown: Database) -> None:
    page = PageOver(grown)
    for asked in ({"sort": "colour"}, {"cursor": "abc"}, {"size": 0}, {"size": 1001}):
        assert page.ask("/api/runs/1/tasks", **asked)[0] == 422, asked


def test_tasks_route_refuses_cursor_of_other_list(grown: Database) -> None:
    page = PageOver(grown)
    cursor = page.read("/api/runs/1/tasks", size=2)["next"]
    assert page.ask("/api/runs/1/tasks", size=2, cursor=cursor, sort="id")[0] == 422


def test_task_route_has_groups_with_rewards(database: Database) -> None:
    played(database, (0.5, 1.0), (1.0, 0.25))
    page = PageOver(database)
    task = page.read("/api/runs/1/tasks", sort="id")["rows"][0]
    found = page.read(f"/api/runs/1/tasks/{task['task_id']}")
    assert found["task"] == task["task"]
    assert found["messages"][0]["content"].startswith("What is 6*")
    assert [group["iteration"] for group in found["groups"]] == [1, 2]
    assert [[episode["reward"] for episode in group["episodes"]] for group in found["groups"]] == [[0.0, 0.5], [0.0, 1.0]]
    assert found["first_solved"] == 2
    assert found["cut"] == {}


def test_task_route_cuts_long_task(database: Database) -> None:
    played(database, (0.5, 1.0))
    with database.engine.begin() as tx:
        long = {"messages": [{"role": "user", "content": "x" * 50_000}], "metadata": {"deep": ["y" * 50_000]}}
        tx.execute(update(tables.tasks).where(tables.tasks.c.id == 1).values(**long))
    found = PageOver(database).read("/api/runs/1/tasks/1")
    assert found["messages"][0]["cut"] == {"content": 50_000}
    assert found["cut"] == {"metadata": 50_014}


def test_task_route_of_foreign_task_is_404(database: Database) -> None:
    played(database, (0.5, 1.0))
    page = PageOver(database)
    for task in ("99", "99999999999999999999999", "-1"):
        status, said = page.ask(f"/api/runs/1/tasks/{task}")
        assert status == 404, task
        assert said["hint"] == "agentrl episodes first", task
