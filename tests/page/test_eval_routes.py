"""What the page is told of evaluations, on both databases: the list of them, and two compared task by task."""

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import update

from agentrl.workers.page.routes import eval_routes
from agentrl.workflow.stats.evaluation import evaluate
from agentrl.workflow.store import planning, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import changes, eval_results
from agentrl.workflow.store.run_names import find_stored_policy
from agentrl.workflow.tables import schema as tables
from bench.performance import synthetic
from tests.support.page_answers import PageOver
from tests.support.played_runs import claim, claim_training, fail, play, start, submission, update_of


def measured(database: Database, name: str, *rewards: float | None, **fields: Any) -> None:
    """An evaluation whose tasks' mean rewards are halves of these; None where all of its episodes fail."""
    wanted = replace(submission(name, kind="eval", tasks=len(rewards), tasks_per_iteration=len(rewards)), **fields)
    (iteration,) = planning.open_iterations(database, planning.submit(database, wanted).id)
    groups = planning.start_iteration(database, iteration)
    planning.mark_groups_sent(database, groups)
    for group, reward in zip(groups, rewards, strict=True):
        if reward is not None:
            play(database, group, reward)
            continue
        work = claim(database, group)
        for position in range(len(work.episodes)):
            fail(database, work, position)
    done = claim_training(database, iteration)
    train_commits.finish_eval(database, done, evaluate(done.groups, eval_results.find_right_episodes(database, done.id)))


def test_evals_route_lists_by_asking_run(database: Database) -> None:
    with database.engine.begin() as tx:
        synthetic.fill(tx, {"one": 12, "two": 2})
    page = PageOver(database)
    assert [row["run"] for row in page.read("/api/evals", measures="one")["rows"]] == ["one-eval-0", "one-eval-10"]
    assert page.read("/api/evals", measures="1") == page.read("/api/evals", measures="one")
    assert len(page.read("/api/evals")["rows"]) == len(page.read("/api/evals", measures="")["rows"]) == 3
    first = page.read("/api/evals", size=1)
    assert page.read("/api/evals", size=5, cursor=first["next"])["rows"][0]["id"] != first["rows"][0]["id"]
    assert page.ask("/api/evals", measures="three")[0] == 404


def test_evals_route_includes_manual_eval_of_policy(database: Database) -> None:
    for group, reward in zip(start(database, submission("trains")), (1.0, 0.25), strict=True):
        ended = play(database, group, reward)
    assert ended.iteration is not None
    work = claim_training(database, ended.iteration)
    train_commits.commit_update(database, work, update_of(work), 3)
    page = PageOver(database)
    before = changes.find_state(database, 1)
    assert page.read("/api/runs/1")["has"]["evals"] is False
    measured(database, "by-hand", 1.0, 0.5, policy=find_stored_policy(database, "trains", None))
    measured(database, "of-another", 1.0, 0.5)
    (row,) = page.read("/api/evals", measures="trains")["rows"]
    assert (row["run"], row["policy_version"]) == ("by-hand", 1)
    (point,) = page.read("/api/runs/1/curves")["evals"]
    assert (point["version"], point["run_id"], point["mean_reward"]) == (1, 2, 0.375)
    assert page.read("/api/runs/1")["has"]["evals"] is True
    assert changes.find_state(database, 1) != before


def test_compare_route_pairs_by_task(database: Database) -> None:
    measured(database, "one", 1.0, 0.5, 0.0)
    measured(database, "two", 1.0, 1.0, 1.0)
    found = PageOver(database).read("/api/compare", a=1, b=2)
    assert (found["a"]["run"], found["a"]["mean"], found["b"]["mean"]) == ("one", 0.25, 0.5)
    assert found["measures"]["difference"] == 0.25
    assert (found["measures"]["won"], found["measures"]["lost"], found["measures"]["tied"]) == (2, 0, 1)
    assert found["measures"]["p_value"] == 0.5
    assert (found["right"]["won"], found["right"]["tied"]) == (2, 1)
    assert [task["difference"] for task in found["tasks"]] == sorted((0.0, 0.25, 0.5), reverse=True)
    assert all(task["a_episode"] < task["b_episode"] and task["question"].startswith("What is 6*") for task in found["tasks"])
    assert (found["left_out"], found["remarks"]) == (0, [])


