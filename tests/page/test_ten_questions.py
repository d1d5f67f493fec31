"""Ten questions about runs, asked in a real browser with at most three clicks from the run, and by one command."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.support.browser import Service, Watched, service, settle
from tests.support.question_store import ERROR, REASON, WHY_FAILED, open_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]

MAX_CLICKS = 3
SEES = "text => document.querySelector('main')?.innerText.includes(text)"
HEADS = "text => document.querySelector('h1')?.innerText === text"


@pytest.fixture(scope="module")
def home() -> Path:
    """The demo's store, with the runs of `question_store`."""
    return open_store()


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Service]:
    with service(home) as started:
        yield started


class Reader:
    """A reader who begins at a run's page and clicks."""

    def __init__(self, page: Page, url: str, run: int) -> None:
        self.page, self.clicks = page, 0
        page.goto(f"{url}#/run/{run}")
        page.wait_for_selector("main h1")
        settle(page)

    def click(self, selector: str) -> None:
        self.page.locator(selector).first.click()
        self.clicks += 1
        assert self.clicks <= MAX_CLICKS
        self.page.wait_for_timeout(50)
        settle(self.page)

    def choose(self, label: str, value: str) -> None:
        self.page.locator(label).select_option(value)
        self.clicks += 1
        assert self.clicks <= MAX_CLICKS
        settle(self.page)

    def sees(self, *texts: str) -> None:
        for text in texts:
            self.page.wait_for_function(SEES, arg=text, timeout=15_000)


