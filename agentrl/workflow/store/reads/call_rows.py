"""Calls: those of the policy to tools, and those that judge an episode."""

from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import sql_read_transaction
from agentrl.workflow.store.reads.paging import Page, Paging
from agentrl.workflow.store.reads.run_rows import select_parts_page
from agentrl.workflow.tables.views import CallRow


@dataclass(frozen=True, slots=True)
class CallFilter:
    """A filter of calls: by run (name or number) or by episode.

    Args:
        text: a text in the result.
    """

    run: str | None = None
    episode: int | None = None
    kind: str | None = None
    tool: str | None = None
    status: str | None = None
    error_class: str | None = None
    text: str | None = None


_CONDITIONS = {
    "episode": "episode_id = :episode",
    "kind": "kind = :kind",
    "tool": "tool = :tool",
    "status": "status = :status",
    "error_class": "error_class = :error_class",
    "text": "lower(result) LIKE lower(:text) ESCAPE '!'",
}


@sql_read_transaction
def list_calls(tx: Any, chosen: CallFilter, paging: Paging | None = None) -> Page[CallRow]:
    """The calls in the order of the requests."""
    return select_parts_page(tx, CallRow, chosen, _CONDITIONS, paging)
