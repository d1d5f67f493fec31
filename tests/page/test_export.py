"""A run as one file: what is in it, what it leaves out, and that it works in a browser that reaches nothing."""

import base64
import errno
import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from sqlalchemy import text

from agentrl.workers.page import export, one_file
from agentrl.workers.page.read_only import Busy, ReadOnlyStore
from agentrl.workers.page.service import STATIC
from agentrl.workflow.errors import ConfigError, ConflictError, NotFoundError
from agentrl.workflow.settings import Settings
from agentrl.workflow.store import planning, search_rounds, tags_and_notes, token_removal, train_commits
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import curves
from agentrl.workflow.tables import schema as tables
from bench.performance import synthetic
from tests.search.test_search_rows import BETTER, SEED, begun, planned, rolled_out
from tests.support.browser import Watched, chromium, settle
from tests.support.page_answers import PageOver
from tests.support.played_runs import claim_training, play, start, submission, update_of, values

LIMIT = 20_000_000
EVIL = "</script><script>document.title='owned'</script><!-- \u2028 <img src=x onerror=alert(1)>"


def store(database: Database) -> ReadOnlyStore:
    return ReadOnlyStore(Settings(database_url=database.url.render_as_string(hide_password=False)))


def recorded(file: Path) -> Any:
    """What the file holds for the page."""
    (found,) = re.findall(r'<script type="application/json" id="recorded">(.*?)</script>', file.read_text("utf-8"), re.DOTALL)
    return json.loads(found)


@pytest.fixture
def trained(database: Database) -> Database:
    """The run `first` of one iteration, which is done, with a tag; the run `second`."""
    for group, reward in zip(start(database, submission()), (1.0, 0.25), strict=True):
        ended = play(database, group, reward)
    assert ended.iteration is not None
    work = claim_training(database, ended.iteration)
    train_commits.commit_update(database, work, update_of(work), 3)
    tags_and_notes.change_tags(database, "first", ["good"])
    planning.submit(database, submission("second"))
    return database


