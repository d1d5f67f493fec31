"""Routes for evaluations: a list, and a comparison of two, task by task."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field

from agentrl.workers.page.answers import answer
from agentrl.workers.page.routes import Store
from agentrl.workers.page.shown.shown_texts import cut_rows
from agentrl.workers.requests.eval_comparison import MEASURES, OTHER_REWARDS, Sides, counted_rewards, list_remarks, load_sides
from agentrl.workflow.errors import StateError
from agentrl.workflow.runtime.shown_text import format_count
from agentrl.workflow.stats.paired_test import PairedComparison
from agentrl.workflow.store.driver_reader import DriverTransaction
from agentrl.workflow.store.reads import eval_results, run_rows
from agentrl.workflow.store.reads.eval_results import EvalFilter
from agentrl.workflow.store.reads.paging import Page, Paging
from agentrl.workflow.tables.views import EvalRow

router = APIRouter(prefix="/api", tags=["evals"])

MAX_TASKS = 1000
"""The most tasks in the list of a comparison; those with the largest difference are listed."""


class Side(BaseModel):
    """One of the compared evaluations. `mean` and `right` are averages over the compared tasks."""

    id: int
    run: str
    measures: str | None
    dataset: str
    split: str
    mean: float | None
    right: float | None
    episodes: int
    errors: int
    tasks: int
    rewards: dict[str, Any]
    created_at: datetime


class Measures(BaseModel):
    """The difference B - A with its 95% interval, and the p-value of a paired sign-flip test."""

    difference: float | None
    low: float | None
    high: float | None
    interval_by: str
    p_value: float | None
    method: str
    won: int
    lost: int
    tied: int


class ComparedTask(BaseModel):
    """A task with its mean reward in A and in B, and the first episode of each."""

    task_id: int
    task: str
    question: str
    a: float | None
    b: float | None
    difference: float | None
    a_episode: int | None
    b_episode: int | None
    a_answer: str | None
    b_answer: str | None


class Comparison(BaseModel):
    """A comparison of two evaluations. `measures` is null if the rewards differ. `right` is null if no rule decides which
    episodes are right.
    """

    a: Side
    b: Side
    measures: Measures | None
    right: Measures | None
    tasks: list[ComparedTask] = Field(description="Largest difference first")
    left_out: int
    remarks: list[str]


@router.get("/evals", response_model=Page[EvalRow])
def list_evals(
    store: Store,
    measures: str | None = None,
    dataset: str | None = None,
    split: str | None = None,
    status: str | None = None,
    sort: str = "",
    size: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: str = "",
) -> Response:
    """Return evaluations, by default ordered by the measured version. With `measures`, the name or number of a run, return only
    the evaluations of that run's policies.
    """
    chosen = EvalFilter(of_policies=measures or None, dataset=dataset, split=split, status=status)
    page = eval_results.list_evals(store, chosen, Paging(size=size, cursor=cursor, sort=sort))
    return answer({"rows": cut_rows(page.rows), "next": page.next})


@router.get("/compare", response_model=Comparison)
def compare(store: Store, a: int, b: int) -> Response:
    """Compare two evaluations, given by the numbers of their runs, task by task: the difference B - A, its interval and
    p-value.
    """

    def both(tx: DriverTransaction) -> dict[str, Any]:
        sides = load_sides(tx, _find_eval(tx, a), _find_eval(tx, b))
        document = _document(sides, eval_results.list_first_episodes(tx, a, b))
        questions = eval_results.load_questions(tx, [row["task_id"] for row in document["tasks"]])
        answers = eval_results.load_answers(tx, [row[side] for row in document["tasks"] for side in ("a_episode", "b_episode")])
        tasks = [
            {
                **row,
                "question": questions[row["task_id"]],
                "a_answer": answers.get(row["a_episode"]),
                "b_answer": answers.get(row["b_episode"]),
            }
            for row in document["tasks"]
        ]
        return {**document, "tasks": tasks}

    return answer(store.ask(both))


def _find_eval(tx: DriverTransaction, run: int) -> Mapping[str, Any]:
    name = run_rows.run_name(tx, run)
    evals = eval_results.find_evals(tx, name)
    if not evals:
        raise StateError(f"There is no evaluation {name!r}.", "Pass the run numbers of two evaluations that /api/evals lists.")
    return evals[0]


def _document(sides: Sides, episodes: list[Mapping[str, Any]]) -> dict[str, Any]:
    rewards, rights = sides.compare_means(), sides.compare_rights()
    comparable = bool(rights.tasks) and sides.same_rule
    tasks = sorted(
        (_compared(sides, row) for row in episodes), key=lambda row: (-abs(row["difference"] or 0.0), row["task_id"])
    )
    return {
        "a": _side(sides, 0, rewards.first, rights.first),
        "b": _side(sides, 1, rewards.second, rights.second),
        "measures": None if sides.rewards == OTHER_REWARDS else _measures(rewards),
        "right": _measures(rights) if comparable else None,
        "tasks": tasks[:MAX_TASKS],
        "left_out": len(tasks[MAX_TASKS:]),
        "remarks": [*_remarks_on_tasks(sides, rewards.tasks), *list_remarks(sides.one, sides.other, comparable)],
    }


def _side(sides: Sides, place: int, mean: float, right: float) -> dict[str, Any]:
    row = (sides.one, sides.other)[place]
    columns = {name: row[name] for name in ("id", "run", "measures", "dataset", "split", "episodes", "errors", "created_at")}
    return {**columns, "mean": mean, "right": right, "tasks": len(sides.means[place]), "rewards": counted_rewards(row)}


def _measures(comparison: PairedComparison) -> dict[str, Any]:
    return {name: getattr(comparison, name) for name in MEASURES}


def _compared(sides: Sides, row: Mapping[str, Any]) -> dict[str, Any]:
    a, b = (means.get(row["task_id"]) for means in sides.means)
    return {**row, "a": a, "b": b, "difference": None if a is None or b is None else b - a}


def _remarks_on_tasks(sides: Sides, compared: int) -> list[str]:
    one, other = (means.keys() for means in sides.means)
    if one == other:
        left = len(one) - compared
        return [f"{format_count(left, 'task')} left out: one side has no done episode."] if left else []
    counts = f"A has {format_count(len(one), 'task')}, B has {len(other)}"
    return [f"{counts}. Only the tasks in both are compared: {len(one & other)}."]
