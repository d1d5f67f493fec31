"""What the page is told of runs: lists, one run, curves, events, the ledger, lanes, iterations, episodes, on both databases."""

import itertools
import math
from dataclasses import replace
from statistics import pstdev
from typing import Any

import pytest
from sqlalchemy import text, update

from agentrl.workers.page.shown.shown_texts import LISTED_CHARS, SHOWN_CHARS, cut_rows, cut_value
from agentrl.workers.page.shown.whole_run import list_config
from agentrl.workflow.config import RunConfig
from agentrl.workflow.store import planning, train_commits
from agentrl.workflow.store.blocked_runs import find_wait_reason, wait_for
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.forks import Fork
from agentrl.workflow.store.reads import curves, iteration_rows, lanes, ledger, run_details
from agentrl.workflow.store.reads.iteration_rows import IterationFilter
from agentrl.workflow.store.reads.paging import Paging
from agentrl.workflow.store.reads.run_details import StoredConfig
from agentrl.workflow.store.run_names import find_stored_policy
from agentrl.workflow.tables import schema as tables
from agentrl.workflow.trajectory import PolicyRef
from bench.performance import synthetic
from tests.support.grown_stores import grown_postgres, grown_sqlite, grown_store  # noqa: F401 - fixtures
from tests.support.page_answers import PageOver
from tests.support.played_runs import altered, claim, claim_training, fail, finish, play, start, submission, update_of, values

SHAPE = {"old": 1, "large": 4, "live": 2}
MOVING = ("started_at", "finished_at", "created_at", "active_at")


grown = grown_store(SHAPE)


def number(database: Database, name: str) -> int:
    (found,) = values(database, "SELECT id FROM runs WHERE name = :name", name=name)
    return int(found)


def curve(document: Any) -> list[dict[str, Any]]:
    """The rows of curves as objects."""
    return [dict(zip(document["columns"], row, strict=True)) for row in document["rows"]]


def trained(database: Database, rewards: tuple[float, ...] = (1.0, 1.0)) -> None:
    """A run of two groups, the second episode of each with that reward, and its update."""
    for group, reward in zip(start(database, submission()), rewards, strict=True):
        ended = play(database, group, reward)
    assert ended.iteration is not None
    work = claim_training(database, ended.iteration)
    train_commits.commit_update(database, work, update_of(work), 3)


# the list


def test_runs_route_of_empty_store_is_empty(database: Database) -> None:
    assert PageOver(database).read("/api/runs") == {"rows": [], "next": ""}


def test_runs_route_shows_algorithm_sparkline_and_last_write(grown: Database) -> None:
    rows = {row["run"]: row for row in PageOver(grown).read("/api/runs")["rows"]}
    assert {*rows} == {"old", "large", "live", "again", "forked"}
    assert rows["large"]["spark"] == [[n, 0.5] for n in range(1, 5)]
    assert rows["large"]["tokens"] == 4 * synthetic.PER_ITERATION * synthetic.TURNS * 130
    assert rows["live"]["spark"] == [[1, 0.5]]
    assert rows["forked"]["algorithm"] is None
    assert all(row["active_at"].endswith("Z") and row["tags"] == [] and row["waits_for"] == "" for row in rows.values())


def test_runs_route_filters_and_pages(database: Database) -> None:
    for name, algorithm in (("one", "grpo"), ("two", "rloo"), ("three", "grpo")):
        wanted = submission(name)
        planning.submit(database, replace(wanted, config={**wanted.config, "algorithm": {"name": algorithm}}))
    page = PageOver(database)
    assert [row["run"] for row in page.read("/api/runs", algorithm="grpo")["rows"]] == ["three", "one"]
    assert [row["algorithm"] for row in page.read("/api/runs", text="W")["rows"]] == ["rloo"]
    assert page.read("/api/runs", text="%")["rows"] == page.read("/api/runs", kind="eval")["rows"] == []
    first = page.read("/api/runs", size=2, sort="-run")
    second = page.read("/api/runs", size=2, sort="-run", cursor=first["next"])
    assert [row["run"] for row in (*first["rows"], *second["rows"])] == ["two", "three", "one"]
    assert second["next"] == ""


