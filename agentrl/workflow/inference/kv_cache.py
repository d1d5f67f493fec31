"""The sampler's KV cache: one slot per live row, each with its own length, behind transformers' `Cache` interface.

Live rows occupy the slots 0..n-1 without a gap, so that a decoding step reads a plain slice and copies nothing; when a row
ends, the last one moves into its slot. The keys and values of an ended turn can be taken out and put back when the episode goes
on. Memory grows by copying, when rows or tokens need more.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from agentrl.workflow.models.memory_estimate import LENGTH_STEP


@dataclass(frozen=True, slots=True)
class SlotStates:
    """Keys and values taken out of a slot: per layer two tensors (heads, tokens, head_dim)."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    length: int


class SlotCache(Cache):
    """Keys and values of all layers. Call `prefill` or `extend` before each call of the model."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[SlotCacheLayer() for _ in range(layers)])

    def prefill(self, first: int, count: int, length: int) -> None:
        """Lets the next call write (count, length) prompt tokens into the slots first..first+count-1, from position 0."""
        for layer in self._slot_layers():
            layer.place(slice(first, first + count), None, length)

    def extend(self, first: int, positions: Tensor, length: int) -> None:
        """Lets the next call write tokens at `positions` (B, T) of the slots from `first` on, and read the first `length`."""
        slots = torch.arange(first, first + len(positions), device=positions.device)[:, None]
        for layer in self._slot_layers():
            layer.place(slice(first, first + len(positions)), (slots, positions), length)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of one slot into another."""
        for layer in self._slot_layers():
            layer.copy(source, target, length)

    def wipe(self, slot: int) -> None:
        """Zeroes a slot's keys and values."""
        for layer in self._slot_layers():
            layer.wipe(slot)

    def take(self, slot: int, length: int) -> SlotStates:
        """A copy of a slot's first `length` tokens."""
        return SlotStates(tuple(layer.take(slot, length) for layer in self._slot_layers()), length)

    def put(self, kept: SlotStates, slot: int) -> None:
        """Puts what was taken out of a slot into another, from position 0."""
        for layer, states in zip(self._slot_layers(), kept.layers, strict=True):
            layer.put(slot, *states)

    @property
    def tokens(self) -> int:
        """The number of tokens that the memory holds."""
        return self._slot_layers()[0].tokens

    def clear(self) -> None:
        """Frees the memory."""
        for layer in self._slot_layers():
            layer.reset()

    def _slot_layers(self) -> list["SlotCacheLayer"]:
        return [layer for layer in self.layers if isinstance(layer, SlotCacheLayer)]


class SlotCacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, each (slots, heads, length, head_dim)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        """Forgets everything and frees the memory."""
        self._store: tuple[Tensor, Tensor] | None = None
        self.place(slice(0, 0), None, 0)

    @property
    def tokens(self) -> int:
        """Slots times length."""
        return 0 if self._store is None else self._store[0].shape[0] * self._store[0].shape[2]

    def place(self, slots: slice, tokens: tuple[Tensor, Tensor] | None, length: int) -> None:
        """Sets the target of the next `update`: whole prompts (None), or tokens by slots (B, 1) and positions (B, T)."""
        self._rows, self._tokens, self._length = slots, tokens, length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores (B, heads, T, head_dim) new keys and values and returns all that this call may read."""
        stores = self._reserve(key_states, value_states, self._rows.stop, self._length)
        if self._tokens is None:
            for store, states in zip(stores, (key_states, value_states), strict=True):
                store[self._rows, :, : self._length] = states
            return key_states, value_states
        slots, positions = self._tokens
        for store, states in zip(stores, (key_states, value_states), strict=True):
            store[slots, :, positions] = states.transpose(1, 2)
        keys, values = stores
        return keys[self._rows, :, : self._length], values[self._rows, :, : self._length]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies one slot's first tokens into another."""
        assert self._store is not None
        self._store = _grow(self._store, max(source, target) + 1, length)
        for store in self._store:
            store[target, :, :length] = store[source, :, :length]

    def wipe(self, slot: int) -> None:
        """Zeroes one slot's keys and values: a masked NaN would still spoil the slot's next row."""
        assert self._store is not None
        for store in self._store:
            store[slot] = 0

    def take(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """A copy of one slot's first tokens, each (heads, length, head_dim)."""
        assert self._store is not None
        keys, values = self._store
        return keys[slot, :, :length].clone(), values[slot, :, :length].clone()

    def put(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Writes keys and values (heads, T, head_dim) into a slot, from position 0."""
        stores = self._reserve(keys[None], values[None], slot + 1, keys.shape[1])
        for store, states in zip(stores, (keys, values), strict=True):
            store[slot, :, : keys.shape[1]] = states

    def get_seq_length(self) -> int:
        """The number of tokens before this call, as the causal mask counts them."""
        return 0 if self._tokens is None else self._length - self._tokens[1].shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys, offset of the first) for the mask of this call."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: the cache grows without limit."""
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the first `update` makes the memory."""

    def _reserve(self, keys: Tensor, values: Tensor, slots: int, length: int) -> tuple[Tensor, Tensor]:
        if self._store is None:
            self._store = (_empty_store(keys), _empty_store(values))
        self._store = _grow(self._store, slots, length)
        return self._store


def _empty_store(states: Tensor) -> Tensor:
    return states.new_zeros((0, states.shape[1], 0, states.shape[3]))


def _grow(stores: tuple[Tensor, Tensor], slots: int, length: int) -> tuple[Tensor, Tensor]:
    """The stores, or larger copies: slots rounded up to a power of two, length to a multiple of LENGTH_STEP."""
    has_slots, _, has_length, _ = stores[0].shape
    if slots <= has_slots and length <= has_length:
        return stores
    slots = has_slots if slots <= has_slots else 1 << (slots - 1).bit_length()
    length = max(has_length, -(-length // LENGTH_STEP) * LENGTH_STEP)
    return _enlarge(stores[0], slots, length), _enlarge(stores[1], slots, length)


def _enlarge(store: Tensor, slots: int, length: int) -> Tensor:
    # Zeros, not uninitialised memory: a masked position counts 0 times its value, and 0 times NaN is NaN.
    larger = store.new_zeros((slots, store.shape[1], length, store.shape[3]))
    larger[: store.shape[0], :, : store.shape[2]] = store
    return larger
