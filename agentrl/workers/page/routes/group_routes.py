"""One group: its siblings side by side, aligned at what they share."""

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
    """What was put before the model (message), what it sampled, or what a call of it gave (tool)."""

    step: int
    kind: str
    text: str | None


class Sibling(BaseModel):
    """An episode of the group; `text_left_out`: texts that were too many."""

    episode: ShownRow
    parts: list[dict[str, Any]]
    fate: str | None
    advantage: Advantage | None
    text: list[SiblingText]
    text_left_out: int


class PartingAt(BaseModel):
    """Where a sibling leaves what all share: its token there, what follows, and from where on nobody else has what it has."""

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
    """Tokens from `from_token` to before `to_token` that all of these have, as far as they share all before."""

    from_token: int
    to_token: int
    episodes: list[int]
    text: str | None


class Parting(BaseModel):
    """Where siblings part, by exact ids; `tree` is a prefix tree, each branch after the one that it goes on from."""

    common_tokens: int
    common_text: str | None
    common_chars: int | None
    why_no_texts: str | None
    at: list[PartingAt]
    tree: list[Branch]


class WholeGroup(BaseModel):
    """A group. `left_out`: siblings that were too many; `aligned_tokens`: as many of each are aligned."""

    group: ShownRow
    task: ShownTask
    siblings: list[Sibling]
    left_out: int
    credit: dict[str, Any]
    aligned_tokens: int
    parting: Parting


@router.get("/groups/{group}", response_model=WholeGroup)
def read_group(store: Store, group: int) -> Response:
    """Return one group: its episodes in short, why each has its advantage, and where they part."""
    found = store.ask(lambda tx: load_group_answer(tx, group))
    texts = find_texts(store.settings, found.base)
    if not texts.sure and found.shapes:
        first = next(iter(found.shapes.values()))
        texts = store.ask(lambda tx: check_namesake(tx, first, texts))
    return answer({**found.told, "parting": describe_parting(found, texts)})