def test_runs_route_sparkline_of_long_run_is_thinned_evenly(database: Database) -> None:
    planning.submit(database, submission())
    with database.engine.begin() as tx:
        (policy,) = tx.execute(text("SELECT min(id) FROM policies")).scalars()
        tx.execute(text("DELETE FROM episodes"))
        tx.execute(text("DELETE FROM groups"))
        tx.execute(text("DELETE FROM iterations"))
        row = {"run_id": 1, "epoch": 0, "policy_id": policy, "status": "done"}
        tx.execute(tables.iterations.insert(), [{**row, "number": n, "mean_reward": n / 500} for n in range(500)])
    (run,) = PageOver(database).read("/api/runs")["rows"]
    numbers = [iteration for iteration, _ in run["spark"]]
    assert len(numbers) <= run_details.SPARK_POINTS + 1
    assert numbers[0] == 1
    assert numbers[-1] == 500
    assert {after - before for before, after in itertools.pairwise(numbers[:-1])} == {9}


def test_run_route_of_missing_run_is_404(database: Database) -> None:
    page = PageOver(database)
    for path in ("/api/runs/99", "/api/runs/99999999999999999999999999", "/api/runs/-1/curves", "/api/runs/7/tasks"):
        status, said = page.ask(path)
        assert status == 404, path
        assert said["error"].startswith("There is no run"), path
        assert said["hint"], path


def test_lists_refuse_unknown_order_cursor_size_and_choice(database: Database) -> None:
    planning.submit(database, submission())
    page = PageOver(database)
    for asked in ({"sort": "colour"}, {"cursor": "abc"}, {"cursor": "\U0001f600" * 40}, {"size": 0}, {"size": 1001}):
        assert page.ask("/api/runs", **asked)[0] == 422, asked
    choices = {
        "runs": ("status", "kind"), "evals": ("status",), "runs/1/annotations": ("kind", "source"),
        "runs/1/episodes": ("status", "stop_reason", "outcome", "fate"), "runs/1/tasks": ("outcome",),
    }  # fmt: skip
    for path, names in choices.items():
        for name in names:
            status, refusal = page.ask(f"/api/{path}", **{name: "colour"})
            assert (status, refusal["error"]) == (422, f"There is no {name.replace('_', ' ')} 'colour'."), path
            assert " is one of " in refusal["hint"]
    for asked in ({"iteration": 9}, {"task": "train/99"}, {"group": 9}, {"texts_of": 9}):
        assert page.ask("/api/runs/1/episodes", **asked)[0] == 404, asked
    assert page.ask("/api/runs/1/errors", iteration=9)[0] == 404


def test_runs_route_names_what_waiting_run_waits_for(database: Database) -> None:
    start(database, submission("first", kind="eval"))
    assert PageOver(database).read("/api/runs/1")["waits_for"] == ""
    wait_for(database, 1, "the server is away")
    assert PageOver(database).read("/api/runs")["rows"][0]["waits_for"] == find_wait_reason(database, 1) == "the server is away"


def test_run_route_waits_for_maker_of_rebuilt_checkpoint(database: Database) -> None:
    for name, kind in (("maker", "train"), ("waits", "eval")):
        planning.submit(database, submission(name, kind=kind))
    with database.engine.begin() as tx:
        tx.execute(text("UPDATE policies SET path = 'out/v1', broken = 'a file is gone' WHERE run_id = 1"))
        tx.execute(text("UPDATE policies SET path = 'out/v1' WHERE run_id = 2"))
        tx.execute(text("UPDATE runs SET status = 'running'"))
    said = PageOver(database).read("/api/runs/2")["waits_for"]
    assert said == find_wait_reason(database, 2) == "maker is rebuilding its checkpoint (a file is gone)."


