"""The route for one group: its episodes side by side, aligned at their common tokens."""

from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel

from agentrl.workers.page.answers import answer
from agentrl.workers.page.routes import Store
from agentrl.workers.page.routes.episode_answers import Advantage, ShownRow, ShownTask
from agentrl.workers.page.shown.episode_tokens import check_namesake
from agentrl.workers.page.shown.token_texts import find_texts
from agentrl.workers.page.shown.whole_group import describe_parting, load_group_answer

router = APIRouter(prefix="/api", tags=["groups"])


class SiblingText(ShownRow):
    """A text of an episode: a message of the prompt (`message`), a sampled turn (`sampled`), or the result of a call
    (`tool`).
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
    """The place where an episode leaves the tokens that all episodes share: its token there, the text that follows, and the
    place from which no other episode has the same tokens (`alone_from`).
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
    """The tokens `from_token` to `to_token` - 1. All of these episodes have them in common, and every earlier token."""

    from_token: int
    to_token: int
    episodes: list[int]
    text: str | None


class Parting(BaseModel):
    """Where the episodes diverge, by exact token ids. `tree` is a prefix tree; each branch comes after its parent."""

    common_tokens: int
    common_text: str | None
    common_chars: int | None
    why_no_texts: str | None
    at: list[PartingAt]
    tree: list[Branch]


class WholeGroup(BaseModel):
    """A group. `left_out` is the number of episodes beyond the limit; at most `aligned_tokens` tokens of each episode are
    aligned.
    """

    group: ShownRow
    task: ShownTask
    siblings: list[Sibling]
    left_out: int
    credit: dict[str, Any]
    aligned_tokens: int
    parting: Parting


@router.get("/groups/{group}", response_model=WholeGroup)
def read_group(store: Store, group: int) -> Response:
    """Return a group: its episodes in short, the explanations of their advantages, and where they diverge."""
    group_answer = store.ask(lambda tx: load_group_answer(tx, group))
    texts = find_texts(store.settings, group_answer.base)
    if not texts.sure and group_answer.shapes:
        first = next(iter(group_answer.shapes.values()))
        texts = store.ask(lambda tx: check_namesake(tx, first, texts))
    return answer({**group_answer.document, "parting": describe_parting(group_answer, texts)})
