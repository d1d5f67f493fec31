"""The page in a real browser: when a view is drawn, how a long strip scrolls, when a commit is seen, what it costs."""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from sqlalchemy import text, update

from agentrl.workflow.stats.evaluation import interval
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import upgrade
from agentrl.workflow.tables import schema
from bench.performance import synthetic
from bench.performance.report import Table, load
from bench.performance.timing import p95
from tests.support.browser import Service, chromium, service, settle

if TYPE_CHECKING:
    from playwright.sync_api import Page

LOADS = 5
PAINT_MS = 1000
STRIP_TOKENS = 32_000
FRAME_MS = 50
COMMITS = 20
WINDOWS = 20
WINDOW_SECONDS = 3.0
MAX_SHARE = 0.02


def first_paints(database: Database, shape: str) -> Table:
    """From the address to the whole view, nothing kept by the browser: the slowest of some loads."""
    rows: list[list[object]] = []
    with _served(database) as served, chromium() as browser:
        for name, address in _views(database).items():
            taken = []
            for _ in range(LOADS):
                context = browser.new_context(viewport={"width": 1280, "height": 900})
                page = context.new_page()
                began = time.perf_counter()
                page.goto(f"{served.url}{address}", wait_until="commit")
                page.wait_for_selector("main h1, main table, main .chart", timeout=30_000)
                settle(page)
                taken.append(1000 * (time.perf_counter() - began))
                context.close()
            rows.append([name, statistics.median(taken), max(taken), "over" if max(taken) > PAINT_MS else ""])
    rows.sort(key=lambda row: -float(str(row[2])))
    title = f"{shape}: from an address to the whole view in Chromium, ms (at most {PAINT_MS})"
    return Table(title, ["view", "median", "slowest", "over"], rows, load())


def _views(database: Database) -> dict[str, str]:
    with database.read() as tx:
        run, iterations = tx.execute(text("SELECT id, iterations FROM runs WHERE kind = 'train' ORDER BY id LIMIT 1")).one()
        episode, group = tx.execute(text("SELECT id, group_id FROM episodes WHERE run_id = :run LIMIT 1"), {"run": run}).one()
    tabs = ("iterations", "episodes", "tasks", "workers", "annotations", "prompts", "evals", "events", "config")
    return {
        "runs": "#/",
        "overview": f"#/run/{run}",
        "curves": f"#/run/{run}?tab=curves",
        **{tab: f"#/run/{run}?tab={tab}" for tab in tabs},
        "iteration": f"#/run/{run}/iteration/{iterations // 2 or 1}",
        "group": f"#/group/{group}",
        "episode": f"#/episode/{episode}",
        "tokens": f"#/episode/{episode}?tab=tokens",
        "compare": "#/compare",
        "sql": "#/sql",
    }


@contextmanager
def _served(database: Database) -> Iterator[Service]:
    url = database.url.render_as_string(hide_password=False)
    with TemporaryDirectory(prefix="arl-ui-") as home, service(Path(home), "--database-url", url) as served:
        yield served


@contextmanager
def _small_store() -> Iterator[Database]:
    with TemporaryDirectory(prefix="arl-ui-") as folder:
        database = Database(f"sqlite:///{folder}/agentrl.db")
        upgrade(database)
        with database.engine.begin() as tx:
            synthetic.fill(tx, {"long": 8, "live": 4})
        yield database
        database.close()


