"""An engine and a trainer whose device fails once: a file says so, after which they sample and train as agentrl's own do.

The failure is the error that CUDA reports after a kernel failed: at this call and at every later one in the process.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentrl.workflow.engines.rolling import rolling
from agentrl.workflow.inference.decoding_batch import Batch
from agentrl.workflow.inference.sampler import RollingEngine
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.settings import Settings, settings
from agentrl.workflow.trainers import TrainerBackend
from agentrl.workflow.training.trainer import Trainer

SAID = "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
STEPS_BEFORE = 20
"""Tokens that the sampler draws before its device fails: the middle of the first turns."""
_lost: set[str] = set()


def failed(part: str) -> Path:
    """The file, beside the data folder, that records the failure of this part; one made beforehand prevents it."""
    return settings().root.parent / f"failed-{part}"


def call(part: str) -> None:
    """A call of the device: fails from the first on in the process that makes the file."""
    if not failed(part).exists():
        failed(part).touch()
        _lost.add(part)
    if _lost:
        raise torch.AcceleratorError(SAID)


def start(policy: Policy, settings: Settings) -> RollingEngine:
    """The rolling engine on that device."""
    engine = RollingEngine(policy, settings.slots)
    step, count = Batch.step, 0

    def fragile() -> None:
        nonlocal count
        count += 1
        if count > STEPS_BEFORE or _lost:
            call("sampler")
        step(engine._batch)

    engine._batch.step = fragile  # type: ignore[method-assign]
    return engine


class FragileTrainer(Trainer):
    """Its device fails in the second update, with gradients in half of the parameters."""

    def _backward(self, model: nn.Module, *rest: Any) -> dict[str, float]:
        sums = super()._backward(model, *rest)
        if self.updates == 1:
            call("trainer")
        return sums


fragile_engine = replace(rolling, name="fragile_engine", start=f"{__name__}:start")
fragile_trainer = TrainerBackend("fragile_trainer", f"{__name__}:FragileTrainer")
