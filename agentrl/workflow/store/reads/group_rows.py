"""Groups: the episodes of one task in one iteration, which share a baseline."""

from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import sql_read_transaction
from agentrl.workflow.store.reads.changes import run_conditions
from agentrl.workflow.store.reads.paging import Page, Paging, choose_conditions, select_page
from agentrl.workflow.tables.views import GroupRow

GROUP_ORDERS = {"id": "id", "reward": "mean_reward", "deviation": "std_reward"}


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """A filter of a run's groups; the run by its name or number.

    Args:
        iteration: the iteration's number, from 1.
        since: a cursor (`mark_changes`): only groups that may have changed since.
        task: the task's key.
    """

    run: str
    iteration: int | None = None
    since: str | None = None
    status: str | None = None
    task: str | None = None
    worker: str | None = None


_CONDITIONS = {
    "status": "status = :status",
    "task": "task_id IN (SELECT id FROM tasks WHERE key = :task)",
    "worker": "worker = :worker",
}


@sql_read_transaction
def list_groups(tx: Any, chosen: GroupFilter, paging: Paging | None = None) -> Page[GroupRow]:
    """Return the run's own groups, in order of their numbers or in one of GROUP_ORDERS."""
    of_run, of_it = run_conditions(tx, chosen)
    conditions, values = choose_conditions(chosen, _CONDITIONS)
    paging = paging or Paging()
    return select_page(tx, GroupRow, of_run + conditions, of_it | values, paging, GROUP_ORDERS, "id", "groups")
