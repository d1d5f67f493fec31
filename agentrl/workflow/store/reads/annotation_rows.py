"""Annotations of episodes, by agents, tools and hooks."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from agentrl.workflow.store.driver_reader import sql_read_transaction
from agentrl.workflow.store.reads.paging import Page, Paging, ViewRow
from agentrl.workflow.store.reads.run_rows import select_parts_page


@dataclass(frozen=True, slots=True, eq=False)
class AnnotationRow(ViewRow):
    """An annotation of an episode."""

    VIEW: ClassVar[str] = "v_annotations"
    id: int
    run: str
    iteration: int
    episode_id: int
    attempt: int
    step: int | None
    source: str
    kind: str
    name: str
    data: Mapping[str, Any]
    seconds: float | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class AnnotationFilter:
    """A filter of annotations: by run (name or number), episode, source, kind and name."""

    run: str | None = None
    episode: int | None = None
    source: str | None = None
    kind: str | None = None
    name: str | None = None


_CONDITIONS = {"episode": "episode_id = :episode", "source": "source = :source", "kind": "kind = :kind", "name": "name = :name"}


@sql_read_transaction
def list_annotations(tx: Any, chosen: AnnotationFilter, paging: Paging | None = None) -> Page[AnnotationRow]:
    """Annotations in the order in which they were written."""
    return select_parts_page(tx, AnnotationRow, chosen, _CONDITIONS, paging)
