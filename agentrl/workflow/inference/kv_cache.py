"""The sampler's cache: one slot per live row, each with its own length, behind transformers' `Cache` interface.

Live rows occupy the slots 0..n-1 without a gap, so a decoding step reads a plain slice and copies nothing. When rows end, the
last rows move into their slots. The content of the ended rows' slots can be taken out, and put back when the episodes continue.
If rows or tokens need more memory, the stores are copied into larger ones.

Each method handles all of its slots with one operation per tensor: with small models, and on GPUs, the time depends on the
number of operations.

A layer stores the keys and values of all tokens, or states of a fixed size (of convolutions and linear attention), or both.
States belong to the last token that the row has read. They can be continued, never cropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from agentrl.workflow.models.cache_layout import CacheLayout, EmptyLayer
from agentrl.workflow.models.memory_estimate import cache_length


@dataclass(frozen=True, slots=True)
class SlotStates:
    """The content of N slots, copied. For each layer: keys and values (N, heads, T, head_dim), or states (N, ...), or both.

    Attributes:
        rows: N.
        tokens: N * T.
    """

    layers: tuple[tuple[Tensor, ...], ...]
    rows: int
    tokens: int

    def select(self, rows: Tensor) -> "SlotStates":
        """Return a copy of some of the rows."""
        layers = tuple(tuple(state.index_select(0, rows) for state in states) for states in self.layers)
        return SlotStates(layers, len(rows), self.tokens // self.rows * len(rows))


class SlotCache(Cache):
    """The slots of all layers. A slot is the memory of one live row: in each layer, the keys and values of its tokens, or the
    layer's states for the row. Call `prefill` or `extend` before each call of the model.
    """

    def __init__(self, layout: CacheLayout) -> None:
        super().__init__(layers=[_make_layer(*layer_states) for layer_states in zip(layout.layers, layout.states, strict=True)])

    def prefill(self, first: int, count: int, length: int) -> None:
        """Make the next call write (count, length) prompt tokens into the slots first..first+count-1, from position 0."""
        for layer in self._slot_layers():
            layer.place(slice(first, first + count), None, length)

    def extend(self, first: int, positions: Tensor, length: int) -> None:
        """Make the next call write tokens at `positions` (B, T) of the slots from `first` on.

        The call reads the first `length` tokens of these slots.
        """
        slots = torch.arange(first, first + len(positions), device=positions.device)[:, None]
        for layer in self._slot_layers():
            layer.place(slice(first, first + len(positions)), (slots, positions), length)

    def reserve(self, slots: int) -> None:
        """Make the next growth of the stores allocate at least so many slots, because so many will soon be used."""
        for layer in self._slot_layers():
            layer.reserve(slots)

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy the first `length` tokens of one slot into others.

        If layers store states, the slot must have read exactly `length` tokens.
        """
        for layer in self._slot_layers():
            layer.copy(source, targets, length)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` tokens, and the states, of the slots `sources` (N) into the slots `targets` (N)."""
        for layer in self._slot_layers():
            layer.move(sources, targets, length)

    def wipe(self, slot: int) -> None:
        """Set a slot to zeros."""
        for layer in self._slot_layers():
            layer.wipe(slot)

    def take(self, slots: Tensor, length: int) -> SlotStates:
        """Return a copy of the first `length` tokens, and of the states, of the slots (N)."""
        layers = tuple(layer.take(slots, length) for layer in self._slot_layers())
        return SlotStates(layers, len(slots), len(slots) * length)

    def put(self, states_taken: SlotStates, rows: Tensor, slots: slice) -> None:
        """Write the rows (N) of what `take` returned into N slots, from position 0."""
        for layer, states in zip(self._slot_layers(), states_taken.layers, strict=True):
            layer.put(slots, *(state.index_select(0, rows) for state in states))

    @property
    def memory(self) -> object:
        """The memory of the first layer; None before the first call. When the cache grows, all layers get new memory, and this
        property returns another object. Compare the object (`is`) to find out whether CUDA graphs still refer to the current
        memory.
        """
        return self.layers[0].memory if isinstance(self.layers[0], KeySlots) else None

    @property
    def tokens(self) -> int:
        """The number of tokens whose keys and values fit into the allocated memory."""
        return max((layer.tokens for layer in self.layers if isinstance(layer, KeySlots)), default=0)

    def clear(self) -> None:
        for layer in self._slot_layers():
            layer.reset()

    def _slot_layers(self) -> Iterator[Any]:
        return (layer for layer in self.layers if isinstance(layer, KeySlots | StateSlots))


class KeySlots(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, each (slots, heads, length, head_dim)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        self._store: tuple[Tensor, Tensor] | None = None
        self._reserved = 0
        self.place(slice(0, 0), None, 0)

    @property
    def memory(self) -> object:
        """The tensors that store keys and values; None before the first token."""
        return self._store

    @property
    def tokens(self) -> int:
        """The capacity in tokens: the number of slots times the tokens per slot."""
        return 0 if self._store is None else self._store[0].shape[0] * self._store[0].shape[2]

    def place(self, slots: slice, tokens: tuple[Tensor, Tensor] | None, length: int) -> None:
        """Select the slots and positions that the next `update` writes.

        Args:
            slots: the slots.
            tokens: the slots (B, 1) and positions (B, T) of the new tokens; None: complete prompts from position 0.
            length: the number of tokens of these slots that the call reads.
        """
        self._rows, self._tokens, self._length = slots, tokens, length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, heads, T, head_dim). Return all keys and values that this call may read."""
        stores = self._grow_stores(key_states, value_states, self._rows.stop, self._length)
        if self._tokens is None:
            for store, states in zip(stores, (key_states, value_states), strict=True):
                store[self._rows, :, : self._length] = states
            return key_states, value_states
        slots, positions = self._tokens
        for store, states in zip(stores, (key_states, value_states), strict=True):
            store[slots, :, positions] = states.transpose(1, 2)
        keys, values = stores
        return keys[self._rows, :, : self._length], values[self._rows, :, : self._length]

    def reserve(self, slots: int) -> None:
        """Set the least number of slots of the next growth."""
        self._reserved = slots

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy one slot's first tokens into others."""
        assert self._store is not None
        for store in self._grow_stores(*self._store, targets.stop, length):
            store[targets, :, :length] = store[source, :, :length]

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first tokens of some slots into others."""
        assert self._store is not None
        for store in self._store:
            tokens = store.narrow(2, 0, length)
            tokens.index_copy_(0, targets, tokens.index_select(0, sources))

    def wipe(self, slot: int) -> None:
        """Set one slot's keys and values to zeros. A NaN that stays in the slot would make the logits of its next row
        NaN, even if attention masks its position.
        """
        if self._store is not None and slot < len(self._store[0]):
            for store in self._store:
                store[slot] = 0

    def take(self, slots: Tensor, length: int) -> tuple[Tensor, ...]:
        """Return a copy of the first tokens of the slots (N), each (N, heads, length, head_dim)."""
        assert self._store is not None
        return tuple(store.narrow(2, 0, length).index_select(0, slots) for store in self._store)

    def put(self, slots: slice, *states: Tensor) -> None:
        """Write keys and values (N, heads, T, head_dim) into N slots, from position 0."""
        keys, values = states
        stores = self._grow_stores(keys, values, slots.stop, keys.shape[2])
        for store, written in zip(stores, states, strict=True):
            store[slots, :, : keys.shape[2]] = written

    def get_seq_length(self) -> int:
        """Return the number of tokens before this call, for the causal mask."""
        return 0 if self._tokens is None else self._length - self._tokens[1].shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the offset of the first key, for the mask of this call."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the cache grows without limit."""
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first `update` allocates the memory."""

    def _grow_stores(self, keys: Tensor, values: Tensor, slots: int, length: int) -> tuple[Tensor, Tensor]:
        if self._store is None:
            self._store = (_empty_store(keys), _empty_store(values))
        self._store = _grow(self._store, slots, self._reserved, length)
        return self._store


class StateSlots(LinearAttentionCacheLayerMixin):
    """One layer's states of convolutions and of linear attention, each (slots, ...).

    If a slot has only zeros, its row has read no token yet. The model reads and writes views of the slots that `place` selects.
    """

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.reset()

    def reset(self) -> None:
        self._states: dict[tuple[str, int], Tensor] = {}
        self._reserved = 0
        self.place(slice(0, 0), None, 0)

    def place(self, slots: slice, tokens: tuple[Tensor, Tensor] | None, length: int) -> None:
        """Set the slots of the next call. If `tokens` is None, new rows begin in these slots. Otherwise, the rows in them
        continue.
        """
        self._rows = slots
        for number in range(self.number_of_states):
            self.has_previous_state[number] = tokens is not None and bool(self._states)
        self._show()

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Store the last inputs (B, channels, kernel) of a convolution.

        Return all inputs that the convolution needs for the new tokens.
        """
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        if self.has_previous_state[state_idx]:
            conv_states = torch.cat([self._states["conv", state_idx][self._rows], conv_states], dim=-1)
        else:
            conv_states = functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self._write("conv", state_idx, conv_states[..., -width:])
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Store the states (B, ...) after the tokens of this call."""
        self._write("recurrent", state_idx, recurrent_states)
        return recurrent_states

    def reserve(self, slots: int) -> None:
        """Set the least number of slots of the next growth."""
        self._reserved = slots

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy one slot's states into others."""
        self._grow(targets.stop)
        for store in self._states.values():
            store[targets] = store[source]

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the states of some slots into others."""
        for store in self._states.values():
            store.index_copy_(0, targets, store.index_select(0, sources))

    def wipe(self, slot: int) -> None:
        """Set one slot's states to zeros."""
        for store in self._states.values():
            if slot < len(store):
                store[slot] = 0

    def take(self, slots: Tensor, length: int) -> tuple[Tensor, ...]:
        """Return a copy of the states of the slots (N), each (N, ...)."""
        return tuple(store.index_select(0, slots) for store in self._states.values())

    def put(self, slots: slice, *states: Tensor) -> None:
        """Write states, each (N, ...), into N slots."""
        self._grow(slots.stop)
        for store, written in zip(self._states.values(), states, strict=True):
            store[slots] = written

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the first update allocates the memory."""

    def _write(self, name: str, number: int, states: Tensor) -> None:
        if (name, number) not in self._states:
            self._states[name, number] = states.new_zeros((0, *states.shape[1:]))
        self._grow(self._rows.stop)
        self._states[name, number][self._rows] = states

    def _grow(self, slots: int) -> None:
        for key, store in self._states.items():
            if slots > len(store):
                larger = store.new_zeros((_round_up_slots(max(slots, self._reserved)), *store.shape[1:]))
                larger[: len(store)] = store
                self._states[key] = larger

    def _show(self) -> None:
        """Give the model the states of the selected slots. The model may change them in place."""
        self._grow(self._rows.stop)
        for number in range(self.number_of_states):
            for name, views in (("conv", self.conv_states), ("recurrent", self.recurrent_states)):
                store = self._states.get((name, number))
                views[number] = None if store is None else store[self._rows]


class KeyAndStateSlots(StateSlots, KeySlots):  # type: ignore[no-untyped-call, override]
    """A layer's keys and values, and its states."""

    def __init__(self, number_of_states: int = 1) -> None:
        KeySlots.__init__(self)
        StateSlots.__init__(self, number_of_states)

    def reset(self) -> None:
        self._store = None
        self._states = {}
        self._reserved = 0
        if hasattr(self, "conv_states"):
            self.place(slice(0, 0), None, 0)

    def place(self, slots: slice, tokens: tuple[Tensor, Tensor] | None, length: int) -> None:
        """Set the slots of the next call."""
        KeySlots.place(self, slots, tokens, length)
        StateSlots.place(self, slots, tokens, length)

    def copy(self, source: int, targets: slice, length: int) -> None:
        KeySlots.copy(self, source, targets, length)
        StateSlots.copy(self, source, targets, length)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first tokens, and the states, of some slots into others."""
        KeySlots.move(self, sources, targets, length)
        StateSlots.move(self, sources, targets, length)

    def wipe(self, slot: int) -> None:
        KeySlots.wipe(self, slot)
        StateSlots.wipe(self, slot)

    def take(self, slots: Tensor, length: int) -> tuple[Tensor, ...]:
        """Return a copy of the keys, values and states of some slots."""
        return (*KeySlots.take(self, slots, length), *StateSlots.take(self, slots, length))

    def put(self, slots: slice, *states: Tensor) -> None:
        """Write keys, values and states into slots."""
        KeySlots.put(self, slots, *states[:2])
        StateSlots.put(self, slots, *states[2:])

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the first update allocates the memory."""


def _make_layer(content: str, states: int) -> Any:
    match content:
        case "keys":
            return KeySlots()
        case "states":
            return StateSlots(states)
        case "keys and states":
            return KeyAndStateSlots(states)
        case _:
            return EmptyLayer()


def _empty_store(states: Tensor) -> Tensor:
    return states.new_zeros((0, states.shape[1], 0, states.shape[3]))


def _grow(stores: tuple[Tensor, Tensor], slots: int, reserved: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the stores, or larger copies of them, with at least `reserved` slots.

    Lengths are rounded up by `cache_length`.
    """
    has_slots, _, has_length, _ = stores[0].shape
    if slots <= has_slots and length <= has_length:
        return stores
    slots = max(has_slots, _round_up_slots(max(slots, reserved)))
    length = max(has_length, cache_length(length, on_gpu=stores[0].device.type != "cpu"))
    return _enlarge(stores[0], slots, length), _enlarge(stores[1], slots, length)


def _round_up_slots(slots: int) -> int:
    """Return the next power of two."""
    return 1 << (slots - 1).bit_length()


def _enlarge(store: Tensor, slots: int, length: int) -> Tensor:
    # Zeros, not uninitialised memory: a masked position counts 0 times its value, and 0 times NaN is NaN.
    larger = store.new_zeros((slots, store.shape[1], length, store.shape[3]))
    larger[: store.shape[0], :, : store.shape[2]] = store
    return larger
