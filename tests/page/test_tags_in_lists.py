"""Tags and notes of runs are in what the page is told of them, on both databases."""

from sqlalchemy import text

from agentrl.workflow.store import planning
from agentrl.workflow.store.connect import Database
from tests.support.page_answers import PageOver
from tests.support.played_runs import submission


def test_runs_route_filters_by_tag_and_run_route_has_notes(database: Database) -> None:
    for name in ("one", "two"):
        planning.submit(database, submission(name))
    with database.engine.begin() as tx:
        for run, tag in ((1, "good"), (1, "<b>%_/é"), (2, "good")):
            tx.execute(text("INSERT INTO run_tags (run_id, tag) VALUES (:run, :tag)"), {"run": run, "tag": tag})
        for noted in ("first", "y" * 10_000):
            tx.execute(text("INSERT INTO run_notes (run_id, text) VALUES (1, :text)"), {"text": noted})
    page = PageOver(database)
    assert {row["run"]: row["tags"] for row in page.read("/api/runs")["rows"]} == {"one": ["<b>%_/é", "good"], "two": ["good"]}
    assert [row["run"] for row in page.read("/api/runs", tag="<b>%_/é")["rows"]] == ["one"]
    assert page.read("/api/runs", tag="%")["rows"] == []
    found = page.read("/api/runs/1")
    assert found["tags"] == ["<b>%_/é", "good"]
    assert [len(note["text"]) for note in found["notes"]] == [10_000, 5]
