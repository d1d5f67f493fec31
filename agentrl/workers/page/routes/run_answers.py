"""The schemas of responses about runs."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agentrl.workflow.store.reads.event_rows import EventRow
from agentrl.workflow.tables.views import EpisodeRow, IterationRow, UpdateRow


class ListedRun(BaseModel):
    """A run in a list: the columns of v_runs, and a summary."""

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
    """A page of runs. `next` is the cursor of the next page; empty on the last page."""

    rows: list[ListedRun]
    next: str


class ConfigRow(BaseModel):
    """A value of the config. `cut` is the full length of a shortened value, in characters."""

    key: str
    value: Any
    cut: int | None
    origin: str


class ComparedRow(ConfigRow):
    """A value of the config, and the value of another run."""

    other: Any
    other_origin: str | None
    differs: bool


class ConfigRows(BaseModel):
    """The complete config."""

    rows: list[ComparedRow]


class Note(BaseModel):
    """A note of a user."""

    id: int
    text: str
    created_at: datetime


class SourceRun(BaseModel):
    """A run from which this run comes."""

    id: int
    run: str
    what: str


class ChildRun(SourceRun):
    """A run that comes from this run."""

    kind: str


class WholeRun(BaseModel):
    """A run. `typed` is its name on a command line; `children_cut`: there are more children than listed; `progress` is empty if
    no iteration is open.
    """

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
    """Curves: a row for each iteration, with a value for each column. `more`: request further rows with `after` = the last
    row's iteration.
    """

    columns: list[str]
    meanings: dict[str, str]
    rows: list[list[Any]]
    evals: list[dict[str, Any]]
    cursor: int
    more: bool


class EventsPage(BaseModel):
    """A page of events, oldest first."""

    rows: list[EventRow]
    next: str


class EpisodesPage(BaseModel):
    """A page of episodes."""

    rows: list[EpisodeRow]
    next: str


class LedgerPage(BaseModel):
    """The outcomes of the episodes of some iterations. `next` is the last iteration's number; empty at the end."""

    rows: list[dict[str, Any]]
    next: int | str


class LanesAnswer(BaseModel):
    """The work of each worker over time; a worker is idle between its spans. `left_out` is the number of spans beyond the
    limit.
    """

    lanes: list[dict[str, str]]
    spans: list[dict[str, Any]]
    left_out: int
    first: int = Field(alias="from")
    last: int = Field(alias="to")


class IterationAnswer(BaseModel):
    """An iteration with its optimizer steps, groups and episodes. `left_out` is the number of groups beyond the limit."""

    iteration: IterationRow
    updates: list[UpdateRow]
    groups: list[dict[str, Any]]
    left_out: int
