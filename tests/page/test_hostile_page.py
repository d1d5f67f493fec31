"""The page over stores that mean harm, hold nothing, or hold what nobody expected: nothing runs, and it says what is so."""

import csv
import json
import os
import random
import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from playwright.sync_api import Browser, BrowserContext, Page
from sqlalchemy import Connection, text

from agentrl.workflow.errors import NotFoundError, ServiceError
from agentrl.workflow.store import planning, steps
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import downgrade, open_database
from agentrl.workflow.tables import schema
from bench.performance import synthetic
from tests.conftest import copy_store
from tests.support import played_runs
from tests.support.browser import Service, Watched, service, settle
from tests.support.hostile_rows import ATTACKS, FORMULA, MIXED, fill_with, make_hostile_model, poison
from tests.support.own_postgres import own_postgres

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]

TABS = ("curves", "iterations", "episodes", "tasks", "ledger", "workers", "annotations", "prompts", "evals", "events", "config")
INNOCENT = r"""() => {
  const found = [];
  const links = ["href", "src", "xlink:href", "action", "formaction", "data", "srcdoc", "poster", "background", "ping"];
  const safe = /^(#|(\.\/)?static\/|data:image\/svg\+xml;base64,)/;
  for (const each of document.querySelectorAll("*")) {
    for (const { name, value } of each.attributes) {
      if (/^on/i.test(name)) found.push(`${each.tagName} ${name}`);
      if (links.includes(name) && !safe.test(value)) found.push(`${each.tagName} ${name}=${value}`);
      if (name === "style" && /url|expression|import/i.test(value)) found.push(`${each.tagName} style=${value}`);
    }
  }
  const file = location.protocol === "file:";
  const main = new URL("static/app.js", location.href).href;
  const isOwn = (each) => (file ? ["application/json", "text/plain", "module"].includes(each.type) : each.src === main);
  const scripts = [...document.scripts];
  if (scripts.length !== (file ? 3 : 1) || !scripts.every(isOwn)) found.push(`${scripts.length} scripts`);
  const foreign = "iframe, object, embed, base, img, frame, math, foreignObject, animate, set, use, form[action], body style";
  for (const each of document.querySelectorAll(foreign)) found.push(each.tagName);
  if (window.pwned !== undefined || {}.pwned !== undefined) found.push(`pwned ${window.pwned}`);
  const hidden = /[\u0000-\u0008\u000b-\u001f\u200b\u202e\u2066]/.exec(document.body.innerText + document.title);
  if (hidden) found.push(`hidden ${hidden[0].charCodeAt(0)}: ${hidden.input.slice(hidden.index - 60, hidden.index + 20)}`);
  return found;
}"""
"""What is in the page that a text of the store must not have brought there."""


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    yield made
    made.close()


def store_in(home: Path, migrated: Path) -> Database:
    """A migrated store of a home of its own."""
    copy_store(home, migrated)
    return open_database(f"sqlite:///{home / 'agentrl.db'}")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, migrated_file: Path) -> Path:
    """The home of a store that means harm."""
    home = tmp_path_factory.mktemp("hostile")
    model = make_hostile_model(home)
    with closing(store_in(home, migrated_file)) as database, database.engine.begin() as tx:
        synthetic.fill(tx, {"mine": 2, "sought": 3, "live": 2})
        poison(tx, model)
        make_search(tx)
    return home


def make_search(tx: Connection) -> None:
    """Makes run 2 a search: its versions are one text's, each made from the one before by a critic, and the last is huge."""
    for statement in (
        "UPDATE runs SET kind = 'search' WHERE id = 2",
        "UPDATE resources SET name = (SELECT min(name) FROM resources WHERE run_id = 2) WHERE run_id = 2",
        "UPDATE resources SET parent_version = version - 1 WHERE run_id = 2 AND version > 0",
        "UPDATE resources SET chosen = (version = 1) WHERE run_id = 2",
        "UPDATE resources SET text = text || replace(hex(zeroblob(:big)), '00', char(10) || text) "
        "WHERE run_id = 2 AND version > 0",
        "UPDATE critic_calls SET answer = answer || (SELECT group_concat(text, '') FROM resources WHERE run_id = 2) "
        "WHERE run_id = 2",
    ):
        tx.execute(text(statement), {"big": 1000} if ":big" in statement else {})


