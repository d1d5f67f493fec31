"""What the page is told of annotations, prompts, critic calls and series, on both databases."""

import math
from typing import Any

import pytest
from sqlalchemy import text, update

from agentrl.workers.page.shown.shown_texts import LISTED_CHARS, SHOWN_CHARS
from agentrl.workflow.store import search_rounds
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import series
from agentrl.workflow.store.reads.series import WINDOWS, list_views
from agentrl.workflow.tables import schema as tables
from agentrl.workflow.tables.views import VIEWS
from tests.search.test_search_rows import BETTER, SEED, begun, planned, rolled_out
from tests.support.grown_stores import grown_postgres, grown_sqlite, grown_store  # noqa: F401 - fixtures
from tests.support.page_answers import PageOver
from tests.support.played_runs import altered, values

grown = grown_store({"large": 3, "live": 1})


def test_annotations_route_filters_and_pages(grown: Database) -> None:
    page = PageOver(grown)
    first = page.read("/api/runs/1/annotations", kind="reward", source="agent", name="own", size=10)
    assert {row["data"]["value"] for row in first["rows"]} == {0.5}
    assert page.read("/api/runs/1/annotations", size=10)["rows"] == first["rows"]
    assert page.read("/api/runs/1/annotations", kind="message")["rows"] == []
    second = page.read("/api/runs/1/annotations", kind="reward", source="agent", name="own", size=10, cursor=first["next"])
    assert second["rows"][0]["id"] > first["rows"][-1]["id"]


def test_annotations_route_shows_or_cuts_any_value(grown: Database) -> None:
    page = PageOver(grown)
    for said in ("</script><img src=x onerror=alert(1)>", "\u202e\u2028\x07 \ud83d", {"text": "x" * 3000}, None, [1.5, True]):
        with grown.engine.begin() as tx:
            tx.execute(update(tables.annotations).where(tables.annotations.c.id == 1).values(data={"value": said}))
        row = page.read("/api/runs/1/annotations", size=1)["rows"][0]
        if isinstance(said, dict):
            assert len(row["data"]) == LISTED_CHARS, said
            assert row["cut"]["data"] > 3000, said
        else:
            assert row["data"]["value"] == (said.replace("\ud83d", "?") if isinstance(said, str) else said), said


def test_annotations_route_shows_deep_value_as_text(grown: Database) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    with grown.engine.begin() as tx:
        tx.execute(update(tables.annotations).where(tables.annotations.c.id == 1).values(data={"value": deep}))
    assert PageOver(grown).read("/api/runs/1/annotations", size=1)["rows"][0]["data"].startswith('{"value": [[[')


def test_search_route_shows_gain_and_tree(database: Database) -> None:
    work = begun(database)
    search_rounds.add_round(database, work, planned(database, work, "choose", SEED, BETTER))
    work = rolled_out(database, work, (0.25, 0.75))
    search_rounds.add_round(database, work, planned(database, work, "held_out", SEED, BETTER))
    search_rounds.finish_search(database, rolled_out(database, work, (0.0, 1.0)), BETTER)
    page = PageOver(database)
    found = page.read("/api/runs/1/search")
    assert found["sentences"] == "The best version (prompt @1) solves 1 of 1 held-out task; the first solved 0."
    assert (found["gain"]["difference"], found["gain"]["tasks"], found["gain"]["low"]) == (1.0, 1, None)
    assert [(row["number"], row["parent"], row["score"], row["held_out"], row["on_path"]) for row in found["candidates"]] == [
        (0, None, 0.25, 0.0, True), (1, 0, 0.75, 1.0, True),
    ]  # fmt: skip
    (text_row,) = page.read("/api/runs/1/search/1")["texts"]
    assert text_row["diff"].splitlines()[1:] == [f"-{SEED['prompt']}", f"+{BETTER['prompt']}"]
    assert page.read("/api/runs/1/search/0")["texts"][0]["diff"] is None
    group = found["candidates"][1]["group"]
    assert [row["reward"] for row in page.read("/api/runs/1/episodes", texts_of=group)["rows"]] == [0.75, 0.75, 1.0, 1.0]
    assert page.ask("/api/runs/1/episodes", texts_of=10**30)[0] == 404
    assert page.ask("/api/runs/1/search/9")[0] == 404


def test_search_route_refuses_other_kinds_and_cuts_texts(grown: Database) -> None:
    assert PageOver(grown).ask("/api/runs/1/search")[0] == 404
    with grown.engine.begin() as tx:
        tx.execute(update(tables.runs).where(tables.runs.c.id == 1).values(kind="search"))
        tx.execute(update(tables.resources).where(tables.resources.c.id == 2).values(text="x" * 100_000, parent_version=0))
        tx.execute(update(tables.critic_calls).values(answer="x" * 100_000, messages=[{"content": "y" * 100_000}]))
    page = PageOver(grown)
    found = page.read("/api/runs/1/search/1")
    assert len(found["texts"][0]["text"]) == len(found["texts"][0]["diff"]) == SHOWN_CHARS
    assert found["texts"][0]["cut"]["text"] == 100_000
    assert [len(row[name]) for row in found["critic"] for name in ("answer", "messages")] == [SHOWN_CHARS] * 2


