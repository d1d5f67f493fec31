"""The table of runs in a real browser: columns of the config, seeds as one row, tags and notes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from agentrl.workflow.store.migrate import open_database
from agentrl.workflow.store.reads import label_rows
from tests.support.browser import Service, Watched, service, settle
from tests.support.question_store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]


@pytest.fixture(scope="module")
def home() -> Path:
    """The demo's store, with the runs of `question_store`: "agents" and "broken" differ in nothing but the seed."""
    return open_store()


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Service]:
    with service(home, "--actions") as started:
        yield started


@pytest.fixture
def page(served: Service, browser: Browser) -> Iterator[Page]:
    """The list of runs; nothing may go wrong in the browser."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    watched = Watched(context.new_page())
    watched.page.goto(served.url)
    watched.page.wait_for_selector("main tbody tr")
    yield watched.page
    context.close()
    assert watched.wrong == []


def heads(page: Page) -> list[str]:
    return page.locator("main thead th").all_inner_texts()


def test_runs_table_adds_config_column(page: Page) -> None:
    page.click("summary:text-is('columns')")
    page.locator("select[aria-label='add a config column']").select_option("algorithm.name")
    page.wait_for_selector("main thead >> text=algorithm.name")
    settle(page)
    assert "rloo" in page.locator("main tbody tr:has-text('demo-rloo')").inner_text().split()
    page.click(".columns label:has-text('tokens')")
    page.wait_for_selector("main thead >> text=tokens", state="detached")
    page.reload()
    page.wait_for_selector("main tbody tr")
    assert "algorithm.name" in heads(page)
    assert "tokens" not in heads(page)


def test_runs_table_shows_seeds_as_one_row(page: Page) -> None:
    rows = page.locator("main tbody tr")
    before = rows.count()
    page.click("label:has-text('group seeds')")
    page.wait_for_function("count => document.querySelectorAll('main tbody tr').length === count", arg=before - 1)
    row = page.locator("main tbody tr:has-text('broken')").inner_text()
    assert "2 seeds: 8, 7" in row
    assert re.search(r"paused 1 run\s+done 1 run", row), row
    assert "1 of 2" in row
    assert page.url.endswith("group=seed")
    page.click("main td a:text-is('broken')")
    page.wait_for_selector("h1:text-is('2 runs together')")


def test_runs_table_tags_before_it_is_saved(page: Page, home: Path) -> None:
    page.click("button[aria-label='Label code']")
    page.fill("input[aria-label='tag or note']", "<b>good</b>")
    page.click("button:text-is('tag')")
    page.wait_for_selector("button.tag.pending")
    page.wait_for_selector("button.tag:not(.pending):text-is('<b>good</b>')")
    database = open_database(f"sqlite:///{home}/agentrl.db")
    assert label_rows.list_tags(database, "code") == ["<b>good</b>"]
    database.close()


def test_runs_table_takes_back_refused_tag(page: Page) -> None:
    refused: Any = "x" * 500
    page.click("button[aria-label='Label agents']")
    page.fill("input[aria-label='tag or note']", refused)
    page.click("button:text-is('tag')")
    page.wait_for_selector("td .bad[role='status']")
    assert page.locator(f"button.tag:has-text('{refused}')").count() == 0
