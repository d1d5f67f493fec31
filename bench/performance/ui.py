"""The page over large stores: how long each of its queries takes, when each view is drawn, how a long strip scrolls, how soon a
commit is seen, and what a page that is left open costs."""

import asyncio
import gzip
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import httpx2
from sqlalchemy import text

from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workers.page.service import STATIC, application
from agentrl.workflow.settings import Settings
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads import task_rows
from agentrl.workflow.store.reads.episode_rows import EPISODE_ORDERS, OUTCOMES
from agentrl.workflow.tables.column_values import EPISODE_STATUS
from agentrl.workflow.tables.views import FATES
from bench.performance import page_in_browser, synthetic
from bench.performance.cases import Cases
from bench.performance.databases import both
from bench.performance.report import Measured, Table, load
from bench.performance.timing import alternate, p95

LIMIT_MS = 150
REPETITIONS = 9
SHOWN = 14
"""The slowest of each table; what is over its limit is shown in any case."""
MAX_BYTES = 250_000
EPISODE_FILTERS: Mapping[str, Sequence[Any]] = {
    "outcome": OUTCOMES,
    "fate": FATES,
    "status": EPISODE_STATUS,
    "truncated": (True, False),
    "stop_reason": ("answered",),
    "error_class": ("ValueError",),
    "tool_errors": (1,),
    "min_reward": (1,),
    "max_reward": (0,),
    "text": ("4_2%",),
}
"""The values with which each filter of episodes is measured, apart from the filters by task, group and iteration."""


def measure() -> Measured:
    """Each shape of database by its routes on both databases; then the page itself, in a browser, over SQLite."""
    tables: list[Table] = []
    cases = Cases()
    for shape, runs in synthetic.SHAPES.items():
        with both() as databases:
            for database in databases.values():
                with database.engine.begin() as tx:
                    synthetic.fill(tx, runs)
            print(f"{shape}: filled", flush=True)
            tables.append(ask_each(databases, shape, cases))
            print(tables[-1].shown(), flush=True)
            with cases.case(f"{shape}: in a browser"):
                tables.append(page_in_browser.first_paints(databases["sqlite"], shape))
                print(tables[-1].shown(), flush=True)
    with cases.case("a long strip"):
        tables.append(page_in_browser.long_strip())
    with cases.case("live"):
        tables.append(page_in_browser.live())
    tables.append(_sizes())
    return Measured(tables, [], cases.unmeasured)


def paths_of(database: Database) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Name -> path and parameters of every question that the page asks, of the first run, its middle, its end."""
    with database.read() as tx:
        run, iterations = tx.execute(text("SELECT id, iterations FROM runs WHERE kind = 'train' ORDER BY id LIMIT 1")).one()
        evals = tx.execute(text("SELECT id FROM runs WHERE measures_id = :run ORDER BY id"), {"run": run}).scalars().all()
        middle = tx.execute(text("SELECT max(id) / 2 FROM episodes WHERE run_id = :run"), {"run": run}).scalar_one()
        query = "SELECT e.group_id, e.task_id, t.key FROM episodes e JOIN tasks t ON t.id = e.task_id WHERE e.id = :id"
        group, task, key = tx.execute(text(query), {"id": middle}).one()
    found: dict[str, tuple[str, Mapping[str, Any]]] = {
        "store": ("store", {}),
        "machine": ("machine", {}),
        "runs": ("runs", {}),
        "runs by reward": ("runs", {"sort": "reward"}),
        "runs by name": ("runs", {"text": "run"}),
        "run": (f"runs/{run}", {}),
        "against": (f"runs/{run}/against/{run + 1}", {}),
        "curves": (f"runs/{run}/curves", {}),
        "events": (f"runs/{run}/events", {"size": 500}),
        "ledger": (f"runs/{run}/ledger", {}),
        "ledger, later": (f"runs/{run}/ledger", {"after": iterations // 2}),
        "lanes": (f"runs/{run}/lanes", {}),
        "iteration": (f"runs/{run}/iterations/{iterations // 2 or 1}", {}),
        "episodes": (f"runs/{run}/episodes", {}),
        "episodes beside": (f"runs/{run}/episodes/{middle}/beside", {"sort": "-reward"}),
        "errors": (f"runs/{run}/errors", {}),
        "verdict": (f"runs/{run}/verdict", {}),
        "examples": (f"runs/{run}/examples", {}),
        "changes": (f"runs/{run}/iterations/{iterations // 2 or 1}/changes", {}),
        "tasks": (f"runs/{run}/tasks", {}),
        "tasks by text": (f"runs/{run}/tasks", {"text": "train/3"}),
        "task": (f"runs/{run}/tasks/{task}", {}),
        "annotations": (f"runs/{run}/annotations", {}),
        "prompts": (f"runs/{run}/prompts", {}),
        "critic calls": (f"runs/{run}/critic-calls", {}),
        "series": (f"runs/{run}/series", {"view": "v_steps", "column": "mean_logprob"}),
        "views": ("views", {}),
        "evals": ("evals", {"measures": run}),
        "all evals": ("evals", {}),
        "group": (f"groups/{group}", {}),
        "episode": (f"episodes/{middle}", {}),
        "tokens": (f"episodes/{middle}/tokens", {}),
    }
    some: dict[str, Any] = {"task": key, "task_id": task, "group": group, "texts_of": group, "iteration": iterations // 2 or 1}
    found |= _lists(
        f"runs/{run}/episodes", "episodes", EPISODE_ORDERS, {**EPISODE_FILTERS, **{name: (some[name],) for name in some}}
    )
    found |= _lists(f"runs/{run}/tasks", "tasks", task_rows.TASK_ORDERS, {"outcome": tuple(task_rows.TASK_OUTCOMES)})
    if len(evals) > 1:
        found["compare"] = ("compare", {"a": evals[0], "b": evals[1]})
    return found


def _lists(
    path: str, what: str, orders: Iterable[str], filters: Mapping[str, Sequence[Any]]
) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Name -> path and parameters: the list in each order, forwards and backwards, and with each value of each filter."""
    sorts = [sort for order in orders for sort in (order, f"-{order}")]
    return {f"{what} by {sort}": (path, {"sort": sort}) for sort in sorts} | {
        f"{what}, {name} {value}": (path, {name: value}) for name, values in filters.items() for value in values
    }


