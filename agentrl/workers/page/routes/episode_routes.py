"""Routes for one episode: its data, its long texts, its tokens."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from agentrl.workers.page.answers import answer
from agentrl.workers.page.routes import Store
from agentrl.workers.page.routes.episode_answers import TextPart, Tokens, WholeEpisode
from agentrl.workers.page.shown.episode_tokens import EpisodeTokens, check_namesake
from agentrl.workers.page.shown.token_texts import find_texts
from agentrl.workers.page.shown.whole_episode import load_episode_answer
from agentrl.workflow.store.driver_reader import DriverTransaction
from agentrl.workflow.store.reads.turn_rows import MAX_PATH, load_text

router = APIRouter(prefix="/api", tags=["episodes"])

MAX_TOKENS = 8192
MAX_TURNS = 500
MAX_TEXT = 200_000
"""The most characters of a text in a response; MAX_TOKENS and MAX_TURNS limit the tokens and the turns."""
Start = Annotated[int, Query(ge=0, le=2**53)]


@router.get("/episodes/{episode}", response_model=WholeEpisode)
def read_episode(
    store: Store, episode: int, turn: Start = 0, size: Annotated[int, Query(ge=1, le=MAX_TURNS)] = 200
) -> Response:
    """Return an episode with its turns from `turn` on. Texts of more than 20,000 characters are shortened; `/text` returns them
    completely.
    """
    return answer(store.ask(lambda tx: load_episode_answer(tx, episode, turn, size)))


@router.get("/episodes/{episode}/text", response_model=TextPart)
def read_text(
    store: Store,
    episode: int,
    of: Annotated[str, Query(max_length=MAX_PATH)],
    start: Start = 0,
    size: Annotated[int, Query(ge=1, le=MAX_TEXT)] = MAX_TEXT,
) -> Response:
    """Return a part of a text of the episode. `of` is the path of a shortened text in the episode's response."""
    text = store.ask(lambda tx: load_text(tx, episode, of))
    end = start + size
    part = {"of": of, "text": text[start:end], "start": start, "total": len(text)}
    return answer({**part, "next": end if end < len(text) else None})


@router.get("/episodes/{episode}/tokens", response_model=Tokens)
def read_tokens(
    store: Store, episode: int, start: Start = 0, size: Annotated[int, Query(ge=1, le=MAX_TOKENS)] = 4096
) -> Response:
    """Return tokens of the episode, in the order of its training rows: ids, texts, logprobs, and segments with their kinds."""

    def read(tx: DriverTransaction) -> tuple[EpisodeTokens, dict[str, Any]]:
        reader = EpisodeTokens(tx, episode)
        return reader, reader.read(start, size)

    tokens, token_data = store.ask(read)
    token_texts = find_texts(store.settings, tokens.run["base"])
    if not token_texts.sure:
        token_texts = store.ask(lambda tx: check_namesake(tx, tokens.shape, token_texts))
    texts, why = tokens.texts(token_texts, token_data)
    return answer({**{name: token_data[name] for name in TOKEN_PARTS}, "texts": texts, "why_no_texts": why})


TOKEN_PARTS = ("total", "start", "ids", "logprobs", "segments", "advantages", "metrics")
"""The fields of a response about tokens, except their texts."""