def test_prompts_and_critic_calls_are_paged_and_cut(grown: Database) -> None:
    with grown.engine.begin() as tx:
        tx.execute(update(tables.resources).where(tables.resources.c.id == 1).values(text="x" * 100_000))
        tx.execute(update(tables.critic_calls).where(tables.critic_calls.c.id == 1).values(answer="y" * 100_000))
    page = PageOver(grown)
    for path, column in (("prompts", "text"), ("critic-calls", "answer")):
        first = page.read(f"/api/runs/1/{path}", size=2)
        assert len(first["rows"][0][column]) == SHOWN_CHARS
        assert first["rows"][0]["cut"] == {column: 100_000}
        assert len(page.read(f"/api/runs/1/{path}", size=2, cursor=first["next"])["rows"]) == 1


# series


def added_up(page: PageOver, run: int, view: str, column: str) -> dict[int, list[float]]:
    """Iteration -> count, sum, least, greatest, over all windows."""
    found: dict[int, list[float]] = {}
    cursor = ""
    while True:
        window = page.read(f"/api/runs/{run}/series", view=view, column=column, cursor=cursor)
        for row in window["rows"]:
            had = found.get(row["iteration"], [0, 0.0, math.inf, -math.inf])
            found[row["iteration"]] = [
                had[0] + row["count"], had[1] + row["sum"], min(had[2], row["min"]), max(had[3], row["max"]),
            ]  # fmt: skip
        cursor = window["next"]
        if not cursor:
            return found


def test_series_route_agrees_with_its_view(grown: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "WINDOW_ROWS", 101)
    page = PageOver(grown)
    for view, column in (
        *(("v_episodes", "reward"), ("v_steps", "mean_logprob"), ("v_tool_calls", "starts"), ("v_rewards", "value")),
        *(
            ("v_groups", "std_reward"),
            ("v_iterations", "update_seconds"),
            ("v_updates", "kl"),
            ("v_agent_attempts", "attempts"),
        ),
    ):
        with grown.read() as tx:
            query = f"""
                SELECT iteration, count({column}), sum({column}), min({column}), max({column}) FROM {view}
                WHERE run = 'large' AND {column} IS NOT NULL GROUP BY iteration"""
            wanted = {row[0]: list(row[1:]) for row in tx.execute(text(query))}
        found = added_up(page, 1, view, column)
        assert found.keys() == wanted.keys(), view
        for iteration, sums in found.items():
            assert sums == pytest.approx(wanted[iteration]), view


def test_series_route_serves_every_number_of_every_view(grown: Database) -> None:
    page = PageOver(grown)
    charted = [(view["view"], column["column"]) for view in list_views() for column in view["columns"] if column["chartable"]]
    assert len(charted) > 80
    for view, column in charted:
        page.read("/api/runs/1/series", view=view, column=column)


def test_series_route_skips_non_finite_numbers(grown: Database) -> None:
    for odd in (math.inf, -math.inf):
        with altered(grown, "updates", "kl", "id = 1", odd):
            (first, *_) = PageOver(grown).read("/api/runs/1/series", view="v_updates", column="kl")["rows"]
            assert (first["count"], first["max"]) == (1, 0.01)


def test_series_route_refuses_column_without_numbers(grown: Database) -> None:
    page = PageOver(grown)
    for view, column in (
        ("v_runs", "seed"),
        ("runs", "id"),
        ("v_episodes", "error"),
        ("v_episodes", "group_id"),
        ("v_ledger", "advantage"),
        ("v_steps", "1; DROP TABLE runs"),
    ):
        assert page.ask("/api/runs/1/series", view=view, column=column)[0] == 422, (view, column)


def test_series_route_refuses_cursor_of_other_series(grown: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "WINDOW_ROWS", 10)
    page = PageOver(grown)
    cursor = page.read("/api/runs/1/series", view="v_steps", column="mean_logprob")["next"]
    assert page.ask("/api/runs/1/series", view="v_steps", column="chain", cursor=cursor)[0] == 422
    assert page.ask("/api/runs/2/series", view="v_steps", column="mean_logprob", cursor=cursor)[0] == 422


def test_views_route_lists_columns(database: Database) -> None:
    told = PageOver(database).read("/api/views")
    assert [view["view"] for view in told]
    assert {view["view"] for view in told} == {*VIEWS}
    with database.read() as tx:
        for view in VIEWS:
            assert [*VIEWS[view].COLUMNS] == list(tx.execute(text(f"SELECT * FROM {view} LIMIT 0")).keys())
    assert all(view["meaning"] and all(column["meaning"] for column in view["columns"]) for view in told)
    assert {view for view, kind in VIEWS.items() if {"run", "iteration", "id"} <= {*kind.COLUMNS}} == {*WINDOWS}


def test_page_answers_every_path_of_every_kind_of_run(grown: Database) -> None:
    page = PageOver(grown)
    for run in values(grown, "SELECT id FROM runs ORDER BY id"):
        for path in (
            "",
            "/curves",
            "/events",
            "/ledger",
            "/lanes",
            "/iterations/1",
            "/episodes",
            "/tasks",
            "/annotations",
        ):
            page.read(f"/api/runs/{run}{path}")
        page.read(f"/api/runs/{run}/prompts")
        page.read(f"/api/runs/{run}/critic-calls")
