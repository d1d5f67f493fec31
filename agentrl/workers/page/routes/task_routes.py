"""Routes for the tasks of a run: all tasks over the iterations, and one task with its groups."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from agentrl.workers.page.answers import answer
from agentrl.workers.page.routes import Store
from agentrl.workers.page.shown.shown_texts import LISTED_CHARS, cut_rows, cut_value
from agentrl.workflow.store.reads import task_rows

router = APIRouter(prefix="/api", tags=["tasks"])


class Extreme(BaseModel):
    """An episode and its reward."""

    episode: int
    reward: float


class ListedTask(BaseModel):
    """A task over the iterations. Each of its `points` is [iteration, mean reward of a group]."""

    task_id: int
    task: str
    reference: str
    role: str | None
    groups: int
    mean_reward: float | None
    last_reward: float | None
    first_solved: int | None
    never_solved: bool
    best: Extreme | None
    worst: Extreme | None
    points: list[tuple[int, float]]


class TasksAnswer(BaseModel):
    """A page of tasks. `left_out` is the number of their newest groups that have too many episodes to read."""

    rows: list[ListedTask]
    next: str
    solved_means: str
    left_out: int


class TaskAnswer(BaseModel):
    """A task with its groups, oldest first. `left_out` is the number of groups beyond the limit."""

    task_id: int
    task: str
    role: str | None
    messages: Any
    reference: str
    metadata: Any
    first_solved: int | None
    never_solved: bool
    solved_means: str
    best: Extreme | None
    worst: Extreme | None
    points: list[tuple[int, float]]
    groups: list[dict[str, Any]]
    left_out: int


@router.get("/runs/{run}/tasks", response_model=TasksAnswer)
def list_tasks(
    store: Store,
    run: int,
    text: str = "",
    sort: str = "",
    size: Annotated[int, Query(ge=1, le=1000)] = 25,
    cursor: str = "",
) -> Response:
    """Return the tasks of the run's groups, at most 40; by default ordered by their first group."""
    page = store.ask_about_run(run, lambda tx, name: task_rows.list_tasks(tx, name, text, sort, size, cursor))
    fields = {"rows": cut_rows(page.rows, LISTED_CHARS), "next": page.next}
    return answer({**fields, "solved_means": page.solved_means, "left_out": page.left_out})


@router.get("/runs/{run}/tasks/{task}", response_model=TaskAnswer)
def read_task(store: Store, run: int, task: int) -> Response:
    """Return a task: its messages, and all of its groups with their episodes' rewards."""
    document = store.ask_about_run(run, lambda tx, name: task_rows.load_task(tx, name, task))
    cut = {}
    for name in ("task", "reference", "metadata"):
        document[name], cut[name] = cut_value(document[name])
    messages = [_cut_message(message) for message in document["messages"]]
    return answer({**document, "messages": messages, "cut": {name: size for name, size in cut.items() if size is not None}})


def _cut_message(message: Any) -> Any:
    if not isinstance(message, dict):
        return cut_value(message)[0]
    cut = {name: cut_value(value) for name, value in message.items()}
    lost = {name: size for name, (_, size) in cut.items() if size is not None}
    return {**{name: value for name, (value, _) in cut.items()}, **({"cut": lost} if lost else {})}
