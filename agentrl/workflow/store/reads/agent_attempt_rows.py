"""Attempts of agents from outside at episodes."""

from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import sql_read_transaction
from agentrl.workflow.store.reads.paging import Page, Paging
from agentrl.workflow.store.reads.run_rows import select_parts_page
from agentrl.workflow.tables.views import AgentAttemptRow


@dataclass(frozen=True, slots=True)
class AgentAttemptFilter:
    """A filter of attempts: by run (name or number), by episode, by status (pending, running, ended, lost)."""

    run: str | None = None
    episode: int | None = None
    status: str | None = None


_CONDITIONS = {"episode": "episode_id = :episode", "status": "status = :status"}


@sql_read_transaction
def list_agent_attempts(tx: Any, chosen: AgentAttemptFilter, paging: Paging | None = None) -> Page[AgentAttemptRow]:
    """Attempts in the order in which they were made."""
    return select_parts_page(tx, AgentAttemptRow, chosen, _CONDITIONS, paging)
