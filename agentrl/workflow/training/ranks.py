"""Data-parallel ranks: several processes that make one update together, each with the whole model and some of the rows.

A rank computes the gradient of its rows. Losses are divided by the counts of the complete minibatch (`losses.Normaliser`), so
the sum of the ranks' gradients is the gradient of the minibatch. Each rank then takes the same optimizer step. No rank waits
for another inside a microbatch. So if a rank runs out of memory, it splits its rows into smaller microbatches, and the other
ranks only wait longer.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.workflow.training.reports import Metrics, add_up
from agentrl.workflow.training.training_rows import Row

BUCKET_ELEMENTS = 2**24
"""The most elements of gradients that are added up in one call, so that the copy needs little memory."""

MAX_SUMS_BYTES = 2**14
"""The size of the buffer in which a rank sends its sums of metrics, as JSON."""


def _ignore() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this process among the ranks of an update. All ranks call the same methods in the same order.

    With `count` 1, every method returns its argument, and nothing is sent. With a larger `count`, torch's process group must
    exist.

    Args:
        rank: the number of this process, from 0.
        count: the number of ranks.
        report_progress: is called for each microbatch, so a watcher sees that this rank still computes.
    """

    rank: int = 0
    count: int = 1
    report_progress: Callable[[], None] = _ignore

    def deal(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the rows that this rank reads; it may have none. The ranks have about the same number of tokens.

        The longest rows are dealt first, each to the rank with the fewest tokens. So rank 0 always has a row.
        """
        if self.count == 1:
            return rows
        tokens, dealt = [0] * self.count, {}
        for row in sorted(rows, key=lambda row: (-len(row.input_ids), row.key)):
            dealt[row.key] = rank = tokens.index(min(tokens))
            tokens[rank] += len(row.input_ids)
        return [row for row in rows if dealt[row.key] == self.rank]

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
        if self.count == 1:
            return dict(sums)
        data = json.dumps(dict(sums)).encode()
        if len(data) > MAX_SUMS_BYTES:
            raise ValueError(f"the sums of metrics have {len(data)} bytes, and at most {MAX_SUMS_BYTES} can be sent")
        buffers = [torch.empty(MAX_SUMS_BYTES, dtype=torch.uint8) for _ in range(self.count)]
        dist.all_gather(buffers, torch.frombuffer(bytearray(data.ljust(MAX_SUMS_BYTES)), dtype=torch.uint8))
        return add_up(json.loads(buffer.numpy().tobytes()) for buffer in buffers)


ALONE = Ranks()
"""A process that trains without others."""


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