@pytest.fixture(scope="module")
def served(hostile: Path) -> Iterator[Service]:
    with service(hostile) as made:
        yield made


def look_at(page: Page, served: Service, address: str) -> None:
    """Goes to the address, and waits until what is there is read."""
    go_to(page, f"{served.url}{address}")


def go_to(page: Page, url: str) -> None:
    page.goto(url)  # what differs in its hash alone is no new document: the page itself goes there
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.wait_for_selector("main h1, main .problem")
    settle(page)


def unfold(page: Page) -> None:
    """Opens whatever is folded, twice: a fold may hold others."""
    for _ in range(2):
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        page.evaluate("for (const each of document.querySelectorAll('main .text > button.more')) each.click()")
        page.wait_for_timeout(50)
    settle(page)


def ask(home: Path, query: str) -> list[tuple[Any, ...]]:
    """Rows of a home's store."""
    with closing(open_database(f"sqlite:///{home / 'agentrl.db'}")) as database, database.read() as tx:
        return [tuple(row) for row in tx.execute(text(query))]


def hostile_views(home: Path) -> dict[str, str]:
    """Every view of the hostile store, and the choices of an address."""
    ((group, task, episode, failed),) = ask(
        home,
        "SELECT g.id, g.task_id, min(e.id), (SELECT min(id) FROM episodes WHERE status = 'failed' AND run_id = 1) "
        "FROM groups g JOIN episodes e ON e.group_id = g.id WHERE g.run_id = 1 "
        "AND e.status = 'done' GROUP BY g.id ORDER BY g.id LIMIT 1",
    )
    evals = [row[0] for row in ask(home, "SELECT run_id FROM evals ORDER BY run_id")]
    fork = ask(home, "SELECT id FROM episodes WHERE parent_id IS NOT NULL LIMIT 1")[0][0]
    tag = ask(home, "SELECT tag FROM run_tags WHERE run_id = 1")[0][0]
    ((sought, found),) = ask(home, "SELECT min(group_id), min(id) FROM episodes WHERE run_id = 2")
    resources = [row[0] for row in ask(home, "SELECT id FROM resources WHERE run_id = 1 ORDER BY id LIMIT 2")]
    all_rows = urlencode({"q": "SELECT * FROM v_episodes ORDER BY id LIMIT 200"})
    column = ATTACKS[0].replace('"', '""')
    drawn = urlencode({"q": f'SELECT run, id, reward AS "{column}" FROM v_episodes LIMIT 200', "as": "chart"})
    wrong = urlencode({"q": f"SELECT '{ATTACKS[0]}' FROM \"{ATTACKS[1].replace(chr(34), '')}\""})
    choices = ("tab", "x", "with", "charts", "color", "sort", "text", "find", "cols", "group", "pair", "tokens", "a", "b")
    chosen = urlencode(dict.fromkeys(choices, ATTACKS[0]))
    charts = urlencode({"charts": f"v_steps.mean_logprob,{ATTACKS[0]}.{ATTACKS[1]}", "with": "2"})
    return {
        "runs": "#/",
        "a tag": f"#/?{urlencode({'tag': tag})}",
        "a search": f"#/?{urlencode({'text': ATTACKS[0]})}",
        "runs with columns": "#/?group=seed&cols=dataset.name,name,-tokens",
        "run": "#/run/1",
        "live run": "#/run/3",
        "two runs": "#/run/1?with=2",
        **{tab: f"#/run/1?tab={tab}" for tab in TABS},
        "live workers": "#/run/3?tab=workers",
        "two prompts": f"#/run/1?tab=prompts&a={resources[0]}&b={resources[1]}",
        "all of the config": "#/run/1?tab=config&which=all",
        "iteration": "#/run/1/iteration/1",
        "live iteration": "#/run/3/iteration/2",
        "search run": "#/run/2",
        "candidate": "#/run/2?candidate=2",
        "first candidate": "#/run/2?candidate=0",
        "candidate's episodes": f"#/run/2?tab=episodes&texts_of={sought}",
        "candidate's episode": f"#/episode/{found}?list=run%3D2%26texts_of%3D{sought}",
        "critic": "#/run/2?tab=prompts",
        "group": f"#/group/{group}",
        "episode": f"#/episode/{episode}",
        "failed episode": f"#/episode/{failed}",
        "fork": f"#/episode/{fork}",
        "search": "#/run/1?tab=episodes&text=script&sort=-answer&error_class=%3Cscript%3E",
        "list": f"#/episode/{episode}?list=run%3D1%26text%3D%253Cscript%253E",
        "tokens": f"#/episode/{episode}?tab=tokens",
        "advantages": f"#/episode/{episode}?tab=tokens&color=advantage",
        "transcript in colours": f"#/episode/{episode}?tokens=logprob",
        "two transcripts": f"#/run/1?with=2&pair={episode}-{failed}&tokens=advantage",
        "why": f"#/episode/{episode}?tab=why",
        "said": f"#/episode/{episode}?tab=said",
        "task": f"#/run/1/task/{task}",
        "compare": f"#/compare?a={evals[0]}&b={evals[1]}",
        "eval": f"#/run/{evals[0]}",
        "sql": f"#/sql?{all_rows}",
        "sql as a chart": f"#/sql?{drawn}",
        "wrong sql": f"#/sql?{wrong}",
        "no place": f"#/{quote(ATTACKS[0], safe='')}/{quote(ATTACKS[2], safe='')}",
        "no run": f"#/run/{quote(ATTACKS[2], safe='')}",
        "choices": f"#/run/1?{chosen}",
        "episode's choices": f"#/episode/{episode}?{chosen}",
        "charts": f"#/run/1?{charts}",
    }


