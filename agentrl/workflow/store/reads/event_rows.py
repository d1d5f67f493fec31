"""Lists of the events of runs, and of the annotations that agents, tools and hooks wrote to episodes."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agentrl.workflow.annotations import KINDS, SOURCES
from agentrl.workflow.store.driver_reader import sql_read_transaction
from agentrl.workflow.store.reads.changes import since_values
from agentrl.workflow.store.reads.paging import BY_NUMBER, FEW_BY_NUMBER, Page, Paging, choose_conditions, select_page
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.tables.view_row import ViewRow
from agentrl.workflow.tables.views import AnnotationRow


class EventRow(ViewRow, view="events"):
    """An event of a run: its kind, the part of the run that it concerns, and a text."""

    id: int
    run_id: int | None
    kind: str
    subject: str
    detail: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class EventFilter:
    """A filter of a run's events. With a cursor of `mark_changes` as `since`, it selects only events that may be newer than the
    cursor.
    """

    run: str
    kind: str | None = None
    since: str | None = None


@sql_read_transaction
def list_events(tx: Any, chosen: EventFilter, paging: Paging | None = None) -> Page[EventRow]:
    """Return the run's events, oldest first."""
    run_id = run_id_and_name(tx, chosen.run)["id"]
    conditions, values = choose_conditions(chosen, {"kind": "kind = :kind"})
    conditions, values["run_id"] = ["run_id = :run_id", *conditions], run_id
    if chosen.since is not None:
        conditions, values["last_event"] = [*conditions, "id > :last_event"], since_values(chosen.since, run_id)["last_event"]
    return select_page(tx, EventRow, conditions, values, paging or Paging(), BY_NUMBER, "id")


@dataclass(frozen=True, slots=True)
class AnnotationFilter:
    """A filter of annotations by run (its name or number), episode, source, kind and name."""

    run: str | None = None
    episode: int | None = None
    source: str | None = None
    kind: str | None = None
    name: str | None = None


_CONDITIONS = {"episode": "episode_id = :episode", "source": "source = :source", "kind": "kind = :kind", "name": "name = :name"}


@sql_read_transaction
def list_annotations(tx: Any, chosen: AnnotationFilter, paging: Paging | None = None) -> Page[AnnotationRow]:
    """Return annotations in the order in which they were written. Raise ConfigError if there is no such kind or source."""
    conditions, values = choose_conditions(chosen, _CONDITIONS, {"kind": KINDS, "source": SOURCES})
    if chosen.run is not None:
        conditions, values["run"] = ["run = :run", *conditions], run_id_and_name(tx, chosen.run)["name"]
    orders = BY_NUMBER if chosen.episode is None else FEW_BY_NUMBER
    return select_page(tx, AnnotationRow, conditions, values, paging or Paging(), orders, "id")
