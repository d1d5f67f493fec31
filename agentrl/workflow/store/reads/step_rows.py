"""Steps: the turns of the policy. Their exact tokens are in an episode's value (`find_episode`)."""

from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import sql_read_transaction
from agentrl.workflow.store.reads.paging import Page, Paging
from agentrl.workflow.store.reads.run_rows import select_parts_page
from agentrl.workflow.tables.views import StepRow


@dataclass(frozen=True, slots=True)
class StepFilter:
    """A filter of steps: by run (name or number) or by episode.

    Args:
        text: a text in the sampled text.
    """

    run: str | None = None
    episode: int | None = None
    text: str | None = None


_CONDITIONS = {"episode": "episode_id = :episode", "text": "lower(text) LIKE lower(:text) ESCAPE '!'"}


@sql_read_transaction
def list_steps(tx: Any, chosen: StepFilter, paging: Paging | None = None) -> Page[StepRow]:
    """Steps in the order in which they were sampled."""
    return select_parts_page(tx, StepRow, chosen, _CONDITIONS, paging)
