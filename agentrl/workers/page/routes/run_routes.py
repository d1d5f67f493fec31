"""Routes for runs: a list, and one run with its config, curves, events, ledger, lanes, iterations and episodes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from agentrl.workers.page.answers import answer
from agentrl.workers.page.routes import Store
from agentrl.workers.page.shown.shown_texts import LISTED_CHARS, cut_rows, cut_texts, cut_value
from agentrl.workers.page.shown.whole_run import list_shown_runs, load_run, typed_run
from agentrl.workers.requests.run_verdict import describe_iteration_groups, judge_iteration, judge_run
from agentrl.workflow.store.driver_reader import DriverTransaction
from agentrl.workflow.store.reads import (
    curves,
    episode_rows,
    event_rows,
    evidence_rows,
    iteration_rows,
    lanes,
    ledger,
    run_rows,
)
from agentrl.workflow.store.reads.episode_rows import EpisodeFilter
from agentrl.workflow.store.reads.event_rows import EventFilter, EventRow
from agentrl.workflow.store.reads.evidence_rows import list_evidence
from agentrl.workflow.store.reads.iteration_changes import load_iteration_changes
from agentrl.workflow.store.reads.paging import Page, Paging
from agentrl.workflow.store.reads.run_differences import RunDifferences, load_config_columns, load_run_differences
from agentrl.workflow.store.reads.run_rows import RunFilter
from agentrl.workflow.tables.views import IterationRow, UpdateRow


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
    measured: dict[str, Any] | None


class RunWithConfig(ListedRun):
    """A run in a list. `config` has the run's values of the requested config keys; long values are shortened. Runs with the
    same `alike` differ only in the seed.
    """

    config: dict[str, Any]
    alike: str


class RunsPage(BaseModel):
    """A page of runs. `next` is the cursor of the next page; empty on the last page."""

    rows: list[RunWithConfig]
    next: str


class ConfigRow(BaseModel):
    """A value of the config. `cut` is the full length of a shortened value, in characters."""

    key: str
    value: Any
    cut: int | None
    origin: str


class Note(BaseModel):
    """A note of a user."""

    id: int
    text: str
    created_at: datetime


class SourceRun(BaseModel):
    """A run from which this run is derived. `what` says what this run uses of the other run."""

    id: int
    run: str
    what: str


class ChildRun(SourceRun):
    """A run that is derived from this run. `what` says what the other run uses of this run."""

    kind: str


class TroubleAnswer(BaseModel):
    """A remark about the run, and the command to type. `is_note` is True if nothing is wrong."""

    text: str
    command: str
    is_note: bool


class HealthFactAnswer(BaseModel):
    """A short fact about an iteration. `is_off`: the value is outside the limits."""

    text: str
    is_off: bool


class HealthAnswer(BaseModel):
    """The facts that show whether a run is healthy, about its newest finished iteration."""

    iteration: int
    facts: list[HealthFactAnswer]


class ErrorClass(BaseModel):
    """A class of errors. `tool` is the tool whose calls failed, empty for calls that could not be read, and null for errors of
    episodes.
    """

    error_class: str
    tool: str | None
    errors: int
    episodes: int


class VerdictAnswer(BaseModel):
    """Whether something is wrong in a run; see `run_verdict.RunVerdict`."""

    run: str
    status: str
    is_healthy: bool | None
    sentence: str
    troubles: list[TroubleAnswer]
    health: HealthAnswer | None
    errors: list[ErrorClass]


class PartSeconds(BaseModel):
    """A part of the time from the run's start to its end. `share` is its share of this time."""

    part: str
    seconds: float
    share: float