# one run


def test_run_route_has_config_manifest_progress_and_counts(grown: Database) -> None:
    page = PageOver(grown)
    found = page.read(f"/api/runs/{number(grown, 'live')}")
    assert found["run"]["run"] == "live"
    assert found["run"]["status"] == "running"
    assert found["has"] == {"annotations": True, "prompts": True, "critic_calls": True, "agents": True, "evals": True}
    assert found["progress"]["iteration"] == 2
    assert found["progress"]["episodes"] == synthetic.PER_ITERATION
    assert found["reward_parts"] == ["format", "numeric_answer"]
    assert found["manifest"]["reward_sets"][0]["code_hash"] == "c" * 32
    assert {work["queue"] for work in found["open_work"]} == {"rollout", "train"}
    config = {row["key"]: row for row in found["config"]}
    assert config["dataset.name"]["origin"] == "given"
    assert config["rollout.group_size"]["origin"] == "default"
    assert PageOver(grown).read(f"/api/runs/{number(grown, 'forked')}")["has"]["prompts"]


def test_run_route_names_sources_and_derived_runs(database: Database) -> None:
    for group in start(database, submission("first")):
        play(database, group)
    with database.engine.begin() as tx:
        tx.execute(tables.policies.insert().values(run_id=1, version=1, kind="trained", path="out/v1", sha256="one"))
    fork = replace(submission("forked", kind="fork"), tasks=(), fork=Fork(1, 0), manifest={"fork": {"episode": 1, "step": 0}})
    planning.submit(database, fork)
    groups = values(database, "SELECT id FROM groups WHERE run_id <= 2 ORDER BY id")
    planning.submit(database, replace(submission("again"), tasks=(), groups=groups[1:]))
    planning.submit(database, replace(submission("on"), policy=find_stored_policy(database, "first", 1)))
    planning.submit(
        database, replace(submission("measured", kind="eval"), policy=PolicyRef("tiny", "hash", "out/v1", "one", 1))
    )
    page = PageOver(database)
    children = page.read("/api/runs/1")["children"]
    assert [(child["run"], child["kind"], child["what"]) for child in children] == [
        ("forked", "fork", "forks episode 1, step 0"),
        ("again", "train", "trains on 1 group"),
        ("on", "train", "begins with version 1"),
        ("measured", "eval", "measures version 1"),
    ]
    assert page.read("/api/runs/1")["sources"] == []
    again = page.read("/api/runs/3")
    assert [(source["run"], source["what"]) for source in again["sources"]] == [("first", "1 group"), ("forked", "1 group")]


def test_differences_route_shows_config_and_numbers(database: Database) -> None:
    for name, seed in (("one", 0), ("two", 5)):
        planning.submit(database, submission(name, seed=seed))
    page = PageOver(database)
    differences = page.read("/api/runs/1/against/2")
    assert differences["runs"] == [{"id": 1, "run": "one"}, {"id": 2, "run": "two"}]
    assert differences["config"] == [{"key": "seed", "one": 0, "other": 5}]
    assert {"name": "episodes done", "one": 0, "other": 0} in differences["numbers"]
    assert (differences["tasks"], differences["shared"]) == ([], 0)
    assert page.ask("/api/runs/1/against/9")[0] == 404
    assert page.ask("/api/runs/9/against/1")[0] == 404


def test_config_route_keeps_unknown_keys_and_fills_new_ones() -> None:
    config = {"seed": 3, "forgotten": {"option": "x"}, "agent": None}
    rows = {row["key"]: row for row in list_config(StoredConfig(config, None))}
    assert rows["forgotten.option"]["origin"] == rows["seed"]["origin"] == "given"
    assert {key for key, row in rows.items() if row["origin"] == "default"} == RunConfig().flat().keys() - {"seed"}