def long_strip() -> Table:
    """A strip of 32,000 tokens, scrolled from its beginning to its end; the time between two frames."""
    frames = """async () => {
        const gaps = []; let last = performance.now();
        const end = () => scrollY + innerHeight >= document.documentElement.scrollHeight - 4;
        for (let count = 0; count < 600 && !end(); count += 1) {
            scrollBy(0, 240);
            await new Promise(requestAnimationFrame);
            const now = performance.now(); gaps.push(now - last); last = now;
        }
        return gaps;
    }"""
    with _small_store() as database:
        _lengthen(database, 1, STRIP_TOKENS)
        with _served(database) as served, chromium() as browser:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(f"{served.url}#/episode/1?tab=tokens")
            page.wait_for_selector(".strip .t")
            settle(page)
            page.wait_for_timeout(500)
            gaps: list[float] = page.evaluate(frames)
    late = sum(gap > FRAME_MS for gap in gaps)
    rows: list[list[object]] = [[f"{STRIP_TOKENS} tokens", len(gaps), statistics.median(gaps), p95(gaps), max(gaps), late]]
    return Table(
        "a long strip, ms between frames", ["what", "frames", "median", "p95", "longest", f"over {FRAME_MS}"], rows, load()
    )


def _lengthen(database: Database, episode: int, tokens: int) -> None:
    """Gives the steps of an episode so many tokens in all."""
    with database.engine.begin() as tx:
        steps = tx.execute(text("SELECT id FROM steps WHERE episode_id = :id"), {"id": episode}).scalars().all()
        each = tokens // len(steps)
        blob = b"".join((number % 300).to_bytes(4, "little") for number in range(each))
        for step in steps:
            longer = {"prompt_ids": b"", "sampled_ids": blob, "behavior_logprobs": bytes(4 * each)}
            tx.execute(update(schema.step_tokens).where(schema.step_tokens.c.step_id == step).values(longer))
            tx.execute(update(schema.steps).where(schema.steps.c.id == step).values(prompt_tokens=0, sampled_tokens=each))


def live() -> Table:
    """From the commit of an iteration to its number on the page; and the processor time of the service with a page open."""
    with _small_store() as database, _served(database) as served, chromium() as browser:
        with database.read() as tx:
            run = tx.execute(text("SELECT id FROM runs WHERE status = 'running'")).scalar_one()
        page = browser.new_page()
        page.goto(f"{served.url}#/run/{run}?tab=iterations")
        page.wait_for_selector("main table")
        page.wait_for_selector(".live")
        seen = [_seen(database, run, page, number) for number in range(COMMITS)]
        open_shares = [_share(served) for _ in range(WINDOWS)]
        page.goto("about:blank")
        page.wait_for_timeout(1500)
        closed_shares = [_share(served) for _ in range(WINDOWS)]
    added = [one - other for one, other in zip(open_shares, closed_shares, strict=True)]
    mean, margin = interval(added)
    rows: list[list[object]] = [
        ["a commit on the page, ms", statistics.median(seen), p95(seen), 1000, "over" if p95(seen) > 1000 else ""],
        ["an open page, share of a core", mean, mean + margin, MAX_SHARE, "over" if mean + margin > MAX_SHARE else ""],
    ]
    return Table("live", ["what", "median or mean", "p95 or 95% at most", "at most", "over"], rows, load())


def _seen(database: Database, run: int, page: "Page", number: int) -> float:
    """Milliseconds from a commit that changes the last iteration's reward until the page shows it."""
    reward = round(0.5001 + number / 1000, 4)
    iterations = schema.iterations.c
    with database.engine.begin() as tx:
        newest = tx.execute(text("SELECT max(id) FROM iterations WHERE run_id = :run"), {"run": run}).scalar_one()
        tx.execute(update(schema.iterations).where(iterations.id == newest).values(mean_reward=reward))
        told = {"run_id": run, "kind": "sampling_on", "subject": f"commit {number}", "detail": ""}
        tx.execute(schema.events.insert().values(told))
    began = time.perf_counter()
    shown = f"{reward:.3g}"
    page.wait_for_function(
        "text => [...document.querySelectorAll('main td')].some((cell) => cell.innerText === text)", arg=shown
    )
    return 1000 * (time.perf_counter() - began)


def _share(served: Service) -> float:
    """The processor seconds of the service by second."""
    before, began = _processor(served.process.pid), time.perf_counter()
    time.sleep(WINDOW_SECONDS)
    return (_processor(served.process.pid) - before) / (time.perf_counter() - began)


def _processor(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