def test_export_records_small_run_under_page_paths(trained: Database, tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    assert export.write_export(store(trained), "first", out, [], LIMIT) == ""
    file = recorded(out)
    assert (file["run"], file["left_out"]) == (1, "")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", file["made_at"])
    groups = values(trained, "SELECT id FROM groups WHERE run_id = 1 ORDER BY id")
    episodes = values(trained, "SELECT id FROM episodes WHERE run_id = 1 ORDER BY id")
    tasks = values(trained, "SELECT DISTINCT task_id FROM groups WHERE run_id = 1")
    lists = (
        *("curves", "events?size=500&sort=-id", "lanes", "episodes?size=50", "tasks?size=25", "annotations?size=100"),
        *("prompts", "critic-calls?size=20", "ledger", "ledger?after=1", "iterations/1", "examples", "verdict"),
        *(f"tasks/{task}" for task in tasks),
    )
    wanted = {"api/store", "api/runs?size=50", "api/runs/1", "api/evals?measures=1&size=200", "api/views"}
    wanted |= {f"api/runs/1/{path}" for path in lists} | {f"api/groups/{group}" for group in groups}
    wanted |= {f"api/episodes/{each}{rest}" for each in episodes for rest in ("", "/tokens?size=4096&start=0")}
    assert {*file["answers"]} == wanted
    page = PageOver(trained)
    for path in ("api/runs/1/curves", f"api/episodes/{episodes[0]}", f"api/groups/{groups[0]}"):
        assert file["answers"][path] == page.read(f"/{path}")


def test_export_of_run_without_tokens_has_all_else(trained: Database, tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    export.write_export(store(trained), "first", out, [1], LIMIT)
    before = {*recorded(out)["answers"]}
    token_removal.remove_tokens(trained, *token_removal.count_tokens(trained, ["first"]))
    assert export.write_export(store(trained), "first", out, [1], LIMIT, force=True) == ""
    after = recorded(out)["answers"]
    assert {*after} == {path for path in before if "/tokens" not in path} < before
    assert "were removed on" in after["api/episodes/1"]["tokens_removed"]


def test_export_holds_nothing_of_other_runs_or_folders(trained: Database, tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    export.write_export(store(trained), "1", out, [], LIMIT)
    answers = recorded(out)["answers"]
    assert [row["run"] for row in answers["api/runs?size=50"]["rows"]] == ["first"]
    assert answers["api/store"]["place"] == str(trained.url.database).rpartition("/")[2]
    assert '"second"' not in out.read_text("utf-8")


def test_export_confines_text_of_any_kind(trained: Database, tmp_path: Path) -> None:
    with trained.engine.begin() as tx:
        tx.execute(
            text("UPDATE steps SET text = :evil, content_length = 10000, thought = :evil, thought_start = NULL"), {"evil": EVIL}
        )
        tx.execute(text("UPDATE runs SET reason = :evil WHERE id = 1"), {"evil": EVIL})
    out = tmp_path / "run.html"
    export.write_export(store(trained), "first", out, [], LIMIT)
    document = out.read_text("utf-8")
    assert document.count("</script>") == 3
    assert "<!--" not in document
    assert recorded(out)["answers"]["api/runs/1"]["run"]["reason"] == EVIL


def test_export_policy_names_its_script_and_style(trained: Database, tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    export.write_export(store(trained), "first", out, [], LIMIT)
    document = out.read_text("utf-8")
    (script,) = re.findall(r'<script type="module">(.*?)</script>', document, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", document, re.DOTALL)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', document)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (script, style)]
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digests[0]}'; style-src 'sha256-{digests[1]}';")
    assert document.index("Content-Security-Policy") < document.index("<style>")
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)[^\"$]", document.split("<body>")[0])
    assert "\nimport " not in script


def test_export_joins_each_module_once_after_its_imports() -> None:
    code = one_file.join_modules(STATIC, "app.js")
    made = re.findall(r"^const \$(\w+) = \(\(\) => \{$", code, re.MULTILINE)
    assert sorted(made) == sorted(
        str(file.relative_to(STATIC).with_suffix("")).replace("/", "_") for file in STATIC.rglob("*.js")
    )
    for name in made:
        used = code.index(f"const ${name} = ")
        assert all(found.start() > used for found in re.finditer(rf"= \${name}(?:\.default)?;$", code, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_export_at_limit_keeps_some_and_names_omissions(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.engine.begin() as tx:
        synthetic.fill(tx, {"large": 6})
    last, named = values(database, "SELECT max(id) FROM episodes WHERE run_id = 1")[0], 3
    whole = tmp_path / "whole.html"
    monkeypatch.setattr(export, "SILENCE_SECONDS", 0.0)
    lines = list[str]()
    assert export.write_export(store(database), "large", whole, [], 1_000_000_000, progress=lines.append) == "", (
        "all 96 tasks too"
    )
    assert re.fullmatch(r"[\d,]+ answers of the page, \d+\.\d MB so far", lines[-1])
    out = tmp_path / "run.html"
    limit = 2_500_000
    assert whole.stat().st_size > limit
    said = export.write_export(store(database), "large", out, [named, named], limit)
    assert out.stat().st_size <= limit
    file = recorded(out)
    assert file["left_out"] == said
    assert re.fullmatch(r"Left out to stay below 2 MB: .*[\d,]+ of [\d,]+ episodes\.", said)
    taken = {int(path.split("/")[2]) for path in file["answers"] if re.fullmatch(r"api/episodes/\d+", path)}
    assert {named, last} <= taken
    assert values(database, f"SELECT max(reward) FROM episodes WHERE id IN ({', '.join(map(str, taken))})") == values(
        database, "SELECT max(reward) FROM episodes WHERE run_id = 1"
    )
    (run,) = values(database, "SELECT id FROM runs WHERE name = 'large'")
    listed = file["answers"][f"api/runs/{run}/episodes?size=50"]
    assert taken <= {row["id"] for row in listed["rows"]}
    assert listed["next"] != ""
    for episode in taken:  # each with its tokens
        assert f"api/episodes/{episode}/tokens?size=4096&start=0" in file["answers"]
    assert f"api/groups/{file['answers'][f'api/episodes/{named}']['episode']['group_id']}" in file["answers"]


def test_export_overwrites_file_only_with_force(trained: Database, tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    out.write_text("mine")
    with pytest.raises(ConflictError, match="exists"):
        export.write_export(store(trained), "first", out, [], LIMIT)
    assert out.read_text() == "mine"
    export.write_export(store(trained), "first", out, [], LIMIT, force=True)
    assert recorded(out)["run"] == 1
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".html"] == ["run.html"]


def test_export_writes_only_regular_files_and_follows_links(trained: Database, tmp_path: Path) -> None:
    pipe, circle = tmp_path / "pipe", tmp_path / "circle"
    os.mkfifo(pipe)
    circle.symlink_to(circle)
    nul = tmp_path / "nul"
    nul.symlink_to("/dev/null")
    for place in (tmp_path, tmp_path / "none" / "run.html", pipe, circle, nul, tmp_path / f"{'x' * 300}.html"):
        with pytest.raises(ConfigError, match="Cannot write"):
            export.write_export(store(trained), "first", place, [], LIMIT, force=True)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    (tmp_path / "link.html").symlink_to("real.html")
    export.write_export(store(trained), "first", tmp_path / "link.html", [], LIMIT)
    assert (tmp_path / "link.html").is_symlink()
    assert recorded(tmp_path / "real.html")["run"] == 1


def test_export_works_without_hard_links(trained: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    out = tmp_path / "run.html"
    export.write_export(store(trained), "first", out, [], LIMIT)
    assert recorded(out)["run"] == 1
    with pytest.raises(ConflictError, match="exists"):
        export.write_export(store(trained), "first", out, [], LIMIT)


def test_export_failure_is_one_sentence(trained: Database, tmp_path: Path) -> None:
    planning.submit(trained, submission("third"))
    of_third = values(trained, "SELECT min(id) FROM episodes WHERE run_id = 3")[0]
    out = tmp_path / "run.html"
    for run, episodes, limit, error, said in (
        ("firsd", [], LIMIT, NotFoundError, "There is no run 'firsd'"),
        ("first", [999], LIMIT, NotFoundError, "There is no episode 999"),
        ("first", [2**70], LIMIT, NotFoundError, "There is no episode"),
        ("first", [of_third], LIMIT, ConfigError, "belongs to run 3, not to run 1"),
        ("first", [], 1000, ConfigError, "curves and lists alone need"),
    ):
        with pytest.raises(error, match=said):
            export.write_export(store(trained), run, out, episodes, limit)
    assert not out.exists()


def test_export_retries_busy_store_then_gives_up(trained: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "AGAIN_SECONDS", 0)
    left, ask = [3], ReadOnlyStore.ask

    def sometimes(self: ReadOnlyStore, query: Any) -> Any:
        left[0] -= 1
        if left[0] in (1, 0):
            raise Busy("The store cannot be read now: locked.")
        return ask(self, query)

    monkeypatch.setattr(ReadOnlyStore, "ask", sometimes)
    out = tmp_path / "run.html"
    export.write_export(store(trained), "first", out, [], LIMIT)
    assert out.exists()
    left[0] = 2

    def never(self: ReadOnlyStore, query: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Busy("The store cannot be read now: locked.")
        return ask(self, query)

    monkeypatch.setattr(ReadOnlyStore, "ask", never)
    with pytest.raises(Busy):
        export.write_export(store(trained), "first", tmp_path / "other.html", [], LIMIT)
    assert not (tmp_path / "other.html").exists()


@pytest.mark.slow
def test_export_works_in_offline_browser(trained: Database, tmp_path: Path) -> None:
    with trained.engine.begin() as tx:
        tx.execute(text("UPDATE steps SET text = :evil, content_length = 10000"), {"evil": EVIL})
        tx.execute(text("UPDATE episodes SET error_class = 'AgentError', error = 'It broke.' WHERE id = 1"))
    out = tmp_path / "run.html"
    export.write_export(store(trained), "first", out, [], LIMIT)
    answers = recorded(out)["answers"]
    numbers = {path.split("/")[2] for path in answers if path.startswith("api/groups/")}
    episode = next(path.split("/")[2] for path in answers if path.startswith("api/episodes/"))
    tabs = (
        "curves",
        "iterations",
        "episodes",
        "tasks",
        "ledger",
        "workers",
        "events",
        "config",
        "annotations",
        "prompts",
        "evals",
    )
    with chromium() as browser:
        page = browser.new_context(offline=True).new_page()
        watched = Watched(page)
        page.goto(f"file://{out}")
        watched.see("first")
        page.wait_for_selector(".errors [title='not in this file']:has-text('AgentError')")
        assert page.locator(".errors a").count() == 0
        places = [*(f"/?tab={tab}" for tab in tabs), "/run/1/iteration/1", f"/group/{min(numbers)}", "/runs"]
        places += [f"/episode/{episode}", f"/episode/{episode}?tab=tokens", f"/episode/{episode}?tab=why"]
        for place in places:
            page.evaluate("where => { location.hash = where }", f"#{place}")
            settle(page)
            assert page.locator("main .problem").count() == 0, (place, page.inner_text("main")[:300])
        assert page.title() != "owned"
        assert watched.wrong == []
        assert {unquote(host) for host in watched.hosts} <= {""}


def test_export_shows_search_tree_and_candidates(database: Database, tmp_path: Path) -> None:
    work = begun(database)
    search_rounds.add_round(database, work, planned(database, work, "choose", SEED, BETTER))
    work = rolled_out(database, work, (0.25, 0.75))
    request = [{"role": "user", "content": "Improve it."}]
    search_rounds.record_answer(database, work.run_id, "critic", "k", request, f"<prompt>{EVIL}</prompt>", 0.5)
    evil = {**SEED, "prompt": f"{EVIL} {{question}}"}
    search_rounds.add_round(database, work, planned(database, work, "held_out", SEED, evil))
    search_rounds.finish_search(database, rolled_out(database, work, (0.0, 1.0)), evil)
    out = tmp_path / "run.html"
    assert export.write_export(store(database), "first", out, [], LIMIT) == ""
    answers = recorded(out)["answers"]
    page_over = PageOver(database)
    for path in ("search", "search/0", "search/1", "search/2"):
        assert answers[f"api/runs/1/{path}"] == page_over.read(f"/api/runs/1/{path}"), path
    with chromium() as browser:
        page = browser.new_context(offline=True).new_page()
        watched = Watched(page)
        page.goto(f"file://{out}")
        watched.see("The best version (prompt @2) solves 1 of 1 held-out task; the first solved 0.")
        for label, row in (("prompt @1", "step by step"), ("prompt @2", "owned")):
            page.click(f"main td a:text-is('{label}')")
            page.wait_for_selector(f".candidate[aria-label='Version {label}'] .diff .added:has-text('{row}')")
            assert page.locator(".candidate tbody tr").count() == 2, label
            assert page.locator("main .problem").count() == 0
        assert page.title() != "owned"
        assert watched.wrong == []


def test_export_records_every_page_of_curves_turns_and_tokens(
    trained: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "TOKENS", 2)
    monkeypatch.setattr(export, "EPISODES", "episodes?size=1")
    load = curves.load_curves
    monkeypatch.setattr(curves, "load_curves", lambda db, run, after=0: load(db, run, after, 1))
    with trained.engine.begin() as tx:
        (policy,) = tx.execute(text("SELECT min(id) FROM policies WHERE run_id = 1")).scalars()
        row = {"run_id": 1, "epoch": 0, "policy_id": policy, "status": "done"}
        tx.execute(tables.iterations.insert(), [{**row, "number": n} for n in range(5, 8)])
    out = tmp_path / "run.html"
    assert export.write_export(store(trained), "first", out, [], LIMIT) == ""
    answers = recorded(out)["answers"]
    numbers = values(trained, "SELECT number + 1 FROM iterations WHERE run_id = 1 ORDER BY number")
    assert {f"api/runs/1/curves?after={number}" for number in numbers[:-1]} <= {*answers}
    assert {f"api/runs/1/iterations/{number}" for number in numbers} <= {*answers}
    listed = answers["api/runs/1/episodes?size=1"]
    assert [row["id"] for row in listed["rows"]] == values(trained, "SELECT id FROM episodes WHERE run_id = 1 ORDER BY id")
    assert listed["next"] == ""
    episode = next(path for path in answers if path.startswith("api/episodes/"))
    total = answers[f"{episode}/tokens?size=2&start=0"]["total"]
    assert {f"{episode}/tokens?size=2&start={start}" for start in range(0, total, 2)} <= {*answers}
