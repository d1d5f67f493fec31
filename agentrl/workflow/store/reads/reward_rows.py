"""Rewards: the parts of an episode's reward, in each reward set."""

from dataclasses import dataclass
from typing import Any

from agentrl.workflow.store.driver_reader import sql_read_transaction
from agentrl.workflow.store.reads.paging import Page, Paging
from agentrl.workflow.store.reads.run_rows import select_parts_page
from agentrl.workflow.tables.views import RewardRow


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
