"""Any number of any view as a series over a run's iterations, and what views there are."""

from fastapi import APIRouter, Response
from pydantic import BaseModel

from agentrl.workers.page.answers import answer
from agentrl.workers.page.routes import Store
from agentrl.workflow.store.reads import series

router = APIRouter(prefix="/api", tags=["series"])


class PartialSum(BaseModel):
    """What the values of some rows came to in an iteration."""

    iteration: int
    count: int
    sum: float | None
    min: float
    max: float


class SeriesPage(BaseModel):
    """Partial sums: an iteration may come again in what follows `next`, and is added up."""

    rows: list[PartialSum]
    next: str


class ViewColumn(BaseModel):
    """A column; `chartable`: a number by iteration."""

    column: str
    meaning: str
    chartable: bool


class View(BaseModel):
    """A view of the rows."""

    view: str
    meaning: str
    columns: list[ViewColumn]


@router.get("/runs/{run}/series", response_model=SeriesPage)
def read_series(store: Store, run: int, view: str, column: str, cursor: str = "") -> Response:
    """Return the next 5,000 rows of the run in a view: how often a column has a number, its sum, least and greatest by
    iteration.
    """
    found = store.ask_about_run(run, lambda tx, name: series.read_series(tx, name, view, column, cursor))
    return answer({"rows": found.rows, "next": found.next})


@router.get("/views", response_model=list[View])
def list_views() -> Response:
    """Return every view with its columns and what they mean."""
    return answer(series.list_views())