BEST = "SELECT id, group_id FROM episodes WHERE run_id = 1 AND status = 'done' ORDER BY reward DESC, id DESC LIMIT 1"
DONE = "SELECT group_id, task_id, id FROM episodes WHERE status = 'done' ORDER BY id LIMIT 1"
REFUSED = {"wrong sql", "no place", "no run", "choices", "charts"}
"""Addresses that ask for what there is not: a refusal is an answer there, and a browser notes its status."""


def test_hostile_text_runs_in_no_view(hostile: Path, served: Service, context: BrowserContext) -> None:
    watched = Watched(context.new_page())
    bad: dict[str, Any] = {}
    shown = 0
    for name, address in hostile_views(hostile).items():
        look_at(watched.page, served, address)
        unfold(watched.page)
        problem = watched.page.query_selector("main .problem")
        if name in ("search run", "candidate"):
            watched.page.wait_for_selector(".candidate .diff .removed")
            watched.page.wait_for_selector(".candidate .message")
        found = watched.page.evaluate(INNOCENT)
        shown += "pwned" in watched.page.inner_text("main")
        found += [f"problem: {problem.inner_text()[:300]}"] if problem and name not in REFUSED else []
        found += [said for said in watched.wrong if not (name in REFUSED and "status of 4" in said)]
        bad |= {name: found} if found else {}
        watched.wrong.clear()
    assert bad == {}
    assert shown >= 30  # as texts
    assert watched.hosts <= {f"127.0.0.1:{served.port}", "blank", ""}


