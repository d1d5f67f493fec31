"""The page in a real Chromium, over a real run: every view, a run watched to its end, a service that dies, an export."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page
from sqlalchemy import text

from agentrl.workflow.store import planning
from agentrl.workflow.store.machine_loads import HostLoad, WorkLoad, record_load
from agentrl.workflow.store.migrate import open_database
from tests.conftest import copy_store
from tests.support.browser import Service, Watched, service, settle
from tests.support.played_runs import submission
from tests.support.real_stack import SMALL, Stack, embedded_stack
from tests.support.small_models import tiny_calling

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]

PICTURES = Path("build/page")
WIDTHS = (390, 1920)
"""Besides that of every other test, 1280."""
SUBMIT = ("submit", "--dataset", "arithmetic", *SMALL, "--max-tasks", "24", "-s", "eval.every=2", "-s", "eval.tasks=8")


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack of a run that is done, and was forked, tagged and noted."""
    folder = tmp_path_factory.mktemp("p")
    model = tiny_calling(folder / "model")
    with embedded_stack(folder, idle_seconds="3600") as stack:
        stack.environment["MODEL"] = str(model)
        stack.agentrl(*SUBMIT, "--model", str(model), "--name", "first", "--wait")
        stack.agentrl("fork", "1", "--step", "0", "-n", "2", "--name", "forked", "--wait")
        stack.agentrl("tag", "first", "good")
        stack.agentrl("note", "first", "a first look")
        yield stack


@pytest.fixture(scope="module")
def served(lived: Stack) -> Iterator[Service]:
    with service(lived.home) as made:
        yield made


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1280, "height": 900})
    yield made
    made.close()


def one(stack: Stack, query: str) -> Any:
    with stack.database.read() as tx:
        return tx.execute(text(query)).scalar_one()


GONE = 999_999
DECLARED = "import('./static/app.js').then(({ ROUTES }) => ROUTES.map(({ path, tabs }) => [path, tabs || []]))"


def places(page: Page, numbers: dict[str, Any]) -> list[str]:
    """The addresses of all places that the page declares, each with all its tabs. `numbers` are the values of their
    parameters.
    """
    addresses = []
    for path, tabs in page.evaluate(DECLARED):
        address = "#/" + "/".join(str(numbers[word[1:]]) if word.startswith(":") else word for word in path.split("/"))
        addresses += [address, *(f"{address}?tab={tab}" for tab in tabs)]
    return addresses


def numbers_of_first(stack: Stack) -> dict[str, Any]:
    """The values of the parameters of all places, for the run `first`."""
    run = one(stack, "SELECT id FROM runs WHERE name = 'first'")
    group = one(stack, f"SELECT min(id) FROM groups WHERE run_id = {run}")
    task = one(stack, f"SELECT task_id FROM groups WHERE id = {group}")
    episode = one(stack, f"SELECT min(id) FROM episodes WHERE group_id = {group}")
    return {"run": run, "iteration": 2, "group": group, "task": task, "episode": episode}


def every_view(page: Page, stack: Stack) -> dict[str, str]:
    """All places and tabs that the page declares, and `views`."""
    return {**views(stack), **{address: address for address in places(page, numbers_of_first(stack))}}


def views(stack: Stack) -> dict[str, str]:
    """Some views of the run `first`, and choices within them, by name."""
    numbers = numbers_of_first(stack)
    run, group, episode = numbers["run"], numbers["group"], numbers["episode"]
    evals = f"FROM evals WHERE run_id IN (SELECT id FROM runs WHERE measures_id = {run})"
    first, second = (one(stack, f"SELECT {of}(run_id) {evals}") for of in ("min", "max"))
    return {
        "run": f"#/run/{run}",
        "curves": f"#/run/{run}?tab=curves",
        "config": f"#/run/{run}?tab=config",
        "run-smooth": f"#/run/{run}?smooth=0.6&x=tokens&log=1&charts=v_steps.mean_logprob",
        "run-time": f"#/run/{run}?x=time&with={run + 1}",
        "seeds": "#/?group=seed",
        "nothing": f"#/run/{run}?tab=episodes&min_reward=2",
        "group": f"#/group/{group}",
        "tokens": f"#/episode/{episode}?tab=tokens",
        "advantages": f"#/episode/{episode}?tab=tokens&color=advantage&only=1",
        "compare": f"#/compare?a={first}&b={second}",
        "sql-chart": f"#/sql?{'q=SELECT+iteration%2C+mean_reward+FROM+v_iterations'}&as=chart",
        "two-runs": f"#/run/{run}?with={run + 1}",
    }


