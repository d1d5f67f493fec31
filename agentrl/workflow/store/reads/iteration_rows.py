"""Iterations of a run, and the optimizer steps of their updates."""

from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import sql_read_transaction
from agentrl.workflow.store.reads.changes import since_values
from agentrl.workflow.store.reads.paging import BY_NUMBER, Page, Paging, choose_conditions, select_page
from agentrl.workflow.store.reads.run_rows import run_id_and_name
from agentrl.workflow.tables.views import IterationRow, UpdateRow

ITERATION_ORDERS = {"iteration": "iteration"}


@dataclass(frozen=True, slots=True)
class IterationFilter:
    """A filter of a run's iterations; the run by its name or number.

    Args:
        after: only iterations of a greater number, from 1.
        since: a cursor (`mark_changes`): only iterations that may have changed since.
    """

    run: str
    status: str | None = None
    after: int | None = None
    since: str | None = None


_CONDITIONS = {"status": "status = :status", "after": "iteration > :after"}


@sql_read_transaction
def list_iterations(tx: Any, chosen: IterationFilter, paging: Paging | None = None) -> Page[IterationRow]:
    """Return the run's iterations in their order."""
    run = run_id_and_name(tx, chosen.run)
    conditions, values = choose_conditions(chosen, _CONDITIONS)
    conditions, values = ["run = :run", *conditions], {"run": run["name"], **values}
    if chosen.since is not None:
        conditions, values["first_open"] = (
            [*conditions, "iteration > :first_open"],
            since_values(chosen.since, run["id"])["first_open"],
        )
    return select_page(tx, IterationRow, conditions, values, paging or Paging(), ITERATION_ORDERS, "iteration")


@dataclass(frozen=True, slots=True)
class UpdateFilter:
    """A filter of a run's optimizer steps: all, or those of an iteration, from 1."""

    run: str
    iteration: int | None = None


@sql_read_transaction
def list_updates(tx: Any, chosen: UpdateFilter, paging: Paging | None = None) -> Page[UpdateRow]:
    """Return the run's optimizer steps in their order."""
    conditions, values = choose_conditions(chosen, {"iteration": "iteration = :iteration"})
    values["run"] = run_id_and_name(tx, chosen.run)["name"]
    return select_page(tx, UpdateRow, ["run = :run", *conditions], values, paging or Paging(), BY_NUMBER, "id")
