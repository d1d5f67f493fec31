"""The live rows in slots (`kv_cache`). Rows of different lengths read their next token in one call of the model."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from agentrl.workflow.inference.kv_cache import SlotCache, SlotStates
from agentrl.workflow.models.cache_layout import CacheLayout
from agentrl.workflow.models.policy import Policy

PREFILL_TOKENS = 8192
"""The most prompt tokens in one call of the model, padding included.

The activations then stay small compared with the weights.
"""

Tokens = tuple[int, ...]


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
        self.name = "one slot for each row"
        self.resumes = self._direct
        self.rewinds = layout.rewinds

    @property
    def tokens(self) -> int:
        """The number of tokens that fit into the allocated memory."""
        return self._slots.tokens

    def read(self, first: int, rows: Sequence[Tokens]) -> None:
        """Read new rows, shortest first, into the slots from `first` on."""
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

    def resume(self, first: int, rows: Sequence[tuple[SlotStates, Tokens]]) -> None:
        """See `ModelRows.resume`."""
        for slot, (states, _) in enumerate(rows, start=first):
            self._slots.put(states, slot)
        for start, count in _chunks([len(tokens) for _, tokens in rows], padded=self.rewinds):
            part = rows[start : start + count]
            if part[-1][1]:
                past = torch.tensor([states.length for states, _ in part])
                positions = past[:, None] + torch.arange(len(part[-1][1]))
                positions.clamp_(
                    max=max(states.length + len(tokens) for states, tokens in part)
                )  # padding may exceed the window
                self._extend(first + start, _pad([tokens for _, tokens in part]), positions, int(positions.max()) + 1)

    def next_logits(self, newest: Tensor, read: Tensor) -> Tensor:
        """See `ModelRows.next_logits`."""
        longest = int(read.max())
        return self._extend(0, newest[:, None], read[:, None], longest + 1, even=longest == int(read.min()))

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy a row's first tokens into another slot."""
        if length:
            self._slots.copy(source, target, length)
        else:
            self._slots.wipe(target)

    def drop(self, row: int, last: int, length: int, broken: bool) -> None:
        """Drop a row. The last row, which has read `length` tokens, moves into the free slot."""
        if broken:
            self._slots.wipe(row)
        if row < last:
            self._slots.copy(last, row, length)

    def take(self, row: int, length: int) -> SlotStates:
        """Return a copy of a row's content."""
        return self._slots.take(row, length)

    def clear(self) -> None:
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
