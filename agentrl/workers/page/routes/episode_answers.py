"""The answers of the routes of episodes, as OpenAPI schemas."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

CUT = "The characters, in all, of those of its texts that are cut, by name"
OF = "The path of each cut text, for /api/episodes/{id}/text"


class ShownRow(BaseModel):
    """A row, as it is; texts that are too long are cut."""

    model_config = ConfigDict(extra="allow")
    cut: dict[str, int] | None = Field(None, description=CUT)
    of: dict[str, str] | None = Field(None, description=OF)


class ShownMessage(ShownRow):
    """A message. `edited`: a tool's that is not what a call of the turn before it gave."""

    role: str
    content: str
    name: str | None = None
    thought: str | None = None
    tool_calls: Any = None
    edited: bool = False


class ShownTask(ShownRow):
    """The task."""

    id: int
    key: str
    reference: str
    messages: list[ShownMessage]
    messages_left_out: int


class ShownCall(ShownRow):
    """A call; `queue_seconds` is how long it waited, `loose` that it was written as bare JSON."""

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
    """What an agent, a tool or a hook said."""

    id: int
    step: int | None
    source: str
    kind: str
    name: str
    data: Any
    seconds: float | None
    created_at: datetime


class StepReward(BaseModel):
    """What a step earned."""

    reward_set: str
    part: str
    value: float | None
    weight: float | None


class TurnAnswer(ShownRow):
    """A turn of the policy.

    `messages` are what was put before it since the turn before, less what stands there as a call's result; `shared_messages`:
    of a chain that begins within another one's line, with how many of its messages. `equal`: how many turns say what its line
    says, where several do. `inherited`: a fork has it from its parent. `trains`: an update that reads the episode reads it.
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
    """A chain: its steps, the step that it begins after, and where its tokens are (`/tokens`)."""

    chain: int
    steps: list[int]
    from_step: int | None
    shared_tokens: int | None
    start: int
    end: int


class Advantage(BaseModel):
    """Why an episode has its advantage: `how`, from `numbers`; `agrees`: whether that gives what the update recorded."""

    value: float | None
    how: str
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


class Fork(BaseModel):
    """An episode that goes on from one of the steps."""

    id: int
    run: str
    run_id: int
    step: int | None
    reward: float | None
    status: str


class Beside(BaseModel):
    """Its siblings before and after it."""

    previous: int | None
    next: int | None


class Parent(BaseModel):
    """The episode that it was forked from, and the first step that is its own."""

    id: int
    step: int | None


class WholeEpisode(BaseModel):
    """An episode. `next_turn`: the first turn that is not here, for `turn`; null: there is none."""

    episode: ShownRow
    run_kind: str
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
    forks: list[Fork]
    forks_left_out: int
    annotations: list[ShownAnnotation]
    annotations_left_out: int
    resources: list[dict[str, Any]]
    commands: dict[str, str | None]


class TextPart(BaseModel):
    """A part of a text; `next` is where the following one starts, null at the end."""

    of: str
    text: str
    start: int
    total: int
    next: int | None


class Segment(BaseModel):
    """Tokens from `start` to before `end` that are of one kind, of one step; a sampled one that does not train says why."""

    start: int
    end: int
    kind: Literal["prompt", "sampled"]
    step: int
    chain: int
    trains: bool
    why_not: str | None
    advantage: float | None


class Metric(BaseModel):
    """A number of each token, and where it is from."""

    name: str
    source: Literal["stored", "computed", "missing"]
    how: str


class Tokens(BaseModel):
    """Tokens of an episode's line: its chains, one after another. `advantages`: one for each, where a segment's differ."""

    total: int
    start: int
    ids: list[int]
    texts: list[str] | None
    why_no_texts: str | None
    logprobs: list[float | None]
    segments: list[Segment]
    advantages: list[float | None] | None
    metrics: list[Metric]
