"""The factor of the loss where a model computes in float16."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from agentrl.workflow.trainers import full_float16_error

INITIAL_FACTOR = 2.0**16
MAX_FACTOR = 2.0**24
GROWTH_STEPS = 200
"""The factor is doubled after this many steps without an overflow."""


class LossScale:
    """A power of two that multiplies the loss and is divided out of the gradients; 1 unless `module` has float16 weights.

    The gradient that one token of many sends back is below float16's smallest number, 2**-24, and would become 0. A power of
    two changes no bit of a gradient that neither under- nor overflows. One that overflows is computed again with half of it;
    in the paper (dynamic loss scaling, Micikevicius et al. 2018, arXiv 1710.03740) that step is lost.

    Raises:
        ConfigError: the trainable weights themselves are float16, which has too few bits for their steps.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        if any(parameter.requires_grad and parameter.dtype == torch.float16 for parameter in parameters):
            raise full_float16_error()
        self.is_used = any(parameter.dtype == torch.float16 for parameter in parameters)
        self.factor = INITIAL_FACTOR if self.is_used else 1.0
        self.good_steps = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the factor."""
        if self.is_used:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / self.factor)

    def must_repeat(self, loss: float, norm: float) -> bool:
        """Record the loss and the gradient's norm of a backward pass; return whether to repeat it with a smaller factor."""
        if not self.is_used:
            return False
        if math.isfinite(norm):
            self.good_steps += 1
            if self.good_steps >= GROWTH_STEPS and self.factor < MAX_FACTOR:
                self.factor, self.good_steps = 2 * self.factor, 0
            return False
        if not math.isfinite(loss) or self.factor == 1:  # no factor mends that
            return False
        self.factor, self.good_steps = self.factor / 2, 0
        return True

    @property
    def state(self) -> tuple[float, int]:
        """The state for a checkpoint, so that a resumed training scales like an uninterrupted one."""
        return self.factor, self.good_steps

    @state.setter
    def state(self, state: tuple[float, int]) -> None:
        factor, good_steps = state  # from a file: a TypeError or ValueError where it is not as it was written
        self.factor, self.good_steps = float(factor), int(good_steps)
