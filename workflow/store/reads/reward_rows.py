"""Rewards: the parts of an episode's reward, in each reward set."""

from dataclasses import dataclass
from typing import Any, ClassVar

from agentrl.workflow.store.driver_reader import sql_read_transaction
from agentrl.workflow.store.reads.paging import BY_NUMBER, FEW_BY_NUMBER, Page, Paging, ViewRow, choose_conditions, select_page
from agentrl.workflow.store.reads.run_rows import add_run_condition


@dataclass(frozen=True, slots=True, eq=False)
class RewardRow(ViewRow):
    """A part of an episode's reward; without a `step` if the whole episode earned it."""

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
    conditions, values = choose_conditions(chosen, _CONDITIONS)
    conditions, values = add_run_condition(tx, chosen.run, conditions, values)
    orders = BY_NUMBER if chosen.episode is None else FEW_BY_NUMBER
    return select_page(tx, RewardRow, conditions, values, paging or Paging(), orders, "-id")