def look_at(page: Page, served: Service, address: str) -> None:
    """Opens the address as if it were pasted into a new tab."""
    page.goto("about:blank")
    page.goto(f"{served.url}{address}")
    page.wait_for_selector("main h1, main .problem")
    settle(page)


def overflow(page: Page) -> int:
    """Return by how many pixels the page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def test_browser_draws_every_view_accessibly_without_error(lived: Stack, served: Service, context: BrowserContext) -> None:
    watched = Watched(context.new_page())
    look_at(watched.page, served, "#/")
    found: dict[str, list[str]] = {}
    for name, address in every_view(watched.page, lived).items():
        look_at(watched.page, served, address)
        assert overflow(watched.page) <= 0, name
        assert watched.page.locator("main h1").count() == 1, name
        assert watched.page.title() != "agentrl", name
        assert watched.page.query_selector("main .problem") is None, (name, watched.page.inner_text("main"))
        results = Axe().run(watched.page).response["violations"]
        watched.page.emulate_media(color_scheme="dark")
        results += Axe().run(watched.page, options={"runOnly": ["color-contrast"]}).response["violations"]
        watched.page.emulate_media(color_scheme="light")
        found |= {name: [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in results]} if results else {}
    assert found == {}
    assert watched.wrong == []
    assert watched.hosts <= {f"127.0.0.1:{served.port}", "blank", ""}


def test_browser_heads_places_that_do_not_exist(lived: Stack, served: Service, context: BrowserContext) -> None:
    page = context.new_page()
    look_at(page, served, "#/")
    gone = places(page, dict.fromkeys(numbers_of_first(lived), GONE))
    for address in [*(each for each in gone if str(GONE) in each), "#/no/such/place"]:
        look_at(page, served, address)
        assert page.locator("main h1").count() == page.locator("main .problem").count() == 1, address
        assert page.title() != "agentrl", address
        assert Axe().run(page).response["violations"] == [], address


def test_browser_shows_narrow_list_whole(lived: Stack, served: Service, browser: Browser) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    for tab in ("episodes", "iterations", "tasks", "evals"):
        look_at(page, served, f"{views(lived)['run']}?tab={tab}")
        cut = (
            "[...document.querySelectorAll('main td')].filter((cell) => cell.getBoundingClientRect().right > innerWidth).length"
        )
        assert page.evaluate(cut) == 0, tab
    look_at(page, served, f"{views(lived)['run']}?tab=episodes")
    assert page.locator("main tbody tr").first.locator("td[data-label='reward']").is_visible()
    assert "reward" in page.inner_text(".short-facts")
    cut = "document.querySelector('.short-facts').scrollWidth > document.querySelector('.short-facts').clientWidth"
    assert not page.evaluate(cut)
    context.close()


RECORD_TEXTS = """
    window.drawn = [];
    const draw = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
      window.drawn.push(text);
      draw.call(this, text, ...place);
    };
