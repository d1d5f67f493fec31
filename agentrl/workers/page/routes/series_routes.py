"""Routes for any numeric column of any view as a series over a run's iterations, and a list of the views."""

from fastapi import APIRouter, Response
from pydantic import BaseModel

from agentrl.workers.page.answers import answer
from agentrl.workers.page.routes import Store
from agentrl.workflow.store.reads import series

router = APIRouter(prefix="/api", tags=["series"])


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
    """A column of a view. `chartable`: it is a number, and the view has iterations."""

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