def test_compare_route_names_other_explanations(database: Database) -> None:
    measured(database, "one", 1.0, 0.5)
    other = submission("other", kind="eval", tasks_per_iteration=3)
    config = {**other.config, "rollout": {**other.config["rollout"], "temperature": 0.5}}
    measured(database, "two", 1.0, 0.5, 0.5, config=config, code_hash="changed")
    remarks = PageOver(database).read("/api/compare", a=1, b=2)["remarks"]
    assert remarks == [
        "A has 2 tasks, B has 3. Only the tasks in both are compared: 2.",
        "They were sampled differently (rollout.temperature 1 and 0.5), which may explain the difference.",
        "Their rewards were computed by different code, which may explain the difference.",
    ]


def test_compare_route_omits_means_of_different_rewards(database: Database) -> None:
    measured(database, "one", 1.0, 0.5)
    measured(database, "two", 1.0, 0.5, weights={"numeric_answer": 1.0})
    found = PageOver(database).read("/api/compare", a=1, b=2)
    assert found["measures"] is None
    assert found["right"]["tied"] == 2
    assert "accuracy is" in found["remarks"][0]


def test_compare_route_reports_tasks_without_done_episode(database: Database) -> None:
    measured(database, "one", 1.0, None)
    measured(database, "two", 1.0, 0.5)
    found = PageOver(database).read("/api/compare", a=1, b=2)
    assert found["measures"]["tied"] == 1
    assert {task["difference"] for task in found["tasks"]} == {0.0, None}
    assert found["remarks"] == ["1 task left out: one side has no done episode."]


def test_compare_route_of_one_task_has_no_interval(database: Database) -> None:
    measured(database, "one", 1.0)
    measured(database, "two", 0.5)
    found = PageOver(database).read("/api/compare", a=1, b=2)["measures"]
    assert (found["difference"], found["low"], found["high"]) == (-0.25, None, None)


def test_compare_route_without_common_task_is_empty(database: Database) -> None:
    measured(database, "one", 1.0)
    measured(database, "two", 1.0)
    with database.engine.begin() as tx:
        new = {"content_hash": "x" * 32, "key": "other", "messages": [], "metadata": {}}
        task = tx.execute(tables.tasks.insert().values(new).returning(tables.tasks.c.id)).scalar_one()
        for table in (tables.run_tasks, tables.episodes, tables.groups):
            tx.execute(update(table).where(table.c.run_id == 2).values(task_id=task))
    found = PageOver(database).read("/api/compare", a=1, b=2)
    assert found["measures"]["difference"] is None
    assert found["tasks"] == []


def test_compare_route_lists_largest_differences(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(database, "one", 1.0, 0.5, 0.0)
    measured(database, "two", 1.0, 1.0, 1.0)
    monkeypatch.setattr(eval_routes, "MAX_TASKS", 1)
    found = PageOver(database).read("/api/compare", a=1, b=2)
    assert [task["difference"] for task in found["tasks"]] == [0.5]
    assert found["left_out"] == 2


def test_compare_route_refuses_unfinished_or_other_run(database: Database) -> None:
    planning.submit(database, submission("trains"))
    measured(database, "done", 1.0)
    planning.submit(database, submission("open", kind="eval"))
    page = PageOver(database)
    for asked, status in (
        ({"a": 1, "b": 1}, 409),
        ({"a": 1, "b": 9}, 409),
        ({"a": 2, "b": 10**30}, 404),
        ({"a": 2}, 422),
        ({"a": 2, "b": 3}, 409),
    ):
        assert page.ask("/api/compare", **asked)[0] == status, (asked, status)