def test_config_route_names_origin_of_chosen_values() -> None:
    config = {"seed": 0, "epochs": 3, "env": "math", "model": {"tool_format": "hermes"}}
    chosen = {"seed": "flag", "epochs": "run.yaml", "env": "environment"}
    rows = {row["key"]: row["origin"] for row in list_config(StoredConfig(config, chosen))}
    assert {key: rows[key] for key in chosen} == chosen
    assert (rows["model.tool_format"], rows["model.path"]) == ("settled", "default")


# curves


def test_curves_route_equals_v_iterations(grown: Database) -> None:
    for name in ("large", "live"):
        found = curve(PageOver(grown).read(f"/api/runs/{number(grown, name)}/curves"))
        rows = iteration_rows.list_iterations(grown, IterationFilter(name), Paging(100)).rows
        assert len(found) == len(rows) > 1
        for mine, row in zip(found, rows, strict=True):
            shared = [column for column in row if column in mine and column not in MOVING]
            open_ones = ("tokens", "prompt_tokens", "sampled_tokens", "tool_calls", "tool_errors")
            for column in shared:
                wanted = None if column in open_ones and row["status"] == "running" else row[column]
                assert mine[column] == (pytest.approx(wanted) if isinstance(wanted, float) else wanted), (name, column)


def test_curves_spread_is_of_group_means(database: Database) -> None:
    trained(database, (1.0, 0.5))
    row = curve(PageOver(database).read("/api/runs/1/curves"))[0]
    assert (row["reward"], row["reward_low"], row["reward_high"]) == (0.375, 0.25, 0.5)
    assert (row["groups"], row["flat_groups"], row["length"]) == (2, 0, 2.0)


def test_curves_spread_ignores_group_without_reward(grown: Database) -> None:
    of_first = "iteration_id = (SELECT min(id) FROM iterations WHERE run_id = 1)"
    first, *others = values(grown, f"SELECT id FROM groups WHERE {of_first} ORDER BY id")
    with altered(grown, "groups", "mean_reward", f"id = {first}", None):
        means = values(grown, f"SELECT mean_reward FROM groups WHERE {of_first} AND mean_reward IS NOT NULL")
        row = curve(PageOver(grown).read("/api/runs/1/curves"))[0]
    assert len(means) == len(others) > 2
    assert row["reward_high"] - row["reward"] == pytest.approx(pstdev(means))


def test_curves_of_stored_groups_use_reward_set_of_run(grown: Database) -> None:
    run, page = number(grown, "again"), PageOver(grown)
    with altered(grown, "runs", "reward_set", f"id = {run}", "brevity"):
        first = curve(page.read(f"/api/runs/{run}/curves"))[0]
        groups = page.read(f"/api/runs/{run}/iterations/1")["groups"]
        told = page.read(f"/api/runs/{run}/tasks")["solved_means"]
    assert (first["groups"], first["flat_groups"], first["reward_low"]) == (16, None, None)
    earned = """
        SELECT sum(w.value * w.weight) FROM rewards w JOIN reward_sets s ON s.id = w.reward_set_id
        WHERE s.name = 'brevity' AND w.episode_id = {}"""
    for group in groups:
        found = [values(grown, earned.format(episode["id"]))[0] for episode in group["episodes"]]
        assert [episode["reward"] for episode in group["episodes"]] == found
        done = [each for each, episode in zip(found, group["episodes"], strict=True) if episode["status"] == "done"]
        assert group["mean_reward"] == pytest.approx(sum(done) / len(done))
        assert group["flat"] == (len({*done}) == 1)
    assert "brevity" in told


def test_curves_of_served_run_count_no_tokens(grown: Database) -> None:
    with altered(grown, "runs", "kind", "id = 1", "serve"):
        row = curve(PageOver(grown).read("/api/runs/1/curves"))[0]
    assert (row["tokens"], row["length"], row["tool_calls"]) == (None, None, None)


