"""Attempts of agents from outside at episodes."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from agentrl.workflow.store.driver_reader import sql_read_transaction
from agentrl.workflow.store.reads.paging import Page, Paging, ViewRow
from agentrl.workflow.store.reads.run_rows import select_parts_page


@dataclass(frozen=True, slots=True, eq=False)
class AgentAttemptRow(ViewRow):
    """One attempt of an agent at an episode."""

    VIEW: ClassVar[str] = "v_agent_attempts"
    id: int
    run: str
    iteration: int
    episode_id: int
    attempt: int
    status: str
    worker: str
    exit_code: int | None
    error_class: str | None
    error: str
    answer: str | None
    attempts: int
    seconds: float | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


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