class WholeRun(BaseModel):
    """What the page of a run shows. `typed` is the name or number of the run, for command lines. `progress` is empty if no
    iteration is open.
    """

    run: ListedRun
    typed: str
    config: list[ConfigRow]
    manifest: dict[str, Any]
    progress: dict[str, Any]
    waits_for: str
    seconds: list[PartSeconds]
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
    """Curves: one row per iteration, with one value per column. If `more` is true, ask again with `after` = the last row's
    iteration.
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


class ColumnAnswer(BaseModel):
    """A column of a list: its title, its meaning, and the order that sorts by it."""

    key: str
    title: str
    meaning: str
    sort: str


class FailedCall(BaseModel):
    """A failed tool call, with the beginning of its result."""

    step: int
    tool: str
    error_class: str
    result: str | None


class EvidenceRow(BaseModel):
    """An episode: the columns of v_episodes, its rewards, and its first failed call, which show what happened in it.
    `more_errors` is the number of errors besides the episode's own error or, if it has none, besides the first failed call.
    """

    model_config = ConfigDict(extra="allow")
    id: int
    task_id: int
    question: str
    parts: list[dict[str, Any]]
    failed_call: FailedCall | None
    more_errors: int
    fate: str | None


class TaskDifference(BaseModel):
    """A task that two runs sampled: the mean rewards of its last groups, and an episode of each."""

    task_id: int
    task: str
    question: str
    one: float
    other: float
    one_iteration: int
    other_iteration: int
    one_episode: int | None
    other_episode: int | None


class Difference(BaseModel):
    """A config value (with `key`) or a number (with `name`) in which two runs differ."""

    model_config = ConfigDict(extra="allow")
    one: Any
    other: Any


class DifferencesAnswer(BaseModel):
    """How two runs differ. `shared` is the number of tasks that both runs sampled."""

    runs: list[dict[str, Any]]
    config: list[Difference]
    numbers: list[Difference]
    tasks: list[TaskDifference]
    shared: int


class EpisodesPage(BaseModel):
    """A page of episodes. A search checks only `searched` of `total` episodes, so it may find few; the cursor `next` continues
    the search.
    """

    columns: list[ColumnAnswer]
    rows: list[EvidenceRow]
    next: str
    searched: int | None
    total: int | None


class BesideAnswer(BaseModel):
    """The episodes before and after an episode in a list; null at the beginning or the end of the list."""

    previous: int | None
    next: int | None


class LedgerPage(BaseModel):
    """The outcomes of the episodes of some iterations. `next` is the number of the last of these iterations; empty if no
    iteration follows.
    """

    rows: list[dict[str, Any]]
    next: int | str


class LanesAnswer(BaseModel):
    """The work of each worker over time. Between two spans, the worker is idle. `left_out` is the number of spans beyond the
    limit.
    """

    lanes: list[dict[str, str]]
    spans: list[dict[str, Any]]
    left_out: int
    first: int = Field(alias="from")
    last: int = Field(alias="to")


class IterationAnswer(BaseModel):
    """An iteration with its optimizer steps, groups and episodes. `left_out` is the number of groups beyond the limit, and
    `counted` says how many groups there are and how many teach nothing.
    """

    iteration: IterationRow
    updates: list[UpdateRow]
    groups: list[dict[str, Any]]
    left_out: int
    counted: str
    troubles: list[TroubleAnswer]


class ChangesAnswer(BaseModel):
    """What changed in an iteration: compared with the iteration before it, and for each task compared with the task's previous
    group.
    """

    before: int | None
    numbers: list[dict[str, Any]]
    parts: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    again: int
    shared: int
    worst_count: int
    examples: dict[str, EvidenceRow | None]


router = APIRouter(prefix="/api", tags=["runs"])

Size = Annotated[int, Query(ge=1, le=1000)]
"""The most rows of a page."""
LEDGER_ITERATIONS = 50
MAX_CONFIG_KEYS = 20


@router.get("/runs", response_model=RunsPage)
def list_runs(
    store: Store,
    text: str | None = None,
    status: str | None = None,
    kind: str | None = None,
    dataset: str | None = None,
    model: str | None = None,
    algorithm: str | None = None,
    tag: str | None = None,
    config: Annotated[str, Query(max_length=1000)] = "",
    sort: str = "",
    size: Size = 50,
    cursor: str = "",
) -> Response:
    """Return runs, newest first by default. Evaluations of other runs' policies are not included.

    `config`: the keys of at most 20 config values to return, separated by commas.
    """
    chosen = RunFilter(status, kind, dataset, model, text, algorithm, tag)
    keys = [key for key in config.split(",") if key][:MAX_CONFIG_KEYS]
    return answer(store.ask(lambda tx: _runs(tx, chosen, Paging(size=size, cursor=cursor, sort=sort), keys)))


def _runs(tx: DriverTransaction, chosen: RunFilter, paging: Paging, keys: Sequence[str]) -> dict[str, Any]:
    page = run_rows.list_runs(tx, chosen, paging)
    columns = load_config_columns(tx, [row.id for row in page.rows], keys)
    rows = [{**row, **columns[row["id"]]} for row in list_shown_runs(tx, page.rows)]
    return {
        "rows": [{**row, "config": {key: cut_value(row["config"][key], LISTED_CHARS)[0] for key in keys}} for row in rows],
        "next": page.next,
    }


@router.get("/runs/{run}", response_model=WholeRun)
def read_run(store: Store, run: int) -> Response:
    """Return a run: its row, config, manifest, progress, related runs, and which kinds of database rows it has."""
    return answer(store.ask(lambda tx: load_run(tx, run)))


@router.get("/runs/{run}/against/{other}", response_model=DifferencesAnswer)
def read_differences(store: Store, run: int, other: int) -> Response:
    """Return how two runs differ: config values, numbers, and the tasks that both sampled. Long texts are shortened."""

    def read(tx: DriverTransaction) -> RunDifferences:
        names = [run_rows.run_name(tx, run_id) for run_id in (run, other)]
        return load_run_differences(tx, names[0], names[1])

    differences = asdict(store.ask(read))
    return answer({**differences, "config": cut_rows(differences["config"]), "tasks": cut_rows(differences["tasks"])})


@router.get("/runs/{run}/curves", response_model=CurvesAnswer)
def read_curves(store: Store, run: int, after: int = 0) -> Response:
    """Return the run's evaluations and its curves, for at most 1,000 iterations after iteration `after`."""
    curve_data = store.ask_about_run(run, lambda tx, name: curves.load_curves(tx, name, after))
    fields = {"columns": list(curves.COLUMNS), "meanings": curves.COLUMNS, "rows": curve_data.rows, "evals": curve_data.evals}
    return answer({**fields, "cursor": curve_data.cursor, "more": curve_data.more})


