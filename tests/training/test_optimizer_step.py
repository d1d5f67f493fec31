"""An optimizer step for which memory runs out: it is tried again, and never applied by half."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agentrl.workflow.errors import InfraError
from agentrl.workflow.training.optimizer import BETAS, make_optimizer, optimizer_state, take_step
from tests.support.small_models import quantised

OPTIMIZERS = pytest.mark.parametrize("name", ["adamw", pytest.param("adamw_8bit", marks=quantised)])
SHAPES = {"first": (64, 128), "second": (96, 96), "third": (40,)}


class Shortage:
    """Memory that runs out at the second parameter whose moments are allocated, so many times."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], times: int) -> None:
        self.times = times
        self.had_moved: list[bool] = []
        self._optimizer, self._parameters = optimizer, parameters
        self._before = {name: p.detach().clone() for name, p in parameters.items()}
        name = "init_state" if hasattr(optimizer, "init_state") else "_init_group"
        self._allocate: Callable[..., Any] = getattr(optimizer, name)
        setattr(optimizer, name, self)

    def __call__(self, *arguments: Any) -> Any:
        if self.times and self._optimizer.state.get(self._parameters["first"]):
            self.times -= 1
            moved = [not torch.equal(p.detach(), self._before[name]) for name, p in self._parameters.items()]
            self.had_moved.append(any(moved))
            raise torch.OutOfMemoryError("as if")
        return self._allocate(*arguments)


def made(name: str) -> tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]:
    """An optimizer of two groups, as with a critic, and gradients for its first step."""
    generator = torch.Generator().manual_seed(0)
    parameters = {key: nn.Parameter(torch.randn(shape, generator=generator)) for key, shape in SHAPES.items()}
    optimizer = make_optimizer(name, {"first": parameters["first"]}, 0.1, BETAS, 0.01)
    optimizer.add_param_group({"params": [parameters["second"], parameters["third"]], "weight_decay": 0.0})
    grow(parameters, 1)
    return optimizer, parameters


def grow(parameters: Mapping[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    return weights | {name: tensor.clone() for name, tensor in optimizer_state(optimizer, parameters).items()}


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@OPTIMIZERS
def test_take_step_retried_equals_step_without_shortage(name: str) -> None:
    """Two steps more show that the moments are right too."""
    found = []
    for times in (0, 1):
        optimizer, parameters = made(name)
        shortage = Shortage(optimizer, parameters, times)
        for seed in (1, 2, 3):
            grow(parameters, seed)
            take_step(optimizer, parameters)
        assert shortage.had_moved == [True] * times  # without the copy half of the step would have been taken twice
        found.append(state(optimizer, parameters))
    assert equal(*found)


@OPTIMIZERS
def test_take_step_without_memory_changes_nothing(name: str) -> None:
    optimizer, parameters = made(name)
    before = state(optimizer, parameters)
    shortage = Shortage(optimizer, parameters, 2)
    with pytest.raises(InfraError, match=r"Memory does not suffice for the optimizer's moments\. Train LoRA"):
        take_step(optimizer, parameters)
    assert shortage.had_moved == [True, True]
    assert equal(state(optimizer, parameters), before)
    take_step(optimizer, parameters)  # memory suffices again
    assert not equal(state(optimizer, parameters), before)


@OPTIMIZERS
def test_take_step_passes_other_errors_on_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, parameters = made(name)

    def broken() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(optimizer, "step", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        take_step(optimizer, parameters)
