"""The sampler's key/value memory: one slot per live row, each with its own length, in the shape that transformers asks for.

Live rows stand in the slots 0..n-1 without a gap, so that a decoding step reads a plain slice and copies nothing; when a row
ends, the last one moves into its slot. Memory grows when rows or tokens need it, by copying, and is given back when the
sampler is idle, because a trainer on the same card wants it.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

LENGTH_STEP = 64
"""Slots grow by multiples of this many tokens, so that a long answer is not copied at each token."""


class Slots(Cache):
    """Keys and values of all layers. Say `prefill` or `decode` before each call of the model."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[SlotLayer() for _ in range(layers)])

    def prefill(self, first: int, count: int, length: int) -> None:
        """The next call writes (count, length) prompt tokens into the slots first..first+count-1, from position 0."""
        for layer in self._slot_layers():
            layer.place(slice(first, first + count), None, length, first + count)

    def decode(self, positions: Tensor, longest: int) -> None:
        """The next call writes one token per live row; row i's stands at positions[i] (n,) and reads what is before it."""
        rows = torch.arange(len(positions), device=positions.device)
        for layer in self._slot_layers():
            layer.place(rows, positions, longest + 1, len(positions))

    def copy(self, source: int, target: int, length: int) -> None:
        """Puts the first `length` tokens of one slot into another."""
        for layer in self._slot_layers():
            layer.copy(source, target, length)

    def clear(self) -> None:
        """Gives the memory back."""
        for layer in self._slot_layers():
            layer.reset()

    def _slot_layers(self) -> list["SlotLayer"]:
        return [layer for layer in self.layers if isinstance(layer, SlotLayer)]


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, each (slots, heads, length, head_dim)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        """Forgets everything and frees the memory."""
        self._store: tuple[Tensor, Tensor] | None = None
        self.place(slice(0, 0), None, 0, 0)

    def place(self, rows: slice | Tensor, positions: Tensor | None, length: int, slots: int) -> None:
        """Where the next `update` writes: whole prompts into `rows` (positions None), or one token at each position."""
        self._rows, self._positions, self._length, self._slots = rows, positions, length, slots

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores (B, heads, T, head_dim) new keys and values and returns all that this call may read."""
        stores = self._reserve(key_states, value_states)
        for store, states in zip(stores, (key_states, value_states), strict=True):
            if self._positions is None:
                store[self._rows, :, : self._length] = states
            else:
                store[self._rows, :, self._positions] = states[:, :, 0]
        if self._positions is None:
            return key_states, value_states
        keys, values = stores
        return keys[: self._slots, :, : self._length], values[: self._slots, :, : self._length]

    def copy(self, source: int, target: int, length: int) -> None:
        """One slot's first tokens into another, which has been written to or will be."""
        assert self._store is not None
        self._store = _grown(self._store, max(source, target) + 1, length)
        for store in self._store:
            store[target, :, :length] = store[source, :, :length]

    def get_seq_length(self) -> int:
        """Tokens before those of this call, as the causal mask counts them."""
        return 0 if self._positions is None else self._length - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys, offset of the first) for the mask of this call."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: it grows."""
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Memory comes with the first `update`."""

    def _reserve(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self._store is None:
            self._store = (_empty(keys), _empty(values))
        self._store = _grown(self._store, self._slots, self._length)
        return self._store


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU (which has no class for it)."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _empty(states: Tensor) -> Tensor:
    return states.new_zeros((0, states.shape[1], 0, states.shape[3]))


def _grown(stores: tuple[Tensor, Tensor], slots: int, length: int) -> tuple[Tensor, Tensor]:
    """The stores, or larger copies: slots to the next power of two, length to the next multiple of LENGTH_STEP."""
    has_slots, _, has_length, _ = stores[0].shape
    if slots <= has_slots and length <= has_length:
        return stores
    slots = has_slots if slots <= has_slots else 1 << (slots - 1).bit_length()
    length = max(has_length, -(-length // LENGTH_STEP) * LENGTH_STEP)
    return _larger(stores[0], slots, length), _larger(stores[1], slots, length)


def _larger(store: Tensor, slots: int, length: int) -> Tensor:
    # Zeros, not whatever memory holds: a masked position still counts 0 times its value, and 0 times NaN is NaN.
    larger = store.new_zeros((slots, store.shape[1], length, store.shape[3]))
    larger[: store.shape[0], :, : store.shape[2]] = store
    return larger