@router.get("/runs/{run}/events", response_model=EventsPage)
def list_events(
    store: Store, run: int, kind: str | None = None, sort: str = "", size: Size = 200, cursor: str = ""
) -> Response:
    """Return the run's events, oldest first; `sort=-id`: newest first."""
    paging = Paging(size=size, cursor=cursor, sort=sort)
    return _page(store.ask_about_run(run, lambda tx, name: event_rows.list_events(tx, EventFilter(name, kind), paging)))


@router.get("/runs/{run}/ledger", response_model=LedgerPage)
def read_ledger(
    store: Store, run: int, after: int = 0, size: Annotated[int, Query(ge=1, le=LEDGER_ITERATIONS)] = LEDGER_ITERATIONS
) -> Response:
    """Return the number of planned episodes per outcome, for at most `size` iterations after iteration `after`."""

    def window(tx: DriverTransaction, name: str) -> Any:
        return ledger.count_fates_after(tx, name, max(0, after), size)

    rows = store.ask_about_run(run, window)
    return answer({"rows": rows, "next": rows[-1]["iteration"] if rows else ""})


@router.get("/runs/{run}/lanes", response_model=LanesAnswer)
def read_lanes(
    store: Store,
    run: int,
    first: Annotated[int | None, Query(alias="from")] = None,
    last: Annotated[int | None, Query(alias="to")] = None,
) -> Response:
    """Return the work of each worker of each queue in some iterations; by default the newest five."""
    timeline = store.ask_about_run(run, lambda tx, name: lanes.load_lanes(tx, name, first, last))
    fields = {"lanes": timeline.lanes, "spans": timeline.spans, "left_out": timeline.left_out}
    return answer({**fields, "from": timeline.first, "to": timeline.last})