def ask_each(databases: Mapping[str, Database], shape: str, cases: Cases) -> Table:
    """Each of the page's questions, on both databases in turns."""
    asks = {kind: Asker(database) for kind, database in databases.items()}
    rows: list[tuple[float, list[object]]] = []
    for name, (path, asked) in paths_of(databases["sqlite"]).items():
        taken: dict[str, list[float]] = {}
        with cases.case(f"{shape}: {name}"):
            taken = alternate({kind: partial(asker.ask, path, asked) for kind, asker in asks.items()}, REPETITIONS)
        if taken:
            spread = [1000 * of(taken[kind]) for kind in databases for of in (statistics.median, p95)]
            worst = {kind: 1000 * p95(seconds) for kind, seconds in taken.items()}
            slow = ", ".join(kind for kind, value in worst.items() if value > LIMIT_MS)
            rows.append((max(worst.values()), [name, *spread, slow]))
    rows.sort(key=lambda row: -row[0])
    over = sum(worst > LIMIT_MS for worst, _ in rows)
    columns = ["what", *(f"{kind} {value}" for kind in databases for value in ("median", "p95")), "over"]
    title = f"{shape}, never analysed: the page's questions, ms (at most {LIMIT_MS} at p95); {over} of {len(rows)} over"
    return Table(title, columns, [row for _, row in rows[: max(SHOWN, over)]], load())


class Asker:
    """Asks the service in process: its queries, and the JSON that it makes of them."""

    def __init__(self, database: Database) -> None:
        self._app = application(ReadOnlyStore(Settings(database_url=database.url.render_as_string(hide_password=False))))

    def ask(self, path: str, asked: Mapping[str, Any]) -> bytes:
        """The answer, which must be one."""
        found = asyncio.run(self._get(path, asked))
        assert found.status_code == 200, (path, found.status_code, found.text[:300])
        return found.content

    async def _get(self, path: str, asked: Mapping[str, Any]) -> httpx2.Response:
        transport = httpx2.ASGITransport(self._app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:7788") as client:
            return await client.get(f"/api/{path}", params=dict(asked) or None)


def _sizes() -> Table:
    files = [file for file in sorted(STATIC.rglob("*")) if file.suffix in (".html", ".css", ".js", ".svg")]
    packed = {file.relative_to(STATIC).as_posix(): len(gzip.compress(file.read_bytes())) for file in files}
    own = sum(size for name, size in packed.items() if not name.startswith("vendor/"))
    whole = sum(packed.values())
    rows = [["its own files", own], ["preact and uPlot", whole - own], ["all", whole], ["at most", MAX_BYTES]]
    return Table("the page's files, bytes compressed", ["what", "bytes"], rows, load())
