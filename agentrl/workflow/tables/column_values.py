"""The values of columns that have only a few: what a filter may ask for, and what the constraints of the tables allow."""

from collections.abc import Iterable
from typing import get_args

from agentrl.workflow.trajectory import TRANSITIONS, StopReason

RUN_STATUS = ("planned", "running", "paused", "done", "failed", "cancelled")
WORK_STATUS = ("planned", "running", "done", "cancelled")
"""The statuses of an iteration, and of a group."""
EPISODE_STATUS = tuple(TRANSITIONS)
STOP_REASONS = get_args(StopReason)
CALL_STATUS = ("pending", "started", "done", "unknown_outcome", "unobserved")
EFFECTS = ("none", "repeatable", "once")
CALL_KINDS = ("call", "grade", "agent")
RUN_KINDS = ("train", "eval", "fork", "serve", "search", "import")
TASK_ROLES = ("train", "choose", "held_out")
AGENT_STATUS = ("pending", "running", "ended", "lost")
LOSS_EVENTS = ("oom", "worker_lost", "device_lost")
"""The kinds of events that name a lost worker. The kernel killed it for lack of memory (`oom`), it was lost for another reason
(`worker_lost`), or it ended because its GPU failed (`device_lost`).
"""


def list_in_sql(values: Iterable[str]) -> str:
    """Return values that the code itself names as the list of an SQL IN. They are not escaped."""
    return ", ".join(f"'{value}'" for value in values)