def test_episodes_route_pages_infinite_rewards_once(database: Database) -> None:
    trained(database, (1.0, 0.5))
    page, found, cursor = PageOver(database), [], ""
    with (
        altered(database, "episodes", "reward", "id = 1", math.inf),
        altered(database, "episodes", "reward", "id = 2", math.inf),
    ):
        while True:
            rows = page.read("/api/runs/1/episodes", sort="-reward", size=1, cursor=cursor)
            found += [row["id"] for row in rows["rows"]]
            cursor = rows["next"]
            if not cursor:
                break
    assert found[:2] == [2, 1]
    assert sorted(found) == values(database, "SELECT id FROM episodes WHERE run_id = 1 ORDER BY id")


def test_curves_take_reward_of_any_size(database: Database) -> None:
    trained(database, (1.0, 0.5))
    for large, small in ((1e300, 1e-300), (-1e308, 1e308), (5e-324, 0.0)):
        with (
            altered(database, "groups", "mean_reward", "id = 1", large),
            altered(database, "groups", "mean_reward", "id = 2", small),
        ):
            assert curve(PageOver(database).read("/api/runs/1/curves"))[0]["reward"] == 0.375


def test_curves_of_stored_groups_have_their_spread(grown: Database) -> None:
    rows = curve(PageOver(grown).read(f"/api/runs/{number(grown, 'again')}/curves"))
    assert [row["groups"] for row in rows] == [16, 0]
    assert rows[0]["reward_low"] < rows[0]["reward"] < rows[0]["reward_high"]
    assert rows[0]["staleness"] is None


def test_curves_cursor_resumes_before_first_open_iteration(grown: Database) -> None:
    page, run = PageOver(grown), number(grown, "live")
    whole = page.read(f"/api/runs/{run}/curves")
    assert whole["cursor"] == 1
    assert not whole["more"]
    assert page.read(f"/api/runs/{run}/curves?after=1")["rows"] == whole["rows"][1:]
    assert page.read(f"/api/runs/{run}/curves?after=99999999999999999999999")["rows"] == []
    assert {*whole["meanings"]} == {*whole["columns"]}
    few = curves.load_curves(grown, "large", 1, limit=2)
    assert ([row[0] for row in few.rows], few.more, few.cursor) == ([2, 3], True, 3)


def test_curves_have_evals_of_own_policies_with_intervals(grown: Database) -> None:
    (found,) = PageOver(grown).read(f"/api/runs/{number(grown, 'large')}/curves")["evals"]
    assert (found["version"], found["low"], found["mean_reward"], found["high"]) == (0, 0.4, 0.5, 0.6)
    assert found["run_id"] == number(grown, "large-eval-0")


def test_curves_before_first_update_are_empty(database: Database) -> None:
    start(database, submission())
    (row,) = curve(PageOver(database).read("/api/runs/1/curves"))
    assert row["status"] == "running"
    assert row["reward"] is row["loss"] is row["tokens"] is None


# events, the ledger, lanes


def test_events_route_pages_by_kind_and_cuts(database: Database) -> None:
    start(database, submission())
    with database.engine.begin() as tx:
        tx.execute(tables.events.insert().values(run_id=1, kind="waiting", detail="x" * 5000))
    page = PageOver(database)
    whole = page.read("/api/runs/1/events")["rows"]
    assert next(row["kind"] for row in whole) == "submitted"
    (row,) = page.read("/api/runs/1/events", kind="waiting")["rows"]
    assert len(row["detail"]) == LISTED_CHARS
    assert row["cut"] == {"detail": 5000}
    first = page.read("/api/runs/1/events", size=1)
    assert page.read("/api/runs/1/events", size=100, cursor=first["next"])["rows"] == whole[1:]