@pytest.fixture
def read(served: Service, browser: Browser) -> Iterator[Any]:
    """Begins at the page of the run with that number; nothing may go wrong in the browser."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    watched = Watched(context.new_page())
    yield lambda run: Reader(watched.page, served.url, run)
    context.close()
    assert watched.wrong == []


DEMO, EVALUATION, FORK, CODE, AGENTS, BROKEN = 1, 2, 8, 9, 10, 11
"""The numbers of the runs in the store."""


@pytest.fixture
def terminal(home: Path) -> Any:
    """Runs one command, and returns what it prints."""

    def run(*words: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "agentrl.cli", *words]
        environment = {**os.environ, "AGENTRL_HOME": str(home)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, (words, done.stderr)
        return done.stdout + done.stderr

    return run


def test_question_why_reward_dropped(read: Any, terminal: Any) -> None:
    reader = read(CODE)
    reader.click("nav.tabs >> text=iterations")
    reader.click("main td a:text-is('3')")
    reader.sees("against iteration 2", "errors run_code code_error", "4 of 4 tool calls failed", ERROR, "part numeric_answer")
    printed = terminal("changes", "code", "--iteration", "3")
    assert "errors: run_code code_error" in printed
    assert "4 of 4 tool calls failed." in printed


def test_question_which_tasks_are_never_solved(read: Any, terminal: Any) -> None:
    reader = read(CODE)
    reader.click("nav.tabs >> text=tasks")
    reader.click("button:text-is('never solved')")
    assert reader.page.locator("main tbody tr").count() == 1
    reader.sees("What is 6*1?", "never")
    reader.click("button:text-is('no longer solved')")
    assert reader.page.locator("main tbody tr").count() == 1
    reader.sees("What is 6*0?", "no longer")
    assert "train/1" in terminal("tasks", "code", "--outcome", "never_solved")
    assert "train/0" in terminal("tasks", "code", "--outcome", "no_longer_solved")


def test_question_tokens_of_worst_episode(read: Any, terminal: Any) -> None:
    reader = read(DEMO)
    reader.click(".examples li:has-text('worst') a")
    episode = reader.page.url.rpartition("/")[2]
    reader.click("nav.tabs >> text=tokens")
    reader.page.wait_for_selector(".strip .t")
    reader.sees("logprob", "advantage")
    assert "logprob" in terminal("replay", episode)


def test_question_how_two_runs_differ(read: Any, terminal: Any) -> None:
    reader = read(DEMO)
    reader.click("nav.tabs >> text=config")
    reader.choose("select[aria-label='compare with another run']", "7")
    reader.sees("2 runs together", "algorithm.name", "grpo", "rloo", "rollout seconds", "Tasks that differ")
    reader.page.wait_for_selector(".chart canvas")
    sides = reader.page.locator(".sibling .transcript")
    sides.nth(1).wait_for()
    assert sides.count() == 2
    before = reader.page.inner_text(".siblings")
    reader.click("main td a:text-is('train/21')")
    reader.page.wait_for_function("text => document.querySelector('.siblings').innerText !== text", arg=before)
    reader.sees("of demo, reward", "of demo-rloo, reward")
    printed = terminal("compare", "demo", "demo-rloo", "--runs")
    assert "algorithm.name" in printed
    assert "16 of 24 tasks that both sampled have different rewards." in printed


def test_question_which_calls_failed(read: Any, terminal: Any) -> None:
    reader = read(CODE)
    reader.sees("code_error of run_code: 4 times in 4 episodes")
    reader.click("main a:has-text('code_error')")
    reader.sees(ERROR)
    assert reader.page.locator("main tbody tr").count() == 4
    printed = terminal("episodes", "code", "--error", "code_error")
    assert printed.count(ERROR) == 4


def test_question_is_run_healthy(read: Any, terminal: Any) -> None:
    reader = read(DEMO)
    reader.sees("groups with different rewards", "tool calls failed", "sampled by the newest version")
    reader = read(BROKEN)
    reader.sees(REASON, WHY_FAILED, "agentrl resume broken")
    assert reader.clicks == 0
    assert WHY_FAILED in terminal("watch", "broken", code=1)


def test_question_where_seconds_went(read: Any, terminal: Any) -> None:
    reader = read(DEMO)
    reader.sees("Where the seconds went", "unexplained")
    reader.click("nav.tabs >> text=workers")
    reader.page.wait_for_selector(".lanes svg")
    printed = terminal("watch", "demo")
    assert "seconds of the run: 27.0\n" in printed
    assert "seconds of its episodes, which run at the same time, added up: 3" in printed


def test_question_shares_view_and_run(read: Any, home: Path, tmp_path: Path, terminal: Any) -> None:
    reader = read(CODE)
    reader.click("nav.tabs >> text=episodes")
    reader.click("button:text-is('failed call')")
    address = reader.page.url
    reader.page.goto("about:blank")
    reader.page.goto(address)
    settle(reader.page)
    assert reader.page.locator("main tbody tr").count() == 4
    reader.click("button:text-is('share')")
    dialog = reader.page.locator("dialog[open]")
    assert address in dialog.inner_text()
    assert "agentrl ui --export code --out run-9.html" in dialog.inner_text()
    out = tmp_path / "run.html"
    terminal("ui", "--export", "code", "--out", str(out))
    assert out.stat().st_size < 2_000_000


def test_question_shares_episode(read: Any, home: Path, tmp_path: Path, terminal: Any) -> None:
    reader = read(CODE)
    reader.click(".examples li:has-text('worst') a")
    episode = reader.page.url.rpartition("/")[2].partition("?")[0]
    reader.click("button:text-is('share')")
    reader.page.wait_for_selector("dialog >> text=This run")
    command = f"agentrl ui --export code --out run-9.html --episode {episode} --limit-mb 1"
    assert command in reader.page.inner_text("dialog[open]")
    out = tmp_path / "episode.html"
    terminal(*command.replace("run-9.html", str(out)).split()[1:])
    assert out.stat().st_size <= 1_000_000


def test_question_what_policies_say_differently(read: Any, terminal: Any) -> None:
    reader = read(DEMO)
    reader.click("nav.tabs >> text=evals")
    reader.click("main a:has-text('with version')")
    reader.sees("answer of A", "answer of B", "better on")
    assert "right more often on 12" in terminal("compare", "demo-eval-0", "demo-eval-20")


def test_question_one_task_over_iterations(read: Any, terminal: Any) -> None:
    reader = read(CODE)
    reader.click("nav.tabs >> text=tasks")
    reader.click("main td a:text-is('train/0')")
    reader.page.wait_for_selector(".chart canvas")
    assert reader.page.locator("main tbody tr").count() == 8
    assert len(terminal("episodes", "code", "--task", "train/0").splitlines()) >= 9


def test_evidence_is_walked_by_keyboard(read: Any) -> None:
    reader = read(CODE)
    reader.click("main a:has-text('code_error')")
    reader.click("main tbody td a")
    reader.page.wait_for_selector("a[rel='list-next']:has(kbd:text-is('n'))")
    first = reader.page.inner_text("h1")
    reader.page.keyboard.press("n")
    reader.page.wait_for_selector("a[rel='list-prev']")
    assert reader.page.inner_text("h1") != first
    reader.page.keyboard.press("p")
    reader.page.wait_for_function(HEADS, arg=first)


def test_transcript_colours_tokens_and_shows_time(read: Any) -> None:
    reader = read(DEMO)
    reader.click(".examples li:has-text('worst') a")
    lanes = reader.page.locator(".waterfall-row")
    lanes.first.wait_for()
    assert lanes.all_inner_texts()[0].startswith("sampling")
    assert "tools" in [text.strip() for text in lanes.all_inner_texts()]
    assert reader.page.locator(".waterfall-row").first.locator("[title*='turn 0: sampling']").count() == 1
    reader.choose("label:has-text('token colours') select", "logprob")
    reader.page.wait_for_selector(".transcript .turn .strip .t[class*='odd-']")
    assert reader.page.url.endswith("tokens=logprob")
    reader.page.locator("label:has-text('token colours') select").select_option("")
    reader.page.wait_for_selector(".transcript .strip", state="detached")


def test_evidence_leaves_out_empty_column(read: Any) -> None:
    for run, has_errors in ((DEMO, False), (CODE, True)):
        reader = read(run)
        reader.click("nav.tabs >> text=episodes")
        heads = [text.rstrip(" ↑") for text in reader.page.locator("main thead th").all_inner_texts()]
        assert heads[:2] == ["episode", "iteration"]
        assert ("error" in heads) is has_errors


def test_evidence_without_a_match_offers_all(read: Any) -> None:
    reader = read(CODE)
    reader.page.goto(f"{reader.page.url}?tab=episodes&min_reward=2")
    reader.click("main >> text=show all episodes")
    assert reader.page.locator("main tbody tr").count() == 16


def test_group_of_one_shows_only_its_transcript(read: Any) -> None:
    reader = read(EVALUATION)
    reader.sees("evaluates demo (version 0)")
    reader.click("nav.tabs >> text=iterations")
    reader.click("main td a:text-is('1')")
    assert "±" not in reader.page.inner_text("main .grid")
    reader.click("main .grid a")
    reader.sees("Transcript")
    shown = reader.page.inner_text("main")
    assert not any(text in shown for text in ("Where they differ", "±", "sibling"))


def test_fork_shows_its_one_episode_once(read: Any) -> None:
    reader = read(FORK)
    reader.sees("best and worst")
    titles = reader.page.locator(".examples li b").all_inner_texts()
    assert titles == ["best and worst"]
    assert reader.page.locator(".chart").count() == 0


def test_keys_move_focus_with_the_row(read: Any) -> None:
    reader = read(CODE)
    reader.click("nav.tabs >> text=episodes")
    for key, row in (("j", 0), ("j", 1), ("k", 0)):
        reader.page.keyboard.press(key)
        focused = reader.page.evaluate("[...document.querySelectorAll('main tbody tr')].indexOf(document.activeElement)")
        assert focused == row
    reader.page.keyboard.press("Enter")
    reader.page.wait_for_selector("h1:has-text('Episode')")


def test_search_goes_on_until_25_hits_or_stop(read: Any) -> None:
    reader = read(CODE)
    reader.click("nav.tabs >> text=episodes")
    whole = reader.page.evaluate("fetch('api/runs/9/episodes?size=50').then((answer) => answer.json())")
    pieces: list[str] = []

    def answer_piece(route: Any) -> None:
        """A search of 1000 episodes that looks at one in each piece, and finds it."""
        place = len(pieces)
        pieces.append(route.request.url)
        row = {**whole["rows"][place % 16], "id": 1000 + place}
        route.fulfill(json={**whole, "rows": [row], "next": f"c{place}", "searched": 1, "total": 1000})

    reader.page.route("**/api/runs/9/episodes?*text=*", answer_piece)
    reader.page.fill("input[type='search']", "area")
    reader.sees("searched 25 of 1 000")
    reader.page.wait_for_selector("button:text-is('go on')")
    assert len(pieces) == 25
    reader.click("button:text-is('go on')")
    reader.page.locator("main tbody tr").nth(49).wait_for()
    reader.page.wait_for_selector("button:text-is('go on')")
    assert len(pieces) == 50


def test_search_can_be_stopped(read: Any) -> None:
    reader = read(CODE)
    reader.click("nav.tabs >> text=episodes")
    pieces: list[str] = []

    def answer_piece(route: Any) -> None:
        """A search that finds nothing in each piece."""
        pieces.append(route.request.url)
        route.fulfill(json={"columns": [], "rows": [], "next": f"c{len(pieces)}", "searched": 1, "total": 10**6})

    reader.page.route("**/api/runs/9/episodes?*text=*", answer_piece)
    reader.page.fill("input[type='search']", "nothing")
    reader.click("button:text-is('stop')")
    reader.page.wait_for_selector("button:text-is('go on')")
    reader.page.wait_for_timeout(200)
    stopped = len(pieces)
    reader.page.wait_for_timeout(500)
    assert len(pieces) == stopped


def test_evidence_shows_chains_of_agents(read: Any) -> None:
    reader = read(AGENTS)
    reader.click("nav.tabs >> text=episodes")
    reader.click("main tbody td a")
    reader.sees("chain 1")
