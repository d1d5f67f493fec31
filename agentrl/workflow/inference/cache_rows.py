"""The rows of live turns (see `model_rows`) in transformers' own caches. They are slower than slots, but correct for every
model that transformers can run.

Rows that were read together and have the same number of tokens share a cache, and are decoded in one call. Other rows are
decoded in separate calls. A cache is only continued, never cropped. `TokenRows` has no cache: for each new token, it reads each
row again from the first token.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from agentrl.workflow.models.logprobs import cache_parameter, causal_model, kept_logits
from agentrl.workflow.models.policy import Policy

PREFILL_TOKENS = 8192
"""The most tokens of new rows that are read in one call of the model."""

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptCache:
    """The cache of one row that has read `length` tokens."""

    cache: Cache
    length: int

    @property
    def block(self) -> "KeptCache":
        """Itself: no other row shares its memory."""
        return self

    @property
    def rows(self) -> int:
        """One."""
        return 1

    @property
    def tokens(self) -> int:
        """The number of tokens for which the cache has memory."""
        return self.length


@dataclass(slots=True)
class _Group:
    """Rows in one cache. The model has read `length` tokens of each.

    Args:
        rows: the position of each row in the cache; two rows may have the same position until they read their next tokens.
        size: the number of rows that the cache holds.
    """

    cache: Cache
    rows: dict[int, int]
    length: int
    size: int


class CacheRows:
    """The rows in transformers' caches; for the methods see `model_rows.ModelRows`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._groups: list[_Group] = []
        self.name = "transformers' cache, one for each group of rows of equal length"
        self.tokens = 0
        self.graphs = None
        self.resumes = True
        self.rewinds = False

    def reserve(self, count: int) -> None:
        """Do nothing: each call of the model makes a new cache."""

    def read(self, first: int, rows: Sequence[Tokens]) -> None:
        """Read new rows, shortest first, and number them from `first` on."""
        self._forget_from(first)
        for length, numbered in groupby(enumerate(rows, start=first), lambda pair: len(pair[1])):
            alike = list(numbered)
            size = max(1, PREFILL_TOKENS // max(1, length))
            for start in range(0, len(alike), size):
                part = alike[start : start + size]
                group = _Group(self._new_cache(), {row: place for place, (row, _) in enumerate(part)}, 0, len(part))
                if length:
                    self._call(group, torch.tensor([tokens for _, tokens in part]))
                self._groups.append(group)
        self._note_tokens()

    def resume(self, first: int, rows: Sequence[tuple[KeptCache, Tokens]]) -> None:
        """See `ModelRows.resume`."""
        for row, (cache, tokens) in enumerate(rows, start=first):
            group = _Group(cache.cache, {row: 0}, cache.length, 1)
            if tokens:
                self._call(group, torch.tensor([tokens]))
            self._groups.append(group)
        self._note_tokens()

    def next_logits(self, newest: Tensor, read: Tensor) -> Tensor:
        """See `ModelRows.next_logits`."""
        self._forget_from(len(newest))
        logits: list[Tensor] = []
        order: list[int] = []
        for group in self._groups:
            places = list(group.rows.values())
            if places != list(range(group.size)):
                group.cache, group.size = _select(group.cache, places, self._policy.device), len(places)
                group.rows = {row: place for place, row in enumerate(group.rows)}
            logits.append(self._call(group, newest[list(group.rows)][:, None]))
            order += group.rows
        self._note_tokens()
        return torch.cat(logits)[torch.tensor(order, device=self._policy.device).argsort()]

    def copy(self, source: int, first: int, count: int, length: int) -> None:
        """See `ModelRows.copy`. The row `source` must have read exactly `length` tokens."""
        group = self._group_of(source)
        assert group.length == length
        group.rows |= dict.fromkeys(range(first, first + count), group.rows[source])

    def drop(self, rows: Sequence[int], broken: Sequence[int], moves: Mapping[int, int], length: int) -> None:
        """See `ModelRows.drop`."""
        for row in rows:
            del self._group_of(row).rows[row]
        for old, new in moves.items():
            group = self._group_of(old)
            group.rows[new] = group.rows.pop(old)
        self._groups = [group for group in self._groups if group.rows]

    def take(self, rows: Sequence[int], lengths: Sequence[int]) -> list[KeptCache]:
        """Return copies of the rows' caches."""
        groups = [self._group_of(row) for row in rows]
        assert [group.length for group in groups] == list(lengths)
        device = self._policy.device
        return [
            KeptCache(_select(group.cache, [group.rows[row]], device), group.length)
            for row, group in zip(rows, groups, strict=True)
        ]

    def compact(self, rows: Sequence[KeptCache]) -> Sequence[KeptCache]:
        """Return the rows: none shares its memory."""
        return rows

    def clear(self) -> None:
        self._groups, self.tokens = [], 0

    def _new_cache(self) -> Cache:
        with self._policy.sampling() as model:
            return DynamicCache(config=causal_model(model).config)

    def _call(self, group: _Group, ids: Tensor) -> Tensor:
        """Return logits (B, V) after the last of (B, T) ids. The ids are added to the group's cache."""
        with self._policy.sampling() as model:
            group.length += ids.shape[1]
            inputs = {"input_ids": ids.to(self._policy.device), cache_parameter(model): group.cache, "use_cache": True}
            return kept_logits(model, 1, **inputs)[:, -1]

    def _group_of(self, row: int) -> _Group:
        return next(group for group in self._groups if row in group.rows)

    def _forget_from(self, first: int) -> None:
        """Drop the rows from number `first` on. An exception left them behind while they joined."""
        for group in self._groups:
            group.rows = {row: place for row, place in group.rows.items() if row < first}
        self._groups = [group for group in self._groups if group.rows]

    def _note_tokens(self) -> None:
        """Update the record of the most tokens that were held at once."""
        self.tokens = max(self.tokens, sum(len(group.rows) * group.length for group in self._groups))


def _select(cache: Cache, places: list[int], device: torch.device) -> Cache:
    """Return a cache of the rows at these positions; the old cache is unchanged."""
    chosen = copy.copy(cache)
    chosen.layers = [_copy_layer(layer) for layer in cache.layers]
    chosen.reorder_cache(torch.tensor(places, device=device))  # type: ignore[arg-type]  # annotated LongTensor
    return chosen


def _copy_layer(layer: Any) -> Any:
    """Return a layer with the same tensors.

    Reordering the copy sets new tensors in its attributes or dictionaries. This does not change the old layer.
    """
    copied = copy.copy(layer)
    for name, value in vars(copied).items():
        if isinstance(value, dict | list):
            setattr(copied, name, copy.copy(value))
    return copied


class TokenRows:
    """The rows as token ids only. For each new token, the model reads the complete row again. See `model_rows.ModelRows`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._rows: dict[int, Tokens] = {}
        self.name = "no cache: each token reads its whole row again"
        self.tokens = 0
        self.graphs = None
        self.resumes = False
        self.rewinds = False

    def reserve(self, count: int) -> None:
        """Do nothing: there are no cached values."""

    def read(self, first: int, rows: Sequence[Tokens]) -> None:
        """Store the tokens of new rows, numbered from `first` on."""
        self._rows = {row: tokens for row, tokens in self._rows.items() if row < first} | dict(enumerate(rows, start=first))

    def resume(self, first: int, rows: Sequence[tuple[Any, Tokens]]) -> None:
        """Do nothing, because `take` never returns a row to resume."""
        assert not rows

    def next_logits(self, newest: Tensor, read: Tensor) -> Tensor:
        """Add one token to each row, read all tokens of the row again, and return the logits (n, V) after the last token."""
        self._rows = {row: (*tokens, int(newest[row])) for row, tokens in self._rows.items() if row < len(newest)}
        logits: dict[int, Tensor] = {}
        for length in sorted({len(tokens) for tokens in self._rows.values()}):
            alike = [row for row, tokens in self._rows.items() if len(tokens) == length]
            ids = torch.tensor([self._rows[row] for row in alike], device=self._policy.device)
            with self._policy.sampling() as model:
                logits |= dict(zip(alike, kept_logits(model, 1, input_ids=ids, use_cache=False)[:, -1], strict=True))
        return torch.stack([logits[row] for row in sorted(logits)])

    def copy(self, source: int, first: int, count: int, length: int) -> None:
        """Copy a row's tokens."""
        self._rows |= dict.fromkeys(range(first, first + count), self._rows[source][:length])

    def drop(self, rows: Sequence[int], broken: Sequence[int], moves: Mapping[int, int], length: int) -> None:
        """See `ModelRows.drop`."""
        for row in rows:
            del self._rows[row]
        for old, new in moves.items():
            self._rows[new] = self._rows.pop(old)

    def take(self, rows: Sequence[int], lengths: Sequence[int]) -> list[KeptCache]:
        """Raise NotImplementedError: there are no cached values to return."""
        raise NotImplementedError

    def compact(self, rows: Sequence[KeptCache]) -> Sequence[KeptCache]:
        """Raise NotImplementedError, because `take` never returns a row."""
        raise NotImplementedError

    def clear(self) -> None:
        self._rows = {}