def test_ledger_route_windows_make_up_the_ledger(grown: Database) -> None:
    page, run, after, found = PageOver(grown), number(grown, "large"), 0, []
    while True:
        window = page.read(f"/api/runs/{run}/ledger", after=after, size=3)
        if not window["rows"]:
            break
        found += window["rows"]
        after = window["next"]
    assert found == ledger.count_fates(grown, "large")
    assert window["next"] == ""
    assert len(ledger.count_fates_after(grown, "large", 1, 50, episodes=synthetic.PER_ITERATION + 1)) == 1


def test_lanes_show_workers_of_newest_iterations(grown: Database) -> None:
    found = PageOver(grown).read(f"/api/runs/{number(grown, 'live')}/lanes")
    assert found["lanes"] == [
        {"queue": "rollout", "worker": "host:1:rollout"},
        {"queue": "train", "worker": "host:1:train"},
        {"queue": "tools", "worker": "host:1:tools"},
    ]
    kinds = {span["kind"]: found["lanes"][span["lane"]]["queue"] for span in found["spans"]}
    assert kinds == {"group": "rollout", "update": "train", "call": "tools"}
    assert (found["from"], found["to"], found["left_out"]) == (1, 2, 0)
    assert any(span["end"] is None for span in found["spans"])
    (update_span,) = (span for span in found["spans"] if span["kind"] == "update")
    assert (update_span["start"], update_span["end"]) == ("2026-01-01T00:01:29.300000Z", "2026-01-01T00:01:30Z")


