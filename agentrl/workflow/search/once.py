"""One pass: every task with the texts as they are, to see how an agent does."""

from collections.abc import Sequence

from agentrl.workflow.search import Resources, Rollouts
from agentrl.workflow.trajectory import Task


def run(resources: Resources, rollouts: Rollouts, train_tasks: Sequence[Task]) -> None:
    """Roll out; it chooses nothing."""
    rollouts(dict(resources), train_tasks)
