"""Routes for one episode: its data, its long texts, its tokens."""

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from agentrl.workers.page.answers import answer
from agentrl.workers.page.routes import Store
from agentrl.workers.page.shown.episode_tokens import EpisodeTokens, find_checked_texts
from agentrl.workers.page.shown.whole_episode import load_episode_answer
from agentrl.workflow.store.driver_reader import DriverTransaction
from agentrl.workflow.store.reads.turn_rows import MAX_PATH, load_text

CUT = "The full lengths of the shortened texts, in characters, by name"
OF = "The paths of the shortened texts, by name. /api/episodes/{id}/text returns the full text of a path."


class ShownRow(BaseModel):
    """An object made from a database row. Its long texts are shortened."""

    model_config = ConfigDict(extra="allow")
    cut: dict[str, int] | None = Field(None, description=CUT)
    of: dict[str, str] | None = Field(None, description=OF)


class ShownMessage(ShownRow):
    """A message. `edited` is true for a tool message that differs from every result of the turn before it."""

    role: str
    content: str
    name: str | None = None
    thought: str | None = None
    tool_calls: Any = None
    edited: bool = False


class ShownTask(ShownRow):
    """The task of an episode or group."""

    id: int
    key: str
    reference: str
    messages: list[ShownMessage]
    messages_left_out: int


class ShownCall(ShownRow):
    """A tool call. `queue_seconds` is its waiting time. `loose` is true if the model wrote the call as bare JSON."""

    id: int
    call: int
    tool: str
    loose: bool
    kind: str
    arguments: Any
    status: str
    result: str | None
    error_class: str | None
    starts: int
    attempts: int
    seconds: float | None
    queue_seconds: float | None
    cpu_seconds: float | None
    sandbox: str | None
    exit_status: str | None
    exit_code: int | None
    worker: str
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class ShownAnnotation(ShownRow):
    """An annotation that an agent, a tool or a hook wrote."""

    id: int
    step: int | None
    source: str
    kind: str
    name: str
    data: Any
    seconds: float | None
    created_at: datetime


class StepReward(BaseModel):
    """A part of a step's reward."""

    reward_set: str
    part: str
    value: float | None
    weight: float | None


class TurnAnswer(ShownRow):
    """A turn of the policy.

    `messages` are the messages that are new in the turn's prompt, without those that repeat the result of a call. If a chain
    begins inside another chain, `shared_messages` of its first turn is the number of messages that the two chains share.
    `equal` is the number of turns with the same tokens, if there are several. `inherited` is true if the turn was taken from
    the parent of a fork. `trains` is true if an update on this episode trains on this turn.
    """

    step: int
    chain: int
    parent_step: int | None
    shared_tokens: int | None
    policy_version: int
    thought: str | None
    content: str | None
    text: str | None
    new_row: str | None
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int
    mean_logprob: float | None
    generate_seconds: float | None
    delivered: bool
    trains: bool
    why_not: str | None
    inherited: bool
    equal: int | None
    request_id: str | None
    sampled_at: datetime
    observed_at: datetime | None
    messages: list[ShownMessage]
    messages_left_out: int
    shared_messages: int
    calls: list[ShownCall]
    calls_left_out: int
    rewards: list[StepReward]
    annotations: list[ShownAnnotation]


class ShownChain(BaseModel):
    """A chain: its steps, the step after which it begins, and the range of its tokens in `/tokens`."""

    chain: int
    steps: list[int]
    from_step: int | None
    shared_tokens: int | None
    start: int
    end: int


class Advantage(BaseModel):
    """How an episode's advantage is computed: `how` is `formula` and, if there is one, `calculation` in one sentence. `agrees`
    is true if the result equals the value that the update recorded.
    """

    value: float | None
    how: str
    formula: str
    calculation: str
    algorithm: str | None
    reward: float | None
    group_mean: float | None
    group_std: float | None
    group_size: int
    numbers: dict[str, float | None]
    computed: float | None
    agrees: bool | None
    run: str | None = None
    run_id: int | None = None


class ForkedEpisode(BaseModel):
    """An episode that was forked from a step of this episode."""

    id: int
    run: str
    run_id: int
    step: int | None
    reward: float | None
    status: str


class Beside(BaseModel):
    """The previous and the next episode of the group."""

    previous: int | None
    next: int | None


class Parent(BaseModel):
    """The episode from which this episode was forked, and the first step that is not inherited from it."""

    id: int
    step: int | None


class WholeEpisode(BaseModel):
    """An episode. `next_turn` is the first turn that is not included, for the parameter `turn`; null if there is none.
    `tokens_removed` is a sentence about the removal of the episode's tokens; null if they are stored.
    """

    episode: ShownRow
    run_kind: str
    tokens_removed: str | None
    beside: Beside
    task: ShownTask
    agent: ShownRow | None
    turns: list[TurnAnswer]
    next_turn: int | None
    chains: list[ShownChain]
    rewards: list[dict[str, Any]]
    rewards_left_out: int
    grades: list[ShownCall]
    fate: dict[str, Any]
    read_by: list[dict[str, Any]]
    advantage: Advantage
    parent: Parent | None
    forks: list[ForkedEpisode]
    forks_left_out: int
    annotations: list[ShownAnnotation]
    annotations_left_out: int
    resources: list[dict[str, Any]]
    commands: dict[str, str | None]


class TextPart(BaseModel):
    """A part of a text. `next` is the start of the next part; null at the end."""

    of: str
    text: str
    start: int
    total: int
    next: int | None


class Segment(BaseModel):
    """Consecutive tokens of one kind and one step, from `start` to before `end`. If they were sampled and no update
    trains on them, `why_not` says why.
    """

    start: int
    end: int
    kind: Literal["prompt", "sampled"]
    step: int
    chain: int
    trains: bool
    why_not: str | None
    advantage: float | None


class Metric(BaseModel):
    """A number for each token, and its source."""

    name: str
    source: Literal["stored", "computed", "missing"]
    how: str


class Tokens(BaseModel):
    """Tokens of an episode, chain after chain, in segments. If all tokens of each segment have the same advantage, the segments
    have the advantages, and `advantages` is null."""

    total: int
    start: int
    ids: list[int]
    texts: list[str] | None
    why_no_texts: str | None
    logprobs: list[float | None]
    segments: list[Segment]
    advantages: list[float | None] | None
    metrics: list[Metric]


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
    """Return an episode with its turns from `turn` on. Long texts are shortened; `/text` returns them completely."""
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
    """Return tokens of the episode, in the order of its training rows: ids, texts, logprobs, and segments with their kinds. The
    status is 409 if the tokens were removed.
    """

    def read(tx: DriverTransaction) -> tuple[EpisodeTokens, dict[str, Any]]:
        reader = EpisodeTokens(tx, episode)
        return reader, reader.read(start, size)

    tokens, token_data = store.ask(read)
    token_texts = find_checked_texts(store, store.settings, tokens.run["base"], tokens.shape)
    texts, why = tokens.texts(token_texts, token_data)
    return answer({**{name: token_data[name] for name in TOKEN_PARTS}, "texts": texts, "why_no_texts": why})


TOKEN_PARTS = ("total", "start", "ids", "logprobs", "segments", "advantages", "metrics")
"""The fields of a response about tokens, except their texts."""
