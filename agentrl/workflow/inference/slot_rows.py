"""The rows of live turns (see `model_rows`) in slots (`kv_cache`). Rows of different lengths read their next token in one call
of the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from logging import getLogger
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig

from agentrl.workflow.inference.kv_cache import SlotCache, SlotStates
from agentrl.workflow.inference.sampling import draw
from agentrl.workflow.models.cache_layout import CacheLayout
from agentrl.workflow.models.device_errors import classify
from agentrl.workflow.models.fast_forward import FastForward
from agentrl.workflow.models.memory_estimate import LENGTH_STEP
from agentrl.workflow.models.policy import Policy

log = getLogger("agentrl.engine")

PREFILL_TOKENS = 8192
"""The most prompt tokens in one call of the model, padding included.

The activations then stay small compared with the weights.
"""

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptRow:
    """A row that was taken out of its slot after it had read `length` tokens: the row `place` of `block`."""

    block: SlotStates
    place: int
    length: int


class SlotRows:
    """The rows in slots 0..n-1; for the methods see `model_rows.ModelRows`.

    Args:
        policy: the policy whose published weights are used for sampling.
        config: the config of the policy's model.
        layout: the layout of the slots for that model.
    """

    def __init__(self, policy: Policy, config: PreTrainedConfig, layout: CacheLayout) -> None:
        # Other attention makes its masks from one mark per token, which cannot express several new tokens.
        self._direct = config._attn_implementation == "sdpa" and not config.to_dict().get("alibi", False)
        # A GPU's attention with a mask copies it in each layer unless its rows begin at multiples of 8 elements.
        self._alignment = 8 if self._direct and policy.device.type == "cuda" else 1
        self._policy = policy
        self._layout = layout
        self._slots = SlotCache(layout)
        own_pass = policy.has_fast_forward()
        self.graphs = DecodeGraphs(policy, self._slots) if own_pass and policy.device.type == "cuda" else None
        self.name = "agentrl's own forward pass" if own_pass else "transformers' forward pass"
        self.resumes = self._direct
        self.rewinds = layout.rewinds

    @property
    def tokens(self) -> int:
        """The number of tokens that fit into the allocated memory."""
        return self._slots.tokens

    def reserve(self, count: int) -> None:
        """See `ModelRows.reserve`."""
        self._slots.reserve(count)

    def read(self, first: int, rows: Sequence[Tokens]) -> None:
        """Run the model over new rows, shortest first, and keep their keys and values in the slots from `first` on."""
        for start, count in _chunks([len(row) for row in rows], padded=self.rewinds):
            chunk = rows[start : start + count]
            width = len(chunk[-1])
            if width:
                self._slots.prefill(first + start, count, width)
                # Padding on the right needs no mask: tokens attend to their left only.
                self._call(_pad(chunk), torch.arange(width).expand(count, -1), None)
            elif not self.rewinds:
                for slot in range(first + start, first + start + count):
                    self._slots.wipe(slot)

    def resume(self, first: int, rows: Sequence[tuple[KeptRow, Tokens]]) -> None:
        """See `ModelRows.resume`."""
        for _, numbered in groupby(enumerate(rows, start=first), lambda pair: id(pair[1][0].block)):
            alike = [(slot, row) for slot, (row, _) in numbered]
            slots = slice(alike[0][0], alike[-1][0] + 1)
            self._slots.put(alike[0][1].block, self._index([row.place for _, row in alike]), slots)
        for start, count in _chunks([len(tokens) for _, tokens in rows], padded=self.rewinds):
            part = rows[start : start + count]
            if part[-1][1]:
                past = torch.tensor([row.length for row, _ in part])
                positions = past[:, None] + torch.arange(len(part[-1][1]))
                positions.clamp_(max=max(row.length + len(tokens) for row, tokens in part))  # padding may exceed the window
                self._extend(first + start, _pad([tokens for _, tokens in part]), positions, int(positions.max()) + 1)

    def next_logits(self, newest: Tensor, read: Tensor) -> Tensor:
        """See `ModelRows.next_logits`."""
        longest = int(read.max())
        return self._extend(0, newest[:, None], read[:, None], longest + 1, even=longest == int(read.min()))

    def copy(self, source: int, first: int, count: int, length: int) -> None:
        """See `ModelRows.copy`."""
        if length:
            self._slots.copy(source, slice(first, first + count), length)
        else:
            for slot in range(first, first + count):
                self._slots.wipe(slot)

    def drop(self, rows: Sequence[int], broken: Sequence[int], moves: Mapping[int, int], length: int) -> None:
        """See `ModelRows.drop`."""
        for row in broken:
            self._slots.wipe(row)
        if not moves:
            return
        try:
            self._slots.move(self._index([*moves]), self._index([*moves.values()]), length)
        except (RuntimeError, MemoryError) as error:
            if classify(error) != "out_of_memory":
                raise
            for old, new in moves.items():  # needs no memory: the tokens of this step count already, and cannot be taken back
                self._slots.copy(old, slice(new, new + 1), length)

    def take(self, rows: Sequence[int], lengths: Sequence[int]) -> list[KeptRow]:
        """See `ModelRows.take`. Rows of similar lengths share memory: each is padded to less than twice its length."""
        taken_rows: dict[int, KeptRow] = {}
        by_length = sorted(zip(rows, lengths, strict=True), key=lambda pair: pair[1])
        for _, pairs in groupby(by_length, lambda pair: pair[1].bit_length()):
            alike = list(pairs)
            block = self._slots.take(self._index([row for row, _ in alike]), alike[-1][1])
            taken_rows |= {row: KeptRow(block, place, length) for place, (row, length) in enumerate(alike)}
        return [taken_rows[row] for row in rows]

    def compact(self, rows: Sequence[KeptRow]) -> list[KeptRow]:
        """See `ModelRows.compact`."""
        block = rows[0].block.select(self._index([row.place for row in rows]))
        return [KeptRow(block, place, row.length) for place, row in enumerate(rows)]

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, device=self._policy.device)

    def clear(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()
        self._slots.clear()

    def _extend(self, first: int, ids: Tensor, positions: Tensor, length: int, even: bool = False) -> Tensor:
        """Return logits (B, V) after the last of (B, T) ids that continue the slots from `first` on.

        Args:
            even: whether T is 1 and all rows have the same length.
        """
        positions = positions.to(self._policy.device)
        if self._direct and even:
            self._slots.extend(first, positions, length)
            return self._call(ids, positions, None)
        length = -(-length // self._alignment) * self._alignment
        self._slots.extend(first, positions, length)
        mask = torch.arange(length, device=positions.device) <= positions[:, :, None]  # (B, T, length)
        return self._call(ids, positions, mask)

    def _call(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Return logits (B, V) after the last of (B, T) ids. The mask (B, T, length) covers all earlier tokens."""
        device = self._policy.device
        with self._policy.decoding() as forward:
            return forward(ids.to(device), positions.to(device), self._mask(mask, positions.to(device)), self._slots)

    def _mask(self, mask: Tensor | None, positions: Tensor) -> Tensor | dict[str, Tensor | None] | None:
        """Return the mask in the form that the model takes: (B, 1, T, length), one for each kind of layer if they differ, or
        (B, length).
        """
        if mask is None or not self._direct:
            return mask if mask is None else mask[:, 0]
        if self._layout.window is None:
            return mask[:, None]
        near = torch.arange(mask.shape[-1], device=mask.device) > positions[:, :, None] - self._layout.window
        sliding = (mask & near)[:, None]
        if not self._layout.kinds:
            return sliding
        masks: dict[str, Tensor | None] = dict.fromkeys(self._layout.kinds)
        return masks | {"full_attention": mask[:, None], "sliding_attention": sliding}