def test_hostile_text_runs_on_no_hover_or_click(hostile: Path, served: Service, context: BrowserContext) -> None:
    watched = Watched(context.new_page())
    page = watched.page
    views = hostile_views(hostile)
    look_at(page, served, views["tokens"])
    page.locator(".strip .t").first.hover()
    page.wait_for_selector(".token-facts b")
    assert "pwned" in page.inner_text(".token-facts") + page.inner_text(".strip")
    assert page.evaluate(INNOCENT) == []
    for view, selector in {"workers": "rect.work", "iteration": "circle", "run": ".u-over"}.items():
        look_at(page, served, views[view])
        page.locator(selector).first.hover(force=True)
        assert page.evaluate(INNOCENT) == [], view
    look_at(page, served, views["runs"])
    page.locator("button.tag").first.click()
    page.wait_for_selector("main tbody tr")
    page.locator("main tbody tr a").first.click()
    page.wait_for_selector(".run-head")
    assert page.evaluate(INNOCENT) == []
    assert watched.wrong == []
    assert watched.hosts <= {f"127.0.0.1:{served.port}"}


def test_hostile_rows_make_no_formula_in_csv(served: Service, context: BrowserContext, tmp_path: Path) -> None:
    page = context.new_page()
    more = "-1.5 AS number, char(10) || '=1', '＝1+1'"
    query = f'SELECT final_answer AS "=1+1", stop_reason, run, task, {more} FROM v_episodes ORDER BY id LIMIT 300'
    look_at(page, served, f"#/sql?{urlencode({'q': query})}")
    with page.expect_download() as told:
        page.click("button:text-is('CSV')")
    told.value.save_as(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 301
    assert [cell for row in rows for cell in row if cell.startswith(FORMULA) and cell != "-1.5"] == []
    assert any(cell.startswith("'=HYPERLINK") for row in rows for cell in row)
    assert any(cell.startswith("'+1+cmd") for row in rows for cell in row)


def test_hostile_run_runs_nothing_in_export(hostile: Path, context: BrowserContext, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    ended = command(hostile, "ui", "--export", "1", "--out", str(file))
    assert ended.returncode == 0, ended.stdout
    watched = Watched(context.new_page())
    page = watched.page
    bad: dict[str, Any] = {}
    views = hostile_views(hostile)
    (best,) = ask(hostile, BEST)
    views |= {"episode": f"#/episode/{best[0]}", "group": f"#/group/{best[1]}"}
    views |= {tab: f"#/episode/{best[0]}?tab={tab}" for tab in ("tokens", "why", "said")}
    for name in ("run", *TABS, "iteration", "group", "episode", "tokens", "why", "said", "task", "no place"):
        go_to(page, f"{file.as_uri()}{views[name]}")
        unfold(page)
        problem = page.query_selector("main .problem")
        found = [*page.evaluate(INNOCENT), *watched.wrong]
        found += [f"problem: {problem.inner_text()[:300]}"] if problem and name != "no place" else []
        bad |= {name: found} if found else {}
        watched.wrong.clear()
    ended = command(hostile, "ui", "--export", "2", "--out", str(tmp_path / "search.html"))
    assert ended.returncode == 0, ended.stdout
    for name in ("search run", "candidate", "first candidate", "critic"):
        go_to(page, f"{(tmp_path / 'search.html').as_uri()}{views[name]}")
        unfold(page)
        assert page.query_selector("main .problem") is None, (name, page.inner_text("main .problem"))
        bad |= {name: found} if (found := [*page.evaluate(INNOCENT), *watched.wrong]) else {}
        watched.wrong.clear()
    assert bad == {}
    assert watched.hosts <= {"", "blank"}


def test_hostile_search_prints_no_control_characters(hostile: Path) -> None:
    for name in ("prompts", "watch"):
        ended = command(hostile, name, "2")
        assert ended.returncode == 0, ended.stdout
        assert "pwned" in ended.stdout
        assert [char for char in "\x1b\x07\u202e\u200b" if char in ended.stdout] == []


# Bad input


def command(home: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """An `agentrl` command over a home, with what it said."""
    environment = {**os.environ, "AGENTRL_HOME": str(home)}
    environment.pop("AGENTRL_DATABASE_URL", None)
    run = [sys.executable, "-m", "agentrl.cli", *words]
    return subprocess.run(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)


def test_page_of_empty_store_says_what_to_type(tmp_path: Path, migrated_file: Path, context: BrowserContext) -> None:
    store_in(tmp_path / "home", migrated_file).close()
    watched = Watched(context.new_page())
    with service(tmp_path / "home") as served:
        look_at(watched.page, served, "#/")
        assert "There is no run yet. Make one: agentrl submit" in watched.page.inner_text("main")
        look_at(watched.page, served, "#/compare")
        assert "agentrl eval" in watched.page.inner_text("main")
        look_at(watched.page, served, "#/sql")
        assert "No rows" in watched.page.inner_text("main")
        assert watched.wrong == []
        for nothing in ("run/1", "run/1/iteration/1", "run/1/task/1", "group/1", "episode/1"):
            look_at(watched.page, served, f"#/{nothing}")
            assert "There is no" in watched.page.inner_text("main .problem"), nothing
        watched.page.click("header >> text=runs")
        watched.see("There is no run yet")


def test_page_without_readable_store_says_what_to_type(tmp_path: Path, migrated_file: Path) -> None:
    ended = command(tmp_path / "nothing", "ui", "--no-browser", "--port", "0")
    assert ended.returncode == NotFoundError.exit_code, ended.stdout
    assert "There is no store" in ended.stdout
    assert "agentrl submit" in ended.stdout
    with closing(store_in(tmp_path / "old", migrated_file)) as database:
        downgrade(database, "0012")
    ended = command(tmp_path / "old", "ui", "--no-browser", "--port", "0")
    assert ended.returncode == ServiceError.exit_code, ended.stdout
    assert "revision 0012" in ended.stdout
    assert "agentrl db upgrade" in ended.stdout
    with closing(store_in(tmp_path / "new", migrated_file)) as database, database.engine.begin() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    ended = command(tmp_path / "new", "ui", "--no-browser", "--port", "0")
    assert ended.returncode == ServiceError.exit_code, ended.stdout
    assert "A newer agentrl wrote this store" in ended.stdout
    assert "Traceback" not in ended.stdout


def views_of(run: int, iteration: int, group: int, episode: int, task: int) -> list[str]:
    tabs = [f"#/run/{run}?tab={tab}" for tab in ("curves", *TABS)]
    drawn = [f"#/run/{run}?smooth=0.6&log=1&x=time", f"#/run/{run}?x=tokens"]
    shown = [f"#/episode/{episode}{tab}" for tab in ("", "?tab=tokens", "?tab=tokens&color=advantage", "?tab=why")]
    return ["#/", *tabs, *drawn, f"#/run/{run}/iteration/{iteration}", f"#/group/{group}", *shown, f"#/run/{run}/task/{task}"]


def check_views(watched: Watched, served: Service, addresses: list[str]) -> None:
    """Every one is drawn, without an error, a NaN or an undefined."""
    bad = {}
    for address in addresses:
        look_at(watched.page, served, address)
        unfold(watched.page)
        problem = watched.page.query_selector("main .problem")
        shown = watched.page.inner_text("main") + watched.page.evaluate("document.querySelector('main').innerHTML")
        odd = [word for word in ("NaN", "undefined", "Infinity", "[object", "Invalid Date") if word in shown]
        found = [*watched.wrong, *odd, *([problem.inner_text()] if problem else [])]
        bad |= {address: found} if found else {}
        watched.wrong.clear()
    assert bad == {}


ODD_NAMES = ("a/b 🦊", "../c/%2e%2e/🧪?x=1&y#z")


def test_page_shows_runs_without_update_or_rows(tmp_path: Path, migrated_file: Path, context: BrowserContext) -> None:
    with closing(store_in(tmp_path / "home", migrated_file)) as database:
        planning.submit(database, played_runs.submission("first"))
        half = played_runs.submission("second", seed=1)
        groups = played_runs.start(database, half)
        played_runs.play(database, groups[0])
        played_runs.claim(database, groups[1])
        with database.engine.begin() as tx:  # as a store has them that another program wrote
            for before, name in zip(("first", "second"), ODD_NAMES, strict=True):
                tx.execute(text("UPDATE steps SET run = :name WHERE run = :before"), {"name": name, "before": before})
                tx.execute(text("UPDATE rewards SET run = :name WHERE run = :before"), {"name": name, "before": before})
                tx.execute(text("UPDATE runs SET name = :name WHERE name = :before"), {"name": name, "before": before})
    watched = Watched(context.new_page())
    with service(tmp_path / "home") as served:
        ((planned,), (started,)) = ask(tmp_path / "home", "SELECT id FROM runs ORDER BY id")
        ((group, task),) = ask(tmp_path / "home", f"SELECT id, task_id FROM groups WHERE id = {groups[0]}")
        ((episode,),) = ask(tmp_path / "home", f"SELECT min(id) FROM episodes WHERE group_id = {group}")
        bare = [f"#/run/{planned}", *(f"#/run/{planned}?tab={tab}" for tab in TABS), f"#/group/{groups[1]}"]
        check_views(watched, served, [*bare, *views_of(started, 1, group, episode, task)])
        look_at(watched.page, served, "#/")
        for name in ODD_NAMES:
            watched.page.click(f"main tbody a:text-is('{name}')")
            watched.page.wait_for_selector(f"h1:text-is('{name}')")
            watched.page.click("nav.crumbs >> text=runs")
            watched.page.wait_for_selector("main tbody a")
    ended = command(tmp_path / "home", "ui", "--export", ODD_NAMES[0], "--out", str(tmp_path / "out.html"))
    assert ended.returncode == 0, ended.stdout


def test_page_shows_infinity_and_nan_as_blank(tmp_path: Path, migrated_file: Path, context: BrowserContext) -> None:
    home = tmp_path / "home"
    with closing(store_in(home, migrated_file)) as database, database.engine.begin() as tx:
        fill_with(tx, MIXED)
    ((group, task, episode),) = ask(home, DONE)
    watched = Watched(context.new_page())
    with service(home) as served:
        views = [*views_of(1, 1, group, episode, task), "#/run/2", "#/run/1?with=2", "#/compare?a=3&b=4"]
        query = urlencode({"q": "SELECT run, iteration, mean_reward, 9e999 AS b FROM v_iterations"})
        check_views(watched, served, [*views, f"#/sql?{query}", f"#/sql?{query}&as=chart"])


def test_page_shows_ten_megabyte_episode_in_two_parts(tmp_path: Path, migrated_file: Path, context: BrowserContext) -> None:
    home = tmp_path / "home"
    words = random.Random(0)
    long = "".join(words.choices(string.ascii_letters + string.digits, k=10_000_000))  # which no compression makes small
    with closing(store_in(home, migrated_file)) as database:
        groups = played_runs.start(database, played_runs.submission())
        work = played_runs.claim(database, groups[0])
        call = played_runs.CALL
        steps.commit_sampled(database, work.fence, [played_runs.sampled(work, 0, calls=(call,)), played_runs.sampled(work, 1)])
        for position in (0, 1):
            played_runs.finish(database, work, position)
        with database.engine.begin() as tx:
            tx.execute(text("UPDATE steps SET text = :long, thought = :long WHERE id = 1"), {"long": long})
            said = json.dumps([{"role": "user", "content": long}])
            tx.execute(text("UPDATE steps SET prompt = :said WHERE id = 1"), {"said": said})
            tx.execute(text("UPDATE tool_calls SET status = 'done', result = :long"), {"long": long})
            tx.execute(text("UPDATE episodes SET final_answer = :long, error = :long WHERE id = 1"), {"long": long})
            tx.execute(
                text("UPDATE tasks SET messages = :said, reference = :long WHERE id = 1"),
                {"said": said, "long": long},
            )
    ((group, task, episode),) = ask(home, "SELECT group_id, task_id, id FROM episodes ORDER BY id LIMIT 1")
    page = context.new_page()
    watched = Watched(page)
    sizes: list[int] = []
    wire = context.new_cdp_session(page)
    wire.send("Network.enable")
    wire.on("Network.loadingFinished", lambda told: sizes.append(told["encodedDataLength"]))
    with service(home) as served:
        for address in views_of(1, 1, group, episode, task):
            sizes.clear()
            look_at(page, served, address)
            assert sum(sizes) < 2_000_000, address
            assert page.query_selector("main .problem") is None, address
        look_at(page, served, f"#/episode/{episode}")
        page.locator("main .text button.more").first.click()
        sizes.clear()
        page.locator("main .text button.more:has-text('next')").first.click()
        page.wait_for_function("() => document.querySelector('main .text pre').textContent.length > 200000")
        assert sum(sizes) < 2_000_000
        assert watched.wrong == []


def remove_run(home: Path, run: int) -> None:
    """Deletes a run as a person with SQL would: all of its rows."""
    with closing(open_database(f"sqlite:///{home / 'agentrl.db'}")) as database, database.engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        driver.execute("PRAGMA foreign_keys=OFF")
        driver.execute("BEGIN IMMEDIATE")
        for table in ("rewards", "annotations", "tool_calls", "tool_sessions", "agent_attempts", "steps"):
            driver.execute(f"DELETE FROM {table} WHERE episode_id IN (SELECT id FROM episodes WHERE run_id = {run})")
        for table in schema.metadata.sorted_tables:
            if "run_id" in table.c:
                driver.execute(f"DELETE FROM {table.name} WHERE run_id = {run}")
        driver.execute(f"DELETE FROM runs WHERE id = {run}")
        driver.execute("COMMIT")


def test_page_reports_run_removed_while_viewed(tmp_path: Path, migrated_file: Path, context: BrowserContext) -> None:
    home = tmp_path / "home"
    with closing(store_in(home, migrated_file)) as database:
        for number, name in enumerate(("stays", "goes")):
            for group in played_runs.start(database, played_runs.submission(name, seed=number)):
                played_runs.play(database, group)
    ((episode, group),) = ask(home, "SELECT min(id), min(group_id) FROM episodes WHERE run_id = 2")
    listed, looked, read = (context.new_page() for _ in range(3))
    with service(home) as served:
        look_at(listed, served, "#/")
        look_at(looked, served, "#/run/2?tab=episodes")
        look_at(read, served, f"#/episode/{episode}")
        looked.wait_for_timeout(700)
        remove_run(home, 2)
        looked.wait_for_selector("main .problem:has-text('not in the store any more')")
        listed.wait_for_function("() => document.querySelectorAll('main tbody tr').length === 1")
        read.click("nav.tabs >> text=tokens")
        read.wait_for_selector("main .problem:has-text('There is no')")
        read.click(f"nav.crumbs >> text=group {group}")
        read.wait_for_selector("main .problem:has-text('There is no')")
        for page in (looked, read):
            page.click("header >> text=runs")
            page.click("main tbody a:text-is('stays')")
            page.wait_for_selector("h1:text-is('stays')")


def test_page_reconnects_to_returned_postgres(context: BrowserContext, tmp_path: Path) -> None:
    with own_postgres(20) as server, server.database() as url:
        with closing(Database(url)) as database:
            for group in played_runs.start(database, played_runs.submission("kept")):
                played_runs.play(database, group)
        page = context.new_page()
        with service(tmp_path, "--database-url", url) as served:
            look_at(page, served, "#/run/1")
            assert page.inner_text("h1") == "kept"
            server.stop()
            page.click("nav.tabs >> text=episodes")
            page.wait_for_selector("main .problem:has-text('cannot be read now')", timeout=20_000)
            server.start()
            page.wait_for_selector("main tbody tr", timeout=20_000)
            page.wait_for_selector("main .problem", state="detached")
            page.goto(f"{served.url}#/")
            page.wait_for_selector("main tbody a:text-is('kept')")
