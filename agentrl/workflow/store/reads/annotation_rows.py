"""Lists of the annotations that agents, tools and hooks wrote to episodes."""

from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import sql_read_transaction
from agentrl.workflow.store.reads.paging import BY_NUMBER, FEW_BY_NUMBER, Page, Paging, choose_conditions, select_page
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.tables.views import AnnotationRow


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
    """Return annotations in the order of writing."""
    conditions, values = choose_conditions(chosen, _CONDITIONS)
    if chosen.run is not None:
        conditions, values["run"] = ["run = :run", *conditions], run_id_and_name(tx, chosen.run)["name"]
    orders = BY_NUMBER if chosen.episode is None else FEW_BY_NUMBER
    return select_page(tx, AnnotationRow, conditions, values, paging or Paging(), orders, "id")
