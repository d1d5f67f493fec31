"""The page of a search run in a real Chromium: what was gained, the tree, a candidate with its episodes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from tests.search.test_search_runs import BEAM, SEARCH, config
from tests.support.browser import Watched, service, settle
from tests.support.real_stack import embedded_stack
from tests.support.scripted_critic import ScriptedCritic, serving

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_programs_of_module")]


@pytest.fixture(scope="module")
def search_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The home of a store with a short search."""
    folder = tmp_path_factory.mktemp("s")
    with serving(ScriptedCritic("informed", 1)) as url, embedded_stack(folder, "30") as made:
        made.environment["AGENTRL_CRITIC_URL"] = url
        made.agentrl("sft", "--dataset", "arithmetic", "--model", "tiny", "--steps", "2")
        made.agentrl("submit", "--config", config(folder, "short", search=SEARCH | BEAM | {"rounds": 2}), "--wait")
        yield made.home


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_search_run_tells_gain_and_tree_in_browser(search_home: Path, browser: Browser, scheme: Any) -> None:
    with service(search_home) as served:
        for width in (1280, 390):
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=width < 500)
            watched = Watched(context.new_page())
            page = watched.page
            page.goto(f"{served.url}#/run/1")
            watched.see("held-out tasks; the first scored 0.1.")
            assert page.locator(".chart").count() == 0
            assert "the first scored" in page.inner_text("nav.tabs + *")
            page.click("main td a:text-is('prompt @1')")
            page.wait_for_selector(".candidate[aria-label='Version prompt @1'] .diff .added")
            assert "candidate=1" in page.url
            page.click(".candidate summary:text-is('what the critic said')")
            page.wait_for_selector(".candidate .message:has-text('the edit')")
            settle(page)
            count = page.locator(".candidate tbody tr").count()
            assert page.inner_text("main tr:has(a[aria-current='true']) td[data-label='episodes']") == str(count)
            assert int(page.evaluate("document.documentElement.scrollWidth - innerWidth")) <= 0
            violations = Axe().run(page).response["violations"]
            assert [each["id"] for each in violations if each["impact"] in ("serious", "critical")] == []
            page.click(".candidate tbody tr a >> nth=0")
            page.wait_for_selector("a[rel='list']:has-text('texts of')")
            page.click("a[rel='list']")
            page.wait_for_selector(".chip[aria-pressed='true']:has-text('texts of group')")
            settle(page)
            assert page.locator("main tbody tr").count() == count
            assert watched.wrong == []
            context.close()
