"""A workload without tools, as a user would write it: eight prompts of digits, a reward that means nothing. Free of torch."""

import random
from collections.abc import Iterator, Sequence

from agentrl.workflow.datasets import Dataset
from agentrl.workflow.envs import Env
from agentrl.workflow.trajectory import Episode, Message, Task

PROMPTS, GROUP_SIZE = 8, 8
DIGITS = 58
"""With the template's own tokens, 64 in a prompt."""


def question(task: int) -> str:
    """The prompt."""
    draw = random.Random(task)
    return "".join(str(draw.randrange(10)) for _ in range(DIGITS))


def luck(sampled_ids: Sequence[int]) -> float:
    """0 or 1, so that a random model has something to learn in each group."""
    return float(sum(sampled_ids) % 2)


def lucky(episode: Episode) -> float:
    """The reward as an episode's."""
    return luck([token for step in episode.steps for token in step.sampled_ids])


def _tasks(split: str) -> Iterator[Task]:
    for task in range(PROMPTS):
        yield Task(f"{split}/{task}", (Message("user", question(task)),), "")


env = Env(rewards={f"{__name__}:lucky": 1.0})
dataset = Dataset(load=_tasks, env=f"{__name__}:env")
