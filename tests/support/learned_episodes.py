"""Episodes of a few tokens to learn from, and how likely a model says they are."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from agentrl.workflow.config import ModelConfig
from agentrl.workflow.models.parameters import Parameters
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.offline_training import Start, row_logprob_sums, rows_by_episode
from agentrl.workflow.training.supervised import likelihood_objective
from agentrl.workflow.trajectory import Episode, Message, PolicyRef, Step, Task


class LearnedEpisode:
    """What a training told of itself."""

    def __init__(self) -> None:
        self.parameters: Parameters | None = None
        self.metrics: list[Mapping[str, float]] = []
        self.tokens: list[int] = []
        self.done = 0

    def begins(self, parameters: Parameters, steps: int, done: int) -> None:
        """Before the first step."""
        self.parameters, self.done = parameters, done

    def step(self, done: int, steps: int, tokens: int, metrics: Mapping[str, float]) -> None:
        """After each."""
        self.metrics.append(metrics)
        self.tokens.append(tokens)


TURN = Message("assistant", "")
PROMPT = (5, 6, 7, 8)


def step(index: int, prompt: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float] | None = None) -> Step:
    """One turn of these tokens; what the sampler is said to have computed is -4 each, unless it is given."""
    found = tuple(logprobs or [-4.0] * len(sampled))
    return Step(index, (), tuple(prompt), tuple(sampled), found, "stop", TURN, 0)


def episode(number: int, *steps: Step, reward: float = 1.0, fork_step: int = 0) -> Episode:
    """A finished one."""
    return Episode(Task("train/0", (), ""), steps=steps, status="done", reward=reward, id=number, fork_step=fork_step)


def two_turns(number: int, seed: int, reward: float = 1.0) -> Episode:
    """Three and two sampled tokens, with two of a tool between them, all drawn from the seed."""
    ids = torch.randint(3, 60, (7,), generator=torch.Generator().manual_seed(seed)).tolist()
    return episode(number, step(0, PROMPT, ids[:3]), step(1, ids[3:5], ids[5:]), reward=reward)


def start_of(folder: Path, lora_r: int = 0, temperature: float = 1.0) -> Start:
    """The model in the folder as it is."""
    return Start(ModelConfig(path=str(folder), lora_r=lora_r), PolicyRef(str(folder), ""), temperature)


def logprobs_of(folder: Path, episodes: Sequence[Episode]) -> list[float]:
    """What the model in the folder says of what each episode sampled, summed."""
    policy = Policy.load(ModelConfig(path=str(folder), lora_r=0), str(folder), device="cpu")
    with policy.sampling() as module, torch.no_grad():
        return [float(rows.sum()) for rows in row_logprob_sums(module, rows_by_episode(episodes), likelihood_objective())]
