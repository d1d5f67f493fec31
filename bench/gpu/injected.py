"""Faults of a device, brought about in a model's forward pass: real ones on a GPU, the same errors raised without one."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ASSERT_MESSAGE = "CUDA error: device-side assert triggered"


def _before_pass(model: Any, action: Callable[[Tensor], None]) -> Any:
    """Call `action` with the ids (B, T) that each forward pass begins with; return a handle that ends this."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        action(inputs[0])

    return model.get_input_embeddings().register_forward_pre_hook(hook)


def lose_device(model: Any, after: int, notify: Callable[[], None] = lambda: None) -> None:
    """Make the pass after so many trip a device-side assert, and each later one fail as it does on a GPU after that.

    Args:
        notify: called before the first.
    """
    count = itertools.count()

    def action(ids: Tensor) -> None:
        number = next(count)
        if number == after:
            notify()
        if ids.is_cuda:
            if number == after:
                trip_assert(ids.device)
        elif number >= after:
            raise torch.AcceleratorError(ASSERT_MESSAGE)

    _before_pass(model, action)


def trip_assert(device: torch.device) -> None:
    """Read beyond the end of a tensor on the GPU: a device-side assert. Raises torch.AcceleratorError."""
    index = torch.full((1,), 2**20, device=device)
    torch.zeros(1, device=device).index_select(0, index)
    torch.cuda.synchronize(device)


class MemoryCap:
    """So little memory that large passes fail, until `end`.

    Args:
        model: whose forward passes fail without a GPU.
        spare_bytes: of the GPU, beside what torch has reserved.
        max_rows: without a GPU, a pass of more rows raises the error.
    """

    def __init__(self, model: Any, spare_bytes: int, max_rows: int) -> None:
        self._raised = 0
        self._max_rows = max_rows
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            self._before = torch.cuda.memory_stats()["num_ooms"]
            allowed = torch.cuda.memory_reserved() + spare_bytes
            torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
        else:
            self._handle = _before_pass(model, self._check)

    @property
    def failures(self) -> int:
        """How often memory ran out."""
        return torch.cuda.memory_stats()["num_ooms"] - self._before if torch.cuda.is_available() else self._raised

    def end(self) -> None:
        """Give all memory back."""
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(1.0)
        else:
            self._handle.remove()

    def _check(self, ids: Tensor) -> None:
        if len(ids) > self._max_rows:
            self._raised += 1
            raise torch.OutOfMemoryError(f"a pass of {len(ids)} rows, and {self._max_rows} fit")