class DecodeGraphs:
    """Decoding steps on a GPU as CUDA graphs.

    A decoding step is then one launch instead of the launches of some hundred kernels, each of which takes longer to launch
    than to run.

    A graph repeats the same kernels on the same memory. So there is one graph for each pair of a number of rows (a power of
    two; rows without a turn are computed and ignored) and a number of keys (a multiple of `LENGTH_STEP`; later keys are
    masked). All graphs are dropped when the forward pass or the slots get other memory.

    Args:
        policy: the policy. Its `decoding` yields a `FastForward`, whose memory stays the same from one version to the next.
        slots: the slots.
        capture: whether to capture graphs. If False, each step launches the same kernels one by one.
    """

    EAGER_STEPS = 3
    """The number of decoding steps of one size that run without a graph, before a graph of that size is captured. For a size
    that occurs less often, capturing a graph would take more time than it saves.
    """

    _graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]]
    _steps: dict[tuple[int, int], int]
    _pool: Any
    _forward: FastForward | None
    _memory: object

    def __init__(self, policy: Policy, slots: SlotCache, capture: bool = True) -> None:
        self._policy = policy
        self._slots = slots
        self._capture_enabled = capture
        self._stream: torch.cuda.Stream | None = None
        self.clear()

    def next_tokens(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Run the model on the newest token of each row. Return the logits (n, V) of the token after it, and the result (2, n)
        of `sampling.draw` for these logits.

        Both are valid until the next call.

        Args:
            numbers: (4, n) float64, on the CPU. For each row: its newest token, the number of tokens before that one, the
                uniform number in [0, 1) for the draw, and the temperature.
        """
        count = numbers.shape[1]
        rows = 1 << (count - 1).bit_length()
        length = -(-(int(numbers[1].max()) + 1) // LENGTH_STEP) * LENGTH_STEP
        inputs = functional.pad(numbers, (0, rows - count))
        inputs[3, count:] = 1.0
        with self._policy.decoding() as forward:
            assert isinstance(forward, FastForward)
            if self._forward is not forward or self._memory is not self._slots.memory:
                self.clear()
                self._forward, self._memory = forward, self._slots.memory
            size = (rows, length)
            if size not in self._graphs and self._capture_enabled and self._steps.get(size, 0) >= self.EAGER_STEPS:
                self._capture(forward, size)
            if size in self._graphs:
                graph, static_inputs, logits, drawn = self._graphs[size]
                static_inputs.copy_(inputs)
                graph.replay()
            else:
                self._steps[size] = self._steps.get(size, 0) + 1
                logits, drawn = self._step(forward, inputs.to(self._policy.device), length)
            return logits[:count], drawn[:, :count]

    def clear(self) -> None:
        """Free the graphs and their memory."""
        self._graphs, self._steps = {}, {}
        self._pool = self._forward = self._memory = None

    def _step(self, forward: FastForward, inputs: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the logits (R, V) after one more token of each row, and the draw (2, R), of inputs (4, R) on the device."""
        ids, positions = inputs[:2].long()[:, :, None]
        self._slots.extend(0, positions, length)
        mask = torch.arange(length, device=positions.device) <= positions[:, :, None]
        logits = forward(ids, positions, mask[:, None], self._slots)
        return logits, draw(logits, inputs[2], inputs[3])

    def _capture(self, forward: FastForward, size: tuple[int, int]) -> None:
        """Capture the graph of a size. If the forward pass cannot be captured, capture no more graphs."""
        rows, length = size
        inputs = torch.ones(4, rows, dtype=torch.float64, device=self._policy.device)
        graph = torch.cuda.CUDAGraph()
        if self._stream is None:  # one for all graphs: cuBLAS keeps memory for each stream that it has seen
            self._stream = torch.cuda.Stream(self._policy.device)  # type: ignore[no-untyped-call]
        stream = self._stream
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream(self._policy.device))
        try:
            with torch.cuda.stream(stream):
                # Other threads may allocate memory meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    logits, drawn = self._step(forward, inputs, length)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            if classify(error) == "out_of_memory":
                raise
            self._capture_enabled = False
            log.warning("decoding without CUDA graphs: %s", str(error).partition("\n")[0])
            return
        torch.cuda.current_stream(self._policy.device).wait_stream(stream)
        self._graphs[size] = (graph, inputs, logits, drawn)


def _chunks(lengths: Sequence[int], padded: bool) -> list[tuple[int, int]]:
    """Split rows into chunks of at most `PREFILL_TOKENS` tokens, padding included.

    Return the start and the number of rows of each chunk.

    Args:
        lengths: the lengths of the rows in tokens, ascending.
        padded: whether rows of unequal lengths may share a chunk. For models with states they may not, because padding would
            change the states.
    """
    chunks: list[tuple[int, int]] = []
    for index, length in enumerate(lengths):
        alike = padded or (bool(chunks) and lengths[chunks[-1][0]] == length)
        if chunks and alike and (chunks[-1][1] + 1) * length <= PREFILL_TOKENS:
            chunks[-1] = (chunks[-1][0], chunks[-1][1] + 1)
        else:
            chunks.append((index, 1))
    return chunks


def _pad(rows: Sequence[Tokens]) -> Tensor:
    """Return ids (B, T), padded on the right to the length of the last row, which is the longest."""
    return torch.tensor([[*row, *(0,) * (len(rows[-1]) - len(row))] for row in rows])
