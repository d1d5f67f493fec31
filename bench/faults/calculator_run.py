"""The run of `killed_sampler`, for both sides: the quickstart's model and tasks, a call of the calculator and an answer.

Each iteration samples the same prompts, so that both sides take one step per epoch. Free of torch.
"""

from itertools import islice
from typing import Any

from agentrl.workflow.datasets.arithmetic import load
from bench.faults import sampled_log

GROUPS, GROUP_SIZE = 64, 8
TURNS, TURN_TOKENS = 3, 32
LEARNING_RATE = 4e-4
UPDATES = 4
TRL_MICROBATCH = 64
"""Completions of one forward and backward pass; TRL generates for all prompts at once."""


def questions() -> list[tuple[str, str]]:
    """The prompts and their references."""
    return [(task.messages[-1].content, task.reference) for task in islice(load("train"), GROUPS)]


def options(model: str) -> dict[str, Any]:
    """agentrl's options of the run."""
    return {
        "epochs": UPDATES,
        "hooks": [f"{sampled_log.__name__}:LogUpdates"],
        "dataset.name": "arithmetic",
        "dataset.max_tasks": GROUPS,
        "model.path": model,
        "model.lora_r": 0,
        "rollout.engine": f"{sampled_log.__name__}:logged",
        "rollout.group_size": GROUP_SIZE,
        "rollout.tasks_per_iteration": GROUPS,
        "rollout.max_steps": TURNS,
        "rollout.max_new_tokens": TURN_TOKENS,
        "update.learning_rate": LEARNING_RATE,
    }
