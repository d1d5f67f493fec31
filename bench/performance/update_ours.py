"""One update by our trainer, as `processes.Side` runs it."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from agentrl.workflow.config import build
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.trajectory import Episode, Group, Message, Step, Task
from bench.performance.recorded import GROUP_SIZE, LEARNING_RATE, Recorded, recorded


def prepare(path: str, rank: int, options: Mapping[str, Any]) -> Callable[[], dict[str, float]]:
    """`Trainer.update` with LoRA of that rank, or of all weights (0); `options` are further keys of the run's config."""
    config = build({"model.lora_r": rank, "model.lora_alpha": 16.0, "update.learning_rate": LEARNING_RATE, **options})
    trainer = Trainer(Policy.load(config.model, path), config)
    groups = groups_of(recorded())

    def update() -> dict[str, float]:
        began = time.perf_counter()
        metrics = trainer.update(groups, 0).metrics
        seconds = time.perf_counter() - began
        return {"seconds": seconds, **{name: metrics[name] for name in ("tokens", "loss", "grad_norm", "entropy")}}

    if torch.cuda.is_available():
        update()  # the first one on a GPU loads its kernels
    return update


def groups_of(data: Recorded) -> list[Group]:
    """As the trainer gets them from the store."""

    def episode(task: Task, group: int, sample: int) -> Episode:
        ids = data.completions[group][sample]
        step = Step(0, (), data.prompts[group], ids, (-10.0,) * len(ids), "length", Message("assistant", ""), 0)
        reward, number = data.rewards[group][sample], GROUP_SIZE * group + sample
        return Episode(task, sample, (step,), "done", "answered", reward=reward, id=number)

    tasks = [Task(f"task/{group}", (), "") for group in range(len(data.prompts))]
    return [
        Group(task, tuple(episode(task, group, sample) for sample in range(GROUP_SIZE)), group)
        for group, task in enumerate(tasks)
    ]
