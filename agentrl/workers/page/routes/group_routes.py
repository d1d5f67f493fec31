"""Routes for tasks, and for one group: its episodes side by side, aligned at their common tokens."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from agentrl.workers.page.answers import answer
from agentrl.workers.page.routes import Store
from agentrl.workers.page.routes.episode_routes import Advantage, ShownRow, ShownTask
from agentrl.workers.page.shown.episode_tokens import find_checked_texts
from agentrl.workers.page.shown.shown_texts import LISTED_CHARS, cut_rows, cut_value
from agentrl.workers.page.shown.whole_group import describe_parting, load_group_answer
from agentrl.workflow.store.reads import task_rows

router = APIRouter(prefix="/api", tags=["groups"])


class Extreme(BaseModel):
    """The episode with a task's highest or lowest reward, and this reward."""

    episode: int
    reward: float


class ListedTask(BaseModel):
    """A task and its groups in all iterations. `judged_groups` of its `groups` have a reward; in `solved_groups` of these, an
    episode is right. Each of its `points` is [iteration, mean reward of a group].
    """

    task_id: int
    task: str
    question: str
    reference: str
    role: str | None
    groups: int
    judged_groups: int
    solved_groups: int
    mean_reward: float | None
    last_reward: float | None
    change: float | None
    first_solved: int | None
    last_solved: int | None
    never_solved: bool
    no_longer_solved: bool
    best: Extreme | None
    worst: Extreme | None
    points: list[tuple[int, float]]


class TasksAnswer(BaseModel):
    """A page of tasks."""

    rows: list[ListedTask]
    next: str
    solved_means: str


class TaskAnswer(BaseModel):
    """A task with its groups, oldest first. `left_out` is the number of groups beyond the limit."""

    task_id: int
    task: str
    role: str | None
    messages: Any
    reference: str
    metadata: Any
    first_solved: int | None
    last_solved: int | None
    never_solved: bool
    no_longer_solved: bool
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
    outcome: str = "",
) -> Response:
    """Return the tasks of the run's groups, at most 40; by default ordered by their first group."""
    page = store.ask_about_run(run, lambda tx, name: task_rows.list_tasks(tx, name, text, sort, size, cursor, outcome))
    return answer({"rows": cut_rows(page.rows, LISTED_CHARS), "next": page.next, "solved_means": page.solved_means})


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


class SiblingText(ShownRow):
    """A text of an episode. Its `kind` is `message` (a message of the prompt), `sampled` (a turn) or `tool` (the result of a
    call).
    """

    step: int
    kind: str
    text: str | None


class Sibling(BaseModel):
    """An episode of the group. `text_left_out` is the number of texts beyond the limit."""

    episode: ShownRow
    parts: list[dict[str, Any]]
    fate: str | None
    advantage: Advantage | None
    text: list[SiblingText]
    text_left_out: int


class PartingAt(BaseModel):
    """The first position at which the episode's tokens are no longer those that all episodes share: the episode's token there,
    the text that follows, and the position from which no other episode has the same tokens (`alone_from`).
    """

    episode: int
    step: int | None
    kind: str | None
    token_index: int
    token: int | None
    token_text: str | None
    next: str | None
    alone_from: int
    alone_step: int | None
    tokens: int


class Branch(BaseModel):
    """A branch of the tree of tokens: the tokens at the positions `from_token` to `to_token` - 1. The branch's episodes have
    these tokens and all earlier tokens in common.
    """

    from_token: int
    to_token: int
    episodes: list[int]
    text: str | None


class Parting(BaseModel):
    """Where the episodes diverge, by exact token ids. `tree` is a prefix tree; each branch comes after its parent. If tokens of
    the episodes were removed, `tokens_removed` is a sentence about it, and there is no branch.
    """

    common_tokens: int
    common_text: str | None
    common_chars: int | None
    why_no_texts: str | None
    tokens_removed: str | None
    at: list[PartingAt]
    tree: list[Branch]


class WholeGroup(BaseModel):
    """A group. `solved`: an episode is right. `left_out` counts the episodes beyond the limit. `parting` says where the
    episodes diverge, within the first `aligned_tokens` tokens of each.
    """

    group: ShownRow
    solved: bool
    task: ShownTask
    siblings: list[Sibling]
    left_out: int
    credit: dict[str, Any]
    aligned_tokens: int
    parting: Parting


@router.get("/groups/{group}", response_model=WholeGroup)
def read_group(store: Store, group: int) -> Response:
    """Return a group: a summary of each episode, the explanations of the advantages, and where the episodes diverge."""
    group_answer = store.ask(lambda tx: load_group_answer(tx, group))
    first = next(iter(group_answer.shapes.values())) if group_answer.lines else None
    texts = find_checked_texts(store, store.settings, group_answer.base, first)
    return answer({**group_answer.document, "parting": describe_parting(group_answer, texts)})
