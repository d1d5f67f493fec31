"""Steps: the turns of the policy. Their exact tokens are in an episode's value (`find_episode`)."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from agentrl.workflow.store.driver_reader import sql_read_transaction
from agentrl.workflow.store.reads.paging import Page, Paging, ViewRow
from agentrl.workflow.store.reads.run_rows import select_parts_page


@dataclass(frozen=True, slots=True, eq=False)
class StepRow(ViewRow):
    """One turn of the policy in an episode."""

    VIEW: ClassVar[str] = "v_steps"
    id: int
    run: str
    iteration: int
    episode_id: int
    step: int
    attempt: int
    thought: str
    content: str
    text: str
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int
    mean_logprob: float | None
    generate_seconds: float
    policy_version: int
    staleness: int | None
    new_row: str | None
    chain: int
    parent_step: int | None
    shared_tokens: int | None
    delivered: bool
    request_id: str | None
    sampled_at: datetime
    observed_at: datetime | None


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
