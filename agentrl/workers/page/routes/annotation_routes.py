"""Routes for annotations, prompts, the results of a prompt search, and its requests to its critic."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from agentrl.workers.page.answers import answer
from agentrl.workers.page.routes import Store
from agentrl.workers.page.shown.shown_texts import SHOWN_CHARS, cut_rows
from agentrl.workflow.store.driver_reader import DriverTransaction
from agentrl.workflow.store.reads import event_rows, resource_rows, search_tree
from agentrl.workflow.store.reads.event_rows import AnnotationFilter
from agentrl.workflow.store.reads.paging import Paging
from agentrl.workflow.store.reads.resource_rows import CriticCallFilter
from agentrl.workflow.store.reads.search_tree import SearchCandidate

router = APIRouter(prefix="/api", tags=["annotations and prompts"])

Size = Annotated[int, Query(ge=1, le=1000)]
FewSize = Annotated[int, Query(ge=1, le=100)]
"""The most rows of a page of long texts."""
GAIN = ("first", "second", "difference", "low", "high", "interval_by", "p_value", "method", "tasks", "won", "lost", "tied")


class EpisodeAnnotation(BaseModel):
    """An annotation that an agent, a tool or a hook wrote. `cut` has the full lengths of shortened values, in characters."""

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
    """The gain of a prompt search, measured on the same tasks: `first` with the initial texts, `second` with the best texts."""

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
    """A version of a prompt. The rewards are null if the version has too many groups to read."""

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
    """A page of prompt versions. `left_out` is the number of versions that have too many groups to read their rewards."""

    rows: list[PromptVersion]
    next: str
    left_out: int


class TreeCandidate(BaseModel):
    """A candidate of a search. `score` is its mean reward on `tasks` tasks; the search compares candidates by it. `held_out` is
    its mean reward on held-out tasks. `group` is the id of the first group that was sampled with it. `difference` is the
    beginning of the difference between its text and its parent's text.
    """

    number: int
    parent: int | None
    label: str
    note: str
    status: str
    is_best: bool
    on_path: bool
    group: int | None
    episodes: int
    score: float | None
    tasks: int
    held_out: float | None
    difference: str


class SearchAnswer(BaseModel):
    """The results of a prompt search: what was gained, as sentences and numbers, and the candidates that it tried."""

    sentences: str
    gain: Gain | None
    candidates: list[TreeCandidate]
    left_out: int


class CandidateAnswer(BaseModel):
    """How a candidate came about: `texts` that differ from the parent's, and the requests to the `critic` that led to it."""

    texts: list[dict[str, Any]]
    critic: list[dict[str, Any]]


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
    """Return the versions of the run's prompts, at most 50."""
    prompts = store.ask_about_run(run, lambda tx, name: resource_rows.list_prompts(tx, name, size, cursor))
    return answer({"rows": cut_rows(prompts.rows, SHOWN_CHARS), "next": prompts.next, "left_out": prompts.left_out})


@router.get("/runs/{run}/search", response_model=SearchAnswer)
def read_search(store: Store, run: int) -> Response:
    """Return the results of a prompt search: what it gained, and the tree of the candidates that it tried."""
    tree = store.ask_about_run(run, search_tree.load_search_tree)
    gain = tree.gain and {name: getattr(tree.gain, name) for name in GAIN}
    rows = cut_rows([_shown_candidate(one) for one in tree.candidates])
    return answer({"sentences": tree.sentences, "gain": gain, "candidates": rows, "left_out": tree.left_out})


@router.get("/runs/{run}/search/{number}", response_model=CandidateAnswer)
def read_candidate(store: Store, run: int, number: int) -> Response:
    """Return a candidate of a search: its texts, their differences from the parent's texts, and the critic's responses."""
    origin = store.ask_about_run(run, lambda tx, name: search_tree.load_candidate(tx, name, number))
    texts = [
        {
            "name": one.name,
            "version": one.version,
            "text": one.text,
            "diff": None if one.parent_text is None else "\n".join(search_tree.diff_lines(one.parent_text, one.text)[2:]),
        }
        for one in origin.texts
    ]
    return answer({"texts": cut_rows(texts, SHOWN_CHARS), "critic": cut_rows(origin.critic, SHOWN_CHARS)})


def _shown_candidate(one: SearchCandidate) -> dict[str, Any]:
    score, tasks = one.score(one.scored_on)
    names = ("number", "parent", "label", "note", "status", "is_best", "on_path", "group", "episodes", "difference")
    return {
        **{name: getattr(one, name) for name in names},
        "score": score,
        "tasks": tasks,
        "held_out": one.score("held_out")[0],
    }


@router.get("/runs/{run}/critic-calls", response_model=CriticCallsPage)
def list_critic_calls(store: Store, run: int, sort: str = "", size: FewSize = 20, cursor: str = "") -> Response:
    """Return the requests of the run's search to its critic, in order."""

    def page(tx: DriverTransaction, name: str) -> Any:
        return resource_rows.list_critic_calls(tx, CriticCallFilter(name), Paging(size=size, cursor=cursor, sort=sort))

    result = store.ask_about_run(run, page)
    return answer({"rows": cut_rows(result.rows, SHOWN_CHARS), "next": result.next})
