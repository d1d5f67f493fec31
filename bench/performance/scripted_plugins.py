"""Plug-ins without a model: an engine whose turns are scripted, and a trainer that computes nothing.

An episode has `CALLS` turns with one call of the calculator each, and a last turn with the answer. The policy's weights are not
used: a checkpoint is a file with one number.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from agentrl.workflow.config import RunConfig
from agentrl.workflow.engines import GenerateRequest
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings
from agentrl.workflow.trainers import TrainerBackend
from agentrl.workflow.training.reports import Update
from agentrl.workflow.trajectory import Group, Message, ToolCall
from bench.performance.sleeper import sleeper
from tests.support.scripted_engine import ScriptedEngine

CALLS = 2
TURN_TOKENS = 100
"""The sampled tokens of a turn, about."""
SLOTS = 256
"""The most turns that sleep in one process at the same time."""
TURN_SECONDS = "BENCH_TURN_SECONDS"
"""The environment variable with the time that a turn takes, in seconds."""

engine = replace(sleeper, name="scripted", start=f"{__name__}:start", local=False)
trainer = TrainerBackend("scripted", f"{__name__}:ScriptedTrainer")


def start(policy: Policy, settings: Settings) -> ScriptedEngine:
    """Return the engine. It tells the turns of an episode apart by the calls in the prompt."""
    calls = [ToolCall("calculator", {"expression": f"6*{number}"}) for number in range(CALLS)]
    turns = [policy.chat.turn(Message("assistant", "", tool_calls=(call,))) for call in calls]
    turns.append(policy.chat.turn(Message("assistant", "42")))
    mark, filler = turns[0][0], policy.chat.turn(Message("assistant", "a"))[0]  # the mark is `<tool_call>`
    padded = [(*[filler] * (TURN_TOKENS - len(turn)), *turn) for turn in turns]

    def answer(request: GenerateRequest) -> tuple[int, ...]:
        return padded[min(request.prompt_ids.count(mark), CALLS)]

    return ScriptedEngine(answer, float(os.environ.get(TURN_SECONDS, "0")), SLOTS)


class ScriptedTrainer:
    """A trainer whose update changes no weights. An episode's advantage is its distance from the group's mean reward."""

    learning_rate = 0.0

    def __init__(self, policy: Policy, config: RunConfig, iterations: int) -> None:
        self._weights_name = policy.weights_name

    def update(self, groups: Sequence[Group], iteration: int) -> Update:
        """Return the report of an update that used every episode with a reward."""
        advantages: dict[int, float] = {}
        for group in groups:
            rewards = {episode.id: episode.reward for episode in group.episodes if episode.reward is not None}
            mean = sum(rewards.values()) / max(len(rewards), 1)
            advantages |= {episode: reward - mean for episode, reward in rewards.items()}
        step = {"loss": 0.0, "rows": len(advantages), "tokens": len(advantages) * TURN_TOKENS}
        return Update(steps=(step,), advantages=advantages)

    def save(self, folder: Path) -> Collection[str]:
        """Write a weights file with one number."""
        save_file({"scripted": torch.zeros(1)}, folder / self._weights_name)
        return ()

    def load(self, folder: Path | None, fresh: bool = False) -> None:
        """Load nothing: there is no state."""
