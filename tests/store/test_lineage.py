"""A curriculum is runs that name each other, and is shown as a tree."""

import json
from dataclasses import replace

import pytest
from sqlalchemy import update

from agentrl.cli.main import main
from agentrl.workflow.config import build
from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.forks import Fork
from agentrl.workflow.store.planning import Submission
from agentrl.workflow.store.reads.lineage import load_family
from agentrl.workflow.store.run_names import find_stored_policy
from agentrl.workflow.tables import schema as tables
from agentrl.workflow.trajectory import PolicyRef
from tests.support.played_runs import play, start, submission, values


def curriculum(db: Database) -> None:
    """A run, a fork of one of its episodes, a run on that, one that trains its policy on, an evaluation of that, a stranger."""
    for group in start(db, submission("first")):
        play(db, group)
    with db.engine.begin() as tx:
        tx.execute(tables.policies.insert().values(run_id=1, version=1, kind="trained", path="out/v1", sha256="one"))
    fork = replace(submission("forked", kind="fork"), tasks=(), fork=Fork(1, 0), manifest={"fork": {"episode": 1, "step": 0}})
    planning.submit(db, fork)
    groups = values(db, "SELECT id FROM groups WHERE run_id <= 2 ORDER BY id")
    planning.submit(db, replace(submission("again"), tasks=(), groups=groups[1:]))
    planning.submit(db, replace(submission("on"), policy=find_stored_policy(db, "first", 1)))
    planning.submit(db, replace(submission("measured", kind="eval"), policy=PolicyRef("tiny", "hash", "out/v1", "one", 1)))
    planning.submit(db, _named_after(submission("merged"), "on@3"))
    planning.submit(db, submission("stranger"))


def _named_after(wanted: Submission, model: str) -> Submission:
    config = wanted.config
    return replace(wanted, config={**config, "model": {**config["model"], "path": model}})


def test_run_tree_places_each_run_under_its_sources(database: Database) -> None:
    curriculum(database)
    found = {each.row["run"]: [(source.run, source.what) for source in each.sources] for each in load_family(database, 50)}
    assert found == {
        "first": [],
        "forked": [("first", "episode 1, step 0")],
        "again": [("first", "1 group"), ("forked", "1 group")],
        "on": [("first", "version 1")],
        "measured": [("first", "version 1")],
        "merged": [("on", "version 3")],
        "stranger": [],
    }
    assert [each.row["run"] for each in load_family(database, 2)] == ["first", "on", "merged", "stranger"]


def test_run_tree_ignores_self_and_unknown_models(database: Database) -> None:
    planning.submit(database, _named_after(submission("loop"), "loop@1"))
    planning.submit(database, _named_after(submission("odd"), "nobody@1"))
    assert [each.sources for each in load_family(database, 50)] == [(), ()]


def test_run_tree_fits_80_columns_and_is_complete_in_json(own_database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    curriculum(own_database)
    long = "a" * 64
    with own_database.engine.begin() as tx:
        tx.execute(update(tables.runs).where(tables.runs.c.name == "merged").values(name=long))
    assert main(["runs", "--tree"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()][:4] == [
        ["run", "status"], ["stranger", "running"], ["first", "running"], ["|-", "forked"],
    ]  # fmt: skip
    assert "|- again" in out
    assert "|  `- aaaa" in out
    assert "`- measured" in out
    assert "1 group; forked: " in out
    assert "eval: version 1" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["runs", "--tree", "--json"]) == 0
    stranger, first = json.loads(capsys.readouterr().out)
    assert stranger["children"] == first["from"] == []
    assert [child["run"] for child in first["children"]] == ["forked", "again", "on", "measured"]
    assert first["children"][2]["children"][0]["run"] == long
    assert build({"name": long}).name == long


def test_run_tree_without_runs_is_empty(home: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--tree"]) == 0
    assert "There is no run yet" in capsys.readouterr().err