@router.get("/runs/{run}/iterations/{number}", response_model=IterationAnswer)
def read_iteration(store: Store, run: int, number: int) -> Response:
    """Return an iteration: its metrics, its optimizer steps, its groups, and the episodes with their outcomes."""
    details = store.ask_about_run(run, lambda tx, name: iteration_rows.load_iteration(tx, name, number))
    fields = {"iteration": details.iteration, "updates": details.updates, "groups": [cut_texts(row) for row in details.groups]}
    troubles = judge_iteration(details, typed_run(run, details.iteration.run))
    fields |= {"counted": describe_iteration_groups(details), "troubles": [asdict(trouble) for trouble in troubles]}
    return answer({**fields, "left_out": details.left_out})


@router.get("/runs/{run}/iterations/{number}/changes", response_model=ChangesAnswer)
def read_changes(store: Store, run: int, number: int) -> Response:
    """Return what changed in an iteration, by reward part, class of errors and task, with episodes that show the change."""
    changes = asdict(store.ask_about_run(run, lambda tx, name: load_iteration_changes(tx, name, number)))
    examples = {name: row and cut_rows([row])[0] for name, row in changes["examples"].items()}
    return answer({**changes, "tasks": cut_rows(changes["tasks"]), "examples": examples})


@dataclass(frozen=True, slots=True)
class AskedEpisodes:
    """The filter and the order of a list of episodes, as parameters of a request."""

    iteration: int | None = None
    group: int | None = None
    status: str | None = None
    stop_reason: str | None = None
    task: str | None = None
    task_id: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    tool_errors: int | None = None
    text: str | None = None
    error_class: str | None = None
    outcome: str | None = None
    truncated: bool | None = None
    fate: str | None = None
    texts_of: int | None = None
    sort: str = ""

    def filter(self, run: str) -> EpisodeFilter:
        """Return the filter of episodes of the run."""
        return EpisodeFilter(run, **{field.name: getattr(self, field.name) for field in fields(self) if field.name != "sort"})


Asked = Annotated[AskedEpisodes, Depends()]


@router.get("/runs/{run}/episodes", response_model=EpisodesPage)
def list_episodes(store: Store, run: int, asked: Asked, size: Size = 50, cursor: str = "") -> Response:
    """Return a page of the episodes that the run sampled, by default ordered by number. Long texts are shortened. A search ends
    after a time limit, perhaps before it has checked all episodes.
    """
    paging = Paging(size=size, cursor=cursor, sort=asked.sort)
    page = store.ask_about_run(run, lambda tx, name: list_evidence(tx, asked.filter(name), paging))
    columns = [{"key": key, **column._asdict()} for key, column in evidence_rows.COLUMNS.items()]
    document = {"rows": cut_rows(page.rows), "next": page.next, "searched": page.searched, "total": page.total}
    return answer({"columns": columns, **document})


@router.get("/runs/{run}/episodes/{episode}/beside", response_model=BesideAnswer)
def read_beside(store: Store, run: int, episode: int, asked: Asked) -> Response:
    """Return the episodes before and after this one in a list of the run's episodes."""
    before, after = store.ask_about_run(
        run, lambda tx, name: episode_rows.find_episodes_beside(tx, asked.filter(name), asked.sort, episode)
    )
    return answer({"previous": before, "next": after})


@router.get("/runs/{run}/examples", response_model=dict[str, list[EvidenceRow]])
def list_examples(store: Store, run: int) -> Response:
    """Return the best and the worst episodes of the run's newest iteration with rewards."""
    examples = store.ask_about_run(run, lambda tx, name: evidence_rows.load_run_examples(tx, name))
    return answer({name: cut_rows(rows) for name, rows in examples.items()})


@router.get("/runs/{run}/verdict", response_model=VerdictAnswer)
def read_verdict(store: Store, run: int) -> Response:
    """Return whether something is wrong in the run, the problems with the commands that help, and the most frequent errors."""
    return answer(store.ask_about_run(run, lambda tx, name: asdict(judge_run(tx, typed_run(run, name)))))


@router.get("/runs/{run}/errors", response_model=list[ErrorClass])
def list_errors(store: Store, run: int, iteration: int | None = None) -> Response:
    """Return the classes of the run's errors, the most frequent first."""
    return answer(store.ask_about_run(run, lambda tx, name: evidence_rows.count_error_classes(tx, name, iteration)))


def _page(page: Page[Any]) -> Response:
    return answer({"rows": cut_rows(page.rows), "next": page.next})
