"""A single pass over the tasks with the current prompts, to evaluate an agent."""

from collections.abc import Sequence

from agentrl.workflow.search import Resources, Rollouts
from agentrl.workflow.trajectory import Task


def run(resources: Resources, rollouts: Rollouts, train_tasks: Sequence[Task]) -> None:
    """Sample the episodes. No prompt is chosen."""
    rollouts(dict(resources), train_tasks)
