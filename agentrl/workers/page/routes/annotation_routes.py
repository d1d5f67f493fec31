"""Routes for annotations, prompts, and a search's requests to its critic."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from agentrl.workers.page.answers import answer
from agentrl.workers.page.routes import Store
from agentrl.workers.page.shown.shown_texts import SHOWN_CHARS, cut_rows
from agentrl.workflow.stats.paired_test import compare_paired
from agentrl.workflow.store.driver_reader import DriverTransaction
from agentrl.workflow.store.reads import event_rows, resource_rows, run_rows
from agentrl.workflow.store.reads.event_rows import AnnotationFilter
from agentrl.workflow.store.reads.paging import Paging
from agentrl.workflow.store.reads.resource_rows import CriticCallFilter

router = APIRouter(prefix="/api", tags=["annotations and prompts"])

Size = Annotated[int, Query(ge=1, le=1000)]
FewSize = Annotated[int, Query(ge=1, le=100)]
"""The most rows of a page of long texts."""
GAIN = ("first", "second", "difference", "low", "high", "interval_by", "p_value", "method", "tasks", "won", "lost", "tied")


class EpisodeAnnotation(BaseModel):
    """An annotation by an agent, a tool or a hook. `cut` has the full lengths of shortened values, in characters."""

    id: int
    run: str
    iteration: int
    episode_id: int
    attempt: int
    step: int | None
    source: str
    kind: str
    name: str
    data: Any
    seconds: float | None
    created_at: datetime
    cut: dict[str, int] | None = None


class AnnotationsPage(BaseModel):
    """A page of annotations."""

    rows: list[EpisodeAnnotation]
    next: str


class Gain(BaseModel):
    """The gain of a prompt search on held-out tasks: `first` with the initial texts, `second` with the chosen ones."""

    first: float | None
    second: float | None
    difference: float | None
    low: float | None
    high: float | None
    interval_by: str
    p_value: float | None
    method: str
    tasks: int
    won: int
    lost: int
    tied: int


class PromptVersion(BaseModel):
    """A version of a prompt. Its rewards are null if it has too many groups to read."""

    id: int
    run: str
    name: str
    version: int
    parent_version: int | None
    note: str
    chosen: bool
    text: str
    groups: int | None
    episodes_done: int | None
    mean_reward: float | None
    choose_reward: float | None
    created_at: datetime
    cut: dict[str, int] | None = None


class PromptsAnswer(BaseModel):
    """A page of prompt versions. `held_out` is null without an evaluation. `left_out` is the number of versions that have too
    many groups to read their rewards.
    """

    rows: list[PromptVersion]
    next: str
    left_out: int
    held_out: Gain | None


class CriticCall(BaseModel):
    """A request of a search to its critic, and the critic's response."""

    id: int
    run: str
    model: str
    messages: Any
    answer: str
    seconds: float
    created_at: datetime
    cut: dict[str, int] | None = None


class CriticCallsPage(BaseModel):
    """A page of critic calls."""

    rows: list[CriticCall]
    next: str


@router.get("/runs/{run}/annotations", response_model=AnnotationsPage)
def list_annotations(
    store: Store,
    run: int,
    kind: str | None = None,
    name: str | None = None,
    source: str | None = None,
    sort: str = "",
    size: Size = 100,
    cursor: str = "",
) -> Response:
    """Return the annotations of the run's episodes, in the order in which they were written."""

    def page(tx: DriverTransaction, run_name: str) -> Any:
        chosen = AnnotationFilter(run=run_name, kind=kind, name=name, source=source)
        return event_rows.list_annotations(tx, chosen, Paging(size=size, cursor=cursor, sort=sort))

    result = store.ask_about_run(run, page)
    return answer({"rows": cut_rows(result.rows), "next": result.next})


@router.get("/runs/{run}/prompts", response_model=PromptsAnswer)
def list_prompts(store: Store, run: int, size: FewSize = 20, cursor: str = "") -> Response:
    """Return the versions of the run's prompts, at most 50, and what a search gained."""

    def page(tx: DriverTransaction, name: str) -> dict[str, Any]:
        prompts = resource_rows.list_prompts(tx, name, size, cursor)
        searched = run_rows.run_by_id(tx, run).kind == "search"
        gain = _find_gain(tx, name) if searched and not cursor else None
        rows = cut_rows(prompts.rows, SHOWN_CHARS)
        return {"rows": rows, "next": prompts.next, "left_out": prompts.left_out, "held_out": gain}

    return answer(store.ask_about_run(run, page))


def _find_gain(tx: DriverTransaction, run: str) -> dict[str, Any] | None:
    measured = resource_rows.find_held_out(tx, run)
    comparison = compare_paired(measured.seed, measured.chosen)
    return {name: getattr(comparison, name) for name in GAIN} if comparison.tasks else None


@router.get("/runs/{run}/critic-calls", response_model=CriticCallsPage)
def list_critic_calls(store: Store, run: int, sort: str = "", size: FewSize = 20, cursor: str = "") -> Response:
    """Return the requests of the run's search to its critic, in order."""

    def page(tx: DriverTransaction, name: str) -> Any:
        return resource_rows.list_critic_calls(tx, CriticCallFilter(name), Paging(size=size, cursor=cursor, sort=sort))

    result = store.ask_about_run(run, page)
    return answer({"rows": cut_rows(result.rows, SHOWN_CHARS), "next": result.next})
