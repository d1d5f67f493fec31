"""Data-parallel ranks: several processes that make one optimizer step together, each with the whole model and some of the rows.

A rank computes the gradient of its rows. Losses are divided by the counts of the complete minibatch (`losses.Normaliser`), so
the sum of the ranks' gradients is the gradient of the minibatch. Each rank then takes the same optimizer step. No rank waits
for another inside a microbatch. So if a rank runs out of memory, it splits its rows into smaller microbatches, and the other
ranks only wait longer.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.workflow.errors import AgentRLError, RankLost
from agentrl.workflow.training.reports import Metrics, add_up

T = TypeVar("T")

BUCKET_ELEMENTS = 2**24
"""The most elements of gradients that are added up in one call, so that the copy needs little memory."""

MAX_VALUE_BYTES = 2**14
"""The size of the buffer in which a rank sends a value, such as its sums of metrics, as JSON."""


def _ignore(*values: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this process among the ranks of a training. All ranks call the same methods in the same order.

    With `count` 1, every method returns its argument, and nothing is sent. With a larger `count`, torch's process group must
    exist.

    Args:
        rank: the number of this process, from 0.
        count: the number of ranks.
        report_progress: is called for each microbatch, so a watcher sees that this rank still computes.
        report_files: is called with True before this rank reads or writes files, and with False after it. Meanwhile a watcher
            expects no microbatch.
        local_rank: the number of this process among those of its host, from 0. The ranks of a host have consecutive numbers.
    """

    rank: int = 0
    count: int = 1
    report_progress: Callable[[], None] = _ignore
    report_files: Callable[[bool], None] = _ignore
    local_rank: int = 0

    @contextmanager
    def using_files(self) -> Iterator[None]:
        """Report that this rank reads or writes files in this context: a checkpoint may take longer than any microbatch."""
        self.report_files(True)
        try:
            yield
        finally:
            self.report_files(False)

    def deal(self, items: Sequence[T], size: Callable[[T], int]) -> Sequence[T]:
        """Return the items that this rank reads; it may have none. The ranks have about the same number of tokens.

        The longest items are dealt first, each to the rank with the fewest tokens. So rank 0 always has an item.

        Args:
            items: training rows, or examples.
            size: a function that returns an item's number of tokens.
        """
        if self.count == 1:
            return items
        sizes = [size(item) for item in items]
        tokens, dealt = [0] * self.count, [0] * len(items)
        for place in sorted(range(len(items)), key=lambda place: (-sizes[place], place)):
            dealt[place] = rank = tokens.index(min(tokens))
            tokens[rank] += sizes[place]
        return [item for item, rank in zip(items, dealt, strict=True) if rank == self.rank]

    def dropout_key(self, key: str) -> str:
        """Return the key of this rank's dropout masks. Rank 0 uses the same masks as a process that trains alone."""
        return f"{key}|rank {self.rank}" if self.rank else key

    @torch.no_grad()
    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by the sum over the ranks. A parameter for which no rank has a gradient keeps none."""
        if self.count == 1:
            return
        trained = list(parameters)
        has_gradient = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
        for bucket in _buckets([one for one, has in zip(trained, has_gradient.tolist(), strict=True) if has]):
            gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
            # Sums of 16-bit gradients are computed in float32.
            total = torch.cat([gradient.flatten().to(_sum_dtype(gradient)) for gradient in gradients])
            dist.all_reduce(total)
            parts = torch.split(total, [gradient.numel() for gradient in gradients])
            for one, gradient, part in zip(bucket, gradients, parts, strict=True):
                one.grad = gradient.copy_(part.view_as(gradient))

    def add_values(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of `values`, which has the same shape and dtype on each rank."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def add_sums(self, sums: Metrics) -> dict[str, float]:
        """Combine the ranks' sums of metrics as `add_up` does, in the order of the ranks. The sums of a rank may be empty."""
        return add_up(self.gather(dict(sums)))

    def gather(self, value: Any) -> list[Any]:
        """Wait for all ranks, and return the value of each, by rank. A value can be written as JSON."""
        if self.count == 1:
            return [value]
        data = json.dumps(value).encode()
        if len(data) > MAX_VALUE_BYTES:
            raise ValueError(f"the value has {len(data)} bytes, and at most {MAX_VALUE_BYTES} can be sent")
        buffers = [torch.empty(MAX_VALUE_BYTES, dtype=torch.uint8) for _ in range(self.count)]
        dist.all_gather(buffers, torch.frombuffer(bytearray(data.ljust(MAX_VALUE_BYTES)), dtype=torch.uint8))
        return [json.loads(buffer.numpy().tobytes()) for buffer in buffers]

    def agree(
        self,
        value: Any,
        what: str,
        error: type[AgentRLError] = RankLost,
        hint: str = "Check the devices of the ranks.",
    ) -> None:
        """Wait for all ranks. Raise the error if their values, which the text `what` names, differ."""
        if len(set(map(repr, self.gather(value)))) > 1:  # as text, in which NaN equals NaN
            raise error(f"The {self.count} ranks have different {what}.", hint)

    def compare_weights(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait for all ranks. Raise RankLost if their weights differ."""
        if self.count > 1:
            self.agree(sum_weights(parameters), "weights")


ALONE = Ranks()
"""A process that trains without others."""


def sum_weights(parameters: Iterable[nn.Parameter]) -> float:
    """Return the sum of all weights. It is equal on all ranks, unless a device computes something else."""
    return float(sum(parameter.detach().sum(dtype=torch.float64) for parameter in parameters))


def _sum_dtype(gradient: Tensor) -> torch.dtype:
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters in their order, in lists of one dtype and at most BUCKET_ELEMENTS, or of one parameter."""
    bucket: list[nn.Parameter] = []
    elements = 0
    for parameter in parameters:
        if bucket and (elements + parameter.numel() > BUCKET_ELEMENTS or bucket[0].dtype != parameter.dtype):
            yield bucket
            bucket, elements = [], 0
        bucket.append(parameter)
        elements += parameter.numel()
    if bucket:
        yield bucket