def test_lanes_count_omitted_spans(grown: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PageOver(grown).read(f"/api/runs/{number(grown, 'large')}/lanes?from=2&to=3")
    monkeypatch.setattr(lanes, "MAX_SPANS", 100)
    found = PageOver(grown).read(f"/api/runs/{number(grown, 'large')}/lanes?from=2&to=3")
    assert len(found["spans"]) == 100
    assert found["left_out"] == len(whole["spans"]) - 100
    assert {span["iteration"] for span in found["spans"]} == {2, 3}


def test_lanes_of_missing_iterations_are_empty_or_clipped(grown: Database) -> None:
    page = PageOver(grown)
    for asked in ("from=5&to=2", "from=-9", "to=99999999999999999999", "from=99999999999999999999999&to=-99"):
        assert page.ask(f"/api/runs/1/lanes?{asked}")[0] == 200, asked


# iterations and episodes


def test_iteration_route_has_updates_groups_and_episodes(database: Database) -> None:
    trained(database)
    found = PageOver(database).read("/api/runs/1/iterations/1")
    assert found["iteration"]["iteration"] == 1
    assert found["updates"][0]["loss"] == 0.5
    assert [(group["slot"], group["borrowed"], group["flat"]) for group in found["groups"]] == [
        (0, False, False),
        (1, False, False),
    ]
    episodes = [episode for group in found["groups"] for episode in group["episodes"]]
    assert [episode["fate"] for episode in episodes] == ["trained"] * 4
    assert [episode["advantage"] for episode in episodes] == [0.5] * 4
    assert found["left_out"] == 0
    assert PageOver(database).ask("/api/runs/1/iterations/2")[0] == 404


def test_iteration_on_stored_groups_has_own_advantages(grown: Database) -> None:
    found = PageOver(grown).read(f"/api/runs/{number(grown, 'again')}/iterations/1")
    assert len(found["groups"]) == 16
    assert all(group["borrowed"] and group["run_id"] == number(grown, "old") for group in found["groups"])
    assert {episode["fate"] for group in found["groups"] for episode in group["episodes"]} >= {
        "trained",
        "no_variance",
        "failed",
    }


def test_iteration_route_omits_whole_groups_at_limit(grown: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration_rows, "MAX_EPISODES", 20)
    found = PageOver(grown).read(f"/api/runs/{number(grown, 'large')}/iterations/1")
    assert [len(group["episodes"]) for group in found["groups"]] == [8, 8]
    assert found["left_out"] == 14
    flat = "SELECT count(*) FROM groups g JOIN iterations i ON i.id = g.iteration_id WHERE i.run_id = :run AND i.number = 0"
    (equal,) = values(grown, f"{flat} AND g.std_reward = 0", run=number(grown, "large"))
    counted = [int(part.split()[0]) for part in found["counted"].split(", ") if "equal rewards" in part]
    assert (found["counted"].partition(",")[0], sum(counted)) == ("16", equal)
    assert equal > 2, "more than the groups that are shown"


def test_episodes_route_filters_sorts_and_pages(grown: Database) -> None:
    page, run = PageOver(grown), number(grown, "large")
    failed = page.read(f"/api/runs/{run}/episodes", status="failed", size=1000)["rows"]
    assert failed
    assert {row["status"] for row in failed} == {"failed"}
    sorted_ones = page.read(f"/api/runs/{run}/episodes", iteration=2, sort="reward", size=1000)["rows"]
    rewards = [row["reward"] for row in sorted_ones if row["reward"] is not None]
    assert rewards == sorted(rewards)
    assert {row["iteration"] for row in sorted_ones} == {2}
    assert page.read(f"/api/runs/{run}/episodes", text="%_!")["rows"] == []
    first = page.read(f"/api/runs/{run}/episodes", size=2)
    second = page.read(f"/api/runs/{run}/episodes", size=2, cursor=first["next"])
    assert {row["id"] for row in first["rows"]}.isdisjoint(row["id"] for row in second["rows"])


def test_episodes_route_cuts_huge_answer_and_nulls_non_numbers(database: Database) -> None:
    groups = start(database, submission())
    work = claim(database, groups[0])
    finish(database, work, 0)
    fail(database, work, 1)
    with database.engine.begin() as tx:
        tx.execute(update(tables.episodes).where(tables.episodes.c.id == 1).values(final_answer="\u202e<script>" * 1_000_000))
    rows = PageOver(database).read("/api/runs/1/episodes")["rows"]
    assert len(rows[0]["final_answer"]) == LISTED_CHARS
    assert rows[0]["cut"] == {"final_answer": 9_000_000}
    assert "cut" not in rows[1]


def test_curves_show_infinity_as_null(database: Database) -> None:
    trained(database)
    for odd in (float("inf"), float("-inf")):
        with altered(database, "updates", "grad_norm", "id = 1", odd):
            (row,) = (each for each in curve(PageOver(database).read("/api/runs/1/curves")) if each["loss"] is not None)
            assert row["grad_norm"] is None


# values that are too large to show


def test_cut_value_reports_full_length() -> None:
    assert cut_value("x" * 5, 4) == ("xxxx", 5)
    assert cut_value("x" * 4, 4) == ("xxxx", None)
    assert cut_value({"a": 1}) == ({"a": 1}, None)
    assert cut_value(None) == (None, None)
    shown, size = cut_value({"a": "x" * SHOWN_CHARS})
    assert isinstance(shown, str)
    assert size == SHOWN_CHARS + 9
    assert cut_rows([{"a": 1, "b": "short"}]) == [{"a": 1, "b": "short"}]


def test_cut_value_makes_text_of_deep_value() -> None:
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    assert cut_value(deep) == ("[" * 60 + "1" + "]" * 60, 121)
    for _ in range(100_000):
        deep = [deep]
    assert cut_value(deep)[1] == 0


def test_runs_route_returns_config_values_and_alike(database: Database) -> None:
    for name, seed, epochs in (("one", 0, 1), ("two", 5, 1), ("three", 0, 2)):
        planning.submit(database, submission(name, seed=seed, epochs=epochs))
    page = PageOver(database)
    three, two, one = page.read("/api/runs", config="seed,never.there")["rows"]
    assert [row["config"] for row in (one, two)] == [{"seed": 0, "never.there": None}, {"seed": 5, "never.there": None}]
    assert one["alike"] == two["alike"] != three["alike"]
    assert page.read("/api/runs")["rows"][0]["config"] == {}
    assert page.ask("/api/runs?config=" + "x" * 1001)[0] == 422
