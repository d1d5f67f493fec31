"""Rewards: the parts of an episode's reward, in each reward set."""

from dataclasses import dataclass
from typing import Any, ClassVar

from agentrl.workflow.store.driver_reader import sql_read_transaction
from agentrl.workflow.store.reads.paging import Page, Paging, ViewRow
from agentrl.workflow.store.reads.run_rows import select_parts_page


@dataclass(frozen=True, slots=True, eq=False)
class RewardRow(ViewRow):
    """A part of an episode's reward; `step` is None if it is for the full episode."""

    VIEW: ClassVar[str] = "v_rewards"
    id: int
    run: str
    iteration: int
    episode_id: int
    task: str
    reward_set: str
    part: str
    step: int | None
    value: float
    weight: float


@dataclass(frozen=True, slots=True)
class RewardFilter:
    """A filter of rewards: by run (name or number) or by episode."""

    run: str | None = None
    episode: int | None = None
    reward_set: str | None = None
    part: str | None = None


_CONDITIONS = {"episode": "episode_id = :episode", "reward_set": "reward_set = :reward_set", "part": "part = :part"}


@sql_read_transaction
def list_rewards(tx: Any, chosen: RewardFilter, paging: Paging | None = None) -> Page[RewardRow]:
    """Rewards in the order in which they were given."""
    return select_parts_page(tx, RewardRow, chosen, _CONDITIONS, paging)
