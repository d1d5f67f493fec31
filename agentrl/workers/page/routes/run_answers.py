"""The answers of the routes of runs, as OpenAPI schemas."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agentrl.workflow.store.reads.event_rows import EventRow
from agentrl.workflow.tables.views import EpisodeRow, IterationRow, UpdateRow


class ListedRun(BaseModel):
    """A run: the columns of v_runs, and what a list shows beside them."""

    model_config = ConfigDict(extra="allow")
    id: int
    run: str
    algorithm: str | None
    tags: list[str]
    spark: list[list[float]]
    tokens: int | None
    waits_for: str
    active_at: datetime | None


class RunsPage(BaseModel):
    """Runs; `next` is the cursor of those that follow, empty after the last."""

    rows: list[ListedRun]
    next: str


class ConfigRow(BaseModel):
    """A value of the config; `cut`: how many characters one has that is too long to show."""

    key: str
    value: Any
    cut: int | None
    origin: str


class ComparedRow(ConfigRow):
    """A value beside another run's."""

    other: Any
    other_origin: str | None
    differs: bool


class ConfigRows(BaseModel):
    """The whole config."""

    rows: list[ComparedRow]


class Note(BaseModel):
    """What a person noted."""

    id: int
    text: str
    created_at: datetime


class SourceRun(BaseModel):
    """A run that the run comes from."""

    id: int
    run: str
    what: str


class ChildRun(SourceRun):
    """A run that comes from the run."""

    kind: str


class WholeRun(BaseModel):
    """One run. `typed`: how a command is told it; `children_cut`: there are more than those; `progress` is empty where no
    iteration is open."""

    run: ListedRun
    typed: str
    config: list[ConfigRow]
    manifest: dict[str, Any]
    progress: dict[str, Any]
    waits_for: str
    sampled_on: str
    tags: list[str]
    notes: list[Note]
    sources: list[SourceRun]
    children: list[ChildRun]
    children_cut: bool
    has: dict[str, bool]
    reward_parts: list[str]
    open_work: list[dict[str, Any]]
    evaluations: int


class CurvesAnswer(BaseModel):
    """Curves: a row for each iteration, a value for each column; `more`: ask on with `after` = the last row's number."""

    columns: list[str]
    meanings: dict[str, str]
    rows: list[list[Any]]
    evals: list[dict[str, Any]]
    cursor: int
    more: bool


class EventsPage(BaseModel):
    """Events, oldest first."""

    rows: list[EventRow]
    next: str


class EpisodesPage(BaseModel):
    """Episodes."""

    rows: list[EpisodeRow]
    next: str


class LedgerPage(BaseModel):
    """The fates of some iterations' episodes; `next` is the last number, or empty at the end."""

    rows: list[dict[str, Any]]
    next: int | str


class LanesAnswer(BaseModel):
    """Who worked when: what no span covers is idle. `left_out`: spans that were too many to show."""

    lanes: list[dict[str, str]]
    spans: list[dict[str, Any]]
    left_out: int
    first: int = Field(alias="from")
    last: int = Field(alias="to")


class IterationAnswer(BaseModel):
    """An iteration with its optimizer steps, groups and their episodes. `left_out`: groups that were too many to show."""

    iteration: IterationRow
    updates: list[UpdateRow]
    groups: list[dict[str, Any]]
    left_out: int