"""


def test_chart_names_its_axis(lived: Stack, served: Service, context: BrowserContext) -> None:
    page = context.new_page()
    page.add_init_script(RECORD_TEXTS)
    for address, name in ((views(lived)["run"], "iteration"), (views(lived)["run-smooth"], "tokens read and sampled")):
        look_at(page, served, address)
        page.wait_for_function("name => window.drawn.includes(name)", arg=name)


def test_browser_fits_every_view_into_window(lived: Stack, served: Service, browser: Browser) -> None:
    context = browser.new_context(viewport={"width": WIDTHS[0], "height": 900}, has_touch=True)
    page = context.new_page()
    PICTURES.mkdir(parents=True, exist_ok=True)
    wide = {}
    look_at(page, served, "#/")
    for name, address in every_view(page, lived).items():
        look_at(page, served, address)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            page.screenshot(path=PICTURES / f"{re.sub(r'[^a-z0-9]+', '-', name)}-{width}.png")
            wide |= {(name, width): by} if (by := overflow(page)) > 0 else {}
        page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    assert wide == {}
    context.close()


def test_browser_follows_run_from_first_iteration_to_end(lived: Stack, served: Service, context: BrowserContext) -> None:
    watched = Watched(context.new_page())
    watched.page.goto(served.url)
    watched.see("first")
    submit = [sys.executable, "-m", "agentrl.cli", *SUBMIT, "--model", lived.environment["MODEL"], "--name", "second", "--wait"]
    training = subprocess.Popen(submit, env=lived.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    watched.see("second", 60)
    watched.page.click("text=second")
    watched.page.wait_for_selector(".live")
    watched.page.click("nav.tabs >> text=iterations")
    for number in (1, 3, 5):
        watched.page.wait_for_selector(f"main td a:text-is('{number}')", timeout=120_000)
    assert training.wait(120) == 0
    watched.page.wait_for_selector("h1 + .badge:text-is('done')", timeout=15_000)
    assert watched.page.query_selector(".live") is None
    assert watched.page.locator("main tbody tr").count() == one(lived, "SELECT iterations FROM runs WHERE name = 'second'")
    assert watched.wrong == []


def test_control_loop_of_stack_writes_load(lived: Stack) -> None:
    assert one(lived, "SELECT max(cpu_share) FROM v_machine WHERE waiting_rollout IS NOT NULL") > 0


def test_browser_shows_load_of_machine(tmp_path: Path, migrated_file: Path, context: BrowserContext) -> None:
    """An open page of a store without runs, with a run that waits for workers, with workers, and when the run has stopped."""
    copy_store(tmp_path, migrated_file)
    watched, load = Watched(context.new_page()), "section.machine"
    with service(tmp_path) as served, closing(open_database(f"sqlite:///{tmp_path / 'agentrl.db'}")) as database:
        look_at(watched.page, served, "#/")
        assert watched.page.inner_text(load) == ""
        run = planning.submit(database, submission())
        planning.start_iteration(database, planning.open_iterations(database, run.id)[0])
        watched.page.wait_for_selector(f"{load} :text('No worker reports')")
        assert watched.page.inner_text(f"{load} code") == "agentrl up"
        gpu = {"name": "G", "share": 0.5, "memory_used": 2**30, "memory_total": 2**31}
        record_load(database, "host", HostLoad(0.25, 2**30, 2**32, [gpu]), WorkLoad({"rollout": 7}, 0, 0), 152.0)
        for address in ("#/", f"#/run/{run.id}"):
            watched.page.goto(f"{served.url}{address}")
            watched.page.wait_for_selector(f"{load} dt:text-is('GPU memory') + dd:text-is('1 of 2 GiB')")
            shown = dict(zip(*(watched.page.locator(f"{load} {name}").all_inner_texts() for name in ("dt", "dd")), strict=True))
            assert (shown["processors"], shown["tokens/s"], shown["waiting groups"]) == ("25 %", "152", "7")
            assert Axe().run(watched.page).response["violations"] == []
        look_at(watched.page, served, "#/")
        planning.stop(database, "first", "paused", "by hand")
        with database.engine.begin() as tx:
            tx.execute(text("UPDATE machine_loads SET slot = slot - 12, created_at = datetime(created_at, '-60 seconds')"))
        watched.page.wait_for_selector(f"{load} :text('No run is running')")
        watched.page.wait_for_selector(f"{load} dt:has-text('until ')")
        assert watched.page.inner_text(f"{load} code").startswith("agentrl submit ")
        assert watched.wrong == []


def test_browser_config_shows_origin_of_value(lived: Stack, served: Service, context: BrowserContext) -> None:
    page = context.new_page()
    look_at(page, served, views(lived)["config"])
    rows = {row.split("\t")[0]: row.split("\t")[-1] for row in page.inner_text("main tbody").splitlines() if "\t" in row}
    assert rows["rollout.group_size"] == "flag"
    assert rows["model.tool_format"] == "settled"
    assert "seed" not in rows


def test_browser_back_and_forward_go_through_views(lived: Stack, served: Service, context: BrowserContext) -> None:
    page = context.new_page()
    page.goto(served.url)
    page.click("main >> text=first")
    page.wait_for_selector(".chart")
    page.click("nav.tabs >> text=episodes")
    page.click("main tbody tr >> nth=2")
    page.wait_for_selector(".transcript")
    page.go_back()
    page.wait_for_selector("nav.tabs a[aria-current]:has-text('episodes')")
    page.go_back()
    page.wait_for_selector(".chart")
    page.go_back()
    page.wait_for_selector("h1:text-is('Runs')")
    page.go_forward()
    page.wait_for_selector(".chart")
    assert "first" in page.inner_text("h1")


def chart_place(page: Page) -> tuple[float, float]:
    """The middle of the right edge of the first chart, within it; scrolled to."""
    box = page.wait_for_function("""() => {
      const over = document.querySelector(".chart .u-over");
      over?.scrollIntoView({ block: "nearest" });
      return over && over.clientWidth > 0 && over.getBoundingClientRect().toJSON();
    }""").json_value()
    return box["right"] - 3, box["y"] + box["height"] / 2


def drag(page: Page, start: tuple[float, float], end: tuple[float, float], steps: int = 3) -> None:
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*end, steps=steps)
    page.mouse.up()


def test_chart_click_opens_iteration_but_drag_does_not(lived: Stack, served: Service, context: BrowserContext) -> None:
    page = context.new_page()
    look_at(page, served, views(lived)["run"])
    end, height = chart_place(page)
    drag(page, (end - 80, height), (end, height))
    assert "iteration" not in page.evaluate("location.hash")
    look_at(page, served, views(lived)["run"])
    page.mouse.click(*chart_place(page))
    page.wait_for_function("() => /iteration\\/\\d+$/.test(location.hash)")
    last = one(lived, f"SELECT iterations FROM runs WHERE id = {views(lived)['run'].split('/')[2]}")
    assert page.evaluate("location.hash").endswith(f"/iteration/{last}")


def test_chart_shaky_click_opens_iteration(lived: Stack, served: Service, context: BrowserContext) -> None:
    page = context.new_page()
    look_at(page, served, views(lived)["run"])
    end, height = chart_place(page)
    drag(page, (end - 300, height), (end, height))
    page.mouse.dblclick(end - 100, height)
    page.wait_for_timeout(600)
    assert "iteration" not in page.evaluate("location.hash")
    drag(page, (end - 2, height), (end, height + 1), steps=1)
    page.wait_for_function("() => /iteration\\/\\d+$/.test(location.hash)")


def test_chart_tap_opens_iteration(lived: Stack, served: Service, browser: Browser) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    look_at(page, served, views(lived)["run"])
    page.touchscreen.tap(*chart_place(page))
    page.wait_for_function("() => /iteration\\/\\d+$/.test(location.hash)")
    context.close()


def test_chart_click_among_runs_opens_iteration_of_its_run(lived: Stack, served: Service, context: BrowserContext) -> None:
    run = int(views(lived)["run"].split("/")[2])
    page = context.new_page()
    look_at(page, served, f"#/run/{run + 1}?with={run}")
    page.wait_for_selector("[aria-label='Runs in the charts']", state="attached")  # both are drawn
    page.mouse.click(*chart_place(page))
    page.wait_for_function("run => location.hash.startsWith(`#/run/${run}/iteration/`)", arg=run)


def test_chart_stays_in_place_under_pointer(lived: Stack, served: Service, context: BrowserContext) -> None:
    page = context.new_page()
    look_at(page, served, views(lived)["run"])
    end, height = chart_place(page)
    tops = "[...document.querySelectorAll('.chart, .chart .u-over')].map(each => each.getBoundingClientRect().top).join()"
    before, told = page.evaluate(tops), page.locator(".told").first
    assert re.match(r"last .*reward \S+ ± \S+ over groups .*held out: .* 95 %: \S+ to \S+", told.inner_text())
    page.mouse.move(end, height)
    page.wait_for_function("() => /^iteration \\d+: /.test(document.querySelector('.told').innerText)")
    assert page.evaluate(tops) == before


def test_chart_wide_view_is_in_address_and_numbers_download(lived: Stack, served: Service, context: BrowserContext) -> None:
    page = context.new_page()
    look_at(page, served, views(lived)["curves"])
    page.click("button[aria-label='reward as wide as the page']")
    assert "wide=reward" in page.evaluate("location.hash")
    assert page.locator(".chart.wide h2").all_inner_texts() == ["reward"]
    with page.expect_download() as saved:
        page.click("button[aria-label='The numbers of reward as CSV']")
    names, *rows = [line.split(",") for line in saved.value.path().read_text().splitlines()]
    assert saved.value.suggested_filename == "reward.csv"
    assert names[:4] == ["iteration", "reward low", "reward high", "reward"]
    run = views(lived)["run"].split("/")[2]
    rewards = {int(row[0]): float(row[3]) for row in rows if row[3]}
    assert len(rewards) == one(lived, f"SELECT iterations_done FROM v_runs WHERE id = {run}")
    assert rewards[1] == pytest.approx(one(lived, f"SELECT mean_reward FROM iterations WHERE run_id = {run} AND number = 0"))


@pytest.mark.parametrize("axis", ["__proto__", "constructor", "no-axis"])
def test_chart_with_unknown_axis_shows_iterations(lived: Stack, served: Service, context: BrowserContext, axis: str) -> None:
    watched = Watched(context.new_page())
    look_at(watched.page, served, f"{views(lived)['run']}?x={axis}")
    watched.page.mouse.click(*chart_place(watched.page))
    watched.page.wait_for_function("() => /iteration\\/\\d+$/.test(location.hash)")
    assert watched.wrong == []


def test_browser_formats_minus_signs_and_invisible_characters(served: Service, context: BrowserContext) -> None:
    page = context.new_page()
    page.goto(served.url)
    shown = page.evaluate(
        """async () => {
          const { compact, number, percent, seconds, visible } = await import("./static/format.js");
          const numbers = [number(-7.38e-11), number(-0.0036), number(-12345), compact(-2500), percent(-0.5), seconds(-2)];
          const hidden = [0x61c, 0xad, 0x180e, 0x3164, 0x115f, 0x1160, 0xffa0, 0xe0000, 0xe0041, 0xe007f];
          return [numbers, hidden.map((each) => visible(`a${String.fromCodePoint(each)}b`))];
        }"""
    )
    minus = "\N{MINUS SIGN}"
    assert [text.replace(minus, "~") for text in shown[0]] == ["~7.38e~11", "~0.0036", "~12 345", "~2.5k", "~50 %", "~2 s"]
    assert shown[1][0] == "a⟨U+061C⟩b"
    assert shown[1][8] == "a⟨U+E0041⟩b"
    assert all(re.fullmatch(r"a⟨U\+[0-9A-F]+⟩b", text) for text in shown[1])


def test_browser_keyboard_leads_from_runs_to_token(lived: Stack, served: Service, context: BrowserContext) -> None:
    page = context.new_page()
    look_at(page, served, "#/")
    page.keyboard.press("/")
    page.keyboard.type("first")
    page.wait_for_function("() => document.querySelectorAll('main tbody tr').length === 1")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".chart")
    look_at(page, served, views(lived)["group"])
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".transcript")
    before = page.inner_text("h1")
    page.keyboard.press("]")
    page.wait_for_function(
        "before => document.querySelector('h1') && document.querySelector('h1').innerText !== before", arg=before
    )
    page.keyboard.press("u")
    page.wait_for_selector(".siblings")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("s")
    page.wait_for_selector("textarea")
    look_at(page, served, views(lived)["tokens"])
    page.focus(".strip")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert re.match(r"3 id \d+", page.inner_text(".token-facts"))


def test_browser_token_shows_its_rows(lived: Stack, served: Service, context: BrowserContext) -> None:
    page = context.new_page()
    look_at(page, served, views(lived)["tokens"])
    sampled = page.locator(".segment.sampled .t, .segment.untrained .t").first
    place = int(sampled.get_attribute("data-i") or 0)
    sampled.hover()
    episode = views(lived)["tokens"].split("/")[2].split("?")[0]
    step = f"(SELECT min(id) FROM steps WHERE episode_id = {episode})"
    query = f"SELECT rl_f4(behavior_logprobs) AS found FROM step_tokens WHERE step_id = {step}"
    logprob = json.loads(json.loads(lived.agentrl("sql", query, "--json"))[0]["found"])[0]
    told = page.inner_text(".token-facts")
    assert told.startswith(f"{place} id ")
    shown = re.search(r"logprob (\S+), probability (\S+)", told)
    assert shown
    assert float(shown[1].replace("−", "-")) == pytest.approx(logprob, rel=1e-3)


def test_browser_reconnects_to_restarted_service(lived: Stack, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    with service(lived.home) as mortal:
        page.goto(f"{mortal.url}#/run/1")
        page.wait_for_selector(".chart")
        mortal.stop(signal.SIGKILL)
        page.click("nav.tabs >> text=episodes")
        page.wait_for_selector("main .problem:has-text('does not answer')")
        mortal.start(mortal.port)
        page.wait_for_selector("main tbody tr", timeout=20_000)
        assert page.query_selector("main .problem") is None
        assert mortal.stop(signal.SIGINT) == 0
    context.close()


def test_browser_opens_export_from_disk_offline(lived: Stack, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    lived.agentrl("ui", "--export", "first", "--out", str(file))
    context = browser.new_context(offline=True)
    watched = Watched(context.new_page())
    watched.page.goto(file.as_uri())
    watched.page.wait_for_selector(".chart canvas")
    for tab in ("iterations", "episodes", "tasks", "ledger", "workers", "evals", "events", "config"):
        watched.page.click(f"nav.tabs >> text={tab}")
        settle(watched.page)
        assert watched.page.query_selector("main .problem") is None, (tab, watched.page.inner_text("main"))
    watched.page.click("nav.tabs >> text=episodes")
    watched.page.click("main tbody tr >> nth=0")
    watched.page.wait_for_selector(".transcript")
    watched.page.click("nav.tabs >> text=tokens")
    watched.page.wait_for_selector(".strip .t")
    assert watched.wrong == []
    assert {host for host in watched.hosts if host} == set()
    context.close()


def test_browser_theme_follows_system_and_choice(served: Service, browser: Browser) -> None:
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(served.url)
    page.wait_for_selector("main h1")
    background = "getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(background)
    page.keyboard.press("d")
    page.wait_for_function(f"dark => {background} !== dark", arg=dark)
    light = page.evaluate(background)
    page.reload()
    page.wait_for_selector("main h1")
    assert page.evaluate(background) == light
    context.close()


def test_pictures_of_manual_show_the_demo(browser: Browser, tmp_path: Path) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    with service(tmp_path, "--demo") as demo:
        look_at(page, demo, "#/run/1")
        page.wait_for_selector(".chart canvas")
        page.screenshot(path=PICTURES / "page-run.png")
        look_at(page, demo, "#/episode/33?tab=tokens")
        page.locator(".segment.sampled .t:not(.odd-0)").first.hover()
        assert "probability" in page.inner_text(".token-facts")
        page.screenshot(path=PICTURES / "page-tokens.png")
    context.close()
