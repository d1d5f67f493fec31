"""Routes for the store: its location, the load of the hosts, its views, and any numeric column of a view as a series over a
run's iterations.
"""

from dataclasses import dataclass
from datetime import datetime

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from agentrl import __version__
from agentrl.workers.page.answers import answer
from agentrl.workers.page.read_only import ReadOnlyStore
from agentrl.workers.page.routes import Store
from agentrl.workers.page.shown.shown_texts import cut_rows
from agentrl.workflow.config import RunConfig
from agentrl.workflow.store.connect import database_url
from agentrl.workflow.store.reads import load_rows, run_rows, series
from agentrl.workflow.tables.views import MachineRow

router = APIRouter(prefix="/api", tags=["store"])


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """The store that the page shows.

    Args:
        place: the file of the store, or its URL without a password.
        backend: "sqlite" or "postgresql".
        version: this agentrl's version.
        newest_run: the name of the run that was submitted last; null if there is none.
        actions: true if the page may do more than read.
        config_keys: the keys of a run's config, in the order of their declaration.
    """

    place: str
    backend: str
    version: str
    newest_run: str | None
    actions: bool
    config_keys: list[str]


@router.get("/store", response_model=StoreAnswer)
def describe_store(store: Store, request: Request) -> Response:
    """Return a description of the page's store."""
    newest = run_rows.find_newest_run(store)
    facts = {"version": __version__, "newest_run": newest, "actions": request.app.state.actions}
    return answer({**describe_place(store), **facts, "config_keys": [*RunConfig().flat()]})


def describe_place(store: ReadOnlyStore) -> dict[str, str]:
    """Return the location of the store, without a password."""
    url = database_url(store.settings.database)
    is_file = url.get_backend_name() == "sqlite"
    place = str(url.database) if is_file else url.set(drivername="postgresql").render_as_string(hide_password=True)
    return {"place": place, "backend": "sqlite" if is_file else "postgresql"}


@dataclass(frozen=True, slots=True)
class MachineAnswer:
    """The load of the hosts over the last ten minutes.

    Args:
        rows: the rows of `v_machine`, oldest first.
        clock: the database's time.
        running: the number of running runs.
        fresh: true if at least one host reports its load at present.
        start: the command that starts workers.
    """

    rows: list[MachineRow]
    clock: datetime
    running: int
    fresh: bool
    start: str


@router.get("/machine", response_model=MachineAnswer)
def read_machine(store: Store) -> Response:
    """Return the load of the hosts over the last ten minutes."""
    loads = load_rows.load_machines(store)
    start = "docker compose up -d" if store.settings.image else "agentrl up"
    return answer(
        {"rows": cut_rows(loads.rows), "clock": loads.clock, "running": loads.running, "fresh": loads.fresh, "start": start}
    )


class PartialSum(BaseModel):
    """The count, sum, minimum and maximum of a column over some rows of an iteration."""

    iteration: int
    count: int
    sum: float | None
    min: float
    max: float


class SeriesPage(BaseModel):
    """A page of partial sums. An iteration may occur again on the next page; the client adds the sums."""

    rows: list[PartialSum]
    next: str


class ViewColumn(BaseModel):
    """A column of a view. `chartable` is true if the column is numeric and the view has iterations."""

    column: str
    meaning: str
    chartable: bool


class View(BaseModel):
    """A view of the database."""

    view: str
    meaning: str
    columns: list[ViewColumn]


@router.get("/runs/{run}/series", response_model=SeriesPage)
def read_series(store: Store, run: int, view: str, column: str, cursor: str = "") -> Response:
    """Return the count, sum, minimum and maximum of a column by iteration, over the next 5,000 rows of the run in a view."""
    window = store.ask_about_run(run, lambda tx, name: series.read_series(tx, name, view, column, cursor))
    return answer({"rows": window.rows, "next": window.next})


@router.get("/views", response_model=list[View])
def list_views() -> Response:
    """Return all views with their columns and meanings."""
    return answer(series.list_views())
