"""The comparison of two episodes: the first token that differs, then the differences in calls, results, rewards and stop
reasons.

Chains are compared in pairs, because an agent's requests may come in any order. Chains with the same tokens are paired first.
The remaining chains are paired in the order of their first steps. The tokens of a chain are all tokens of its training row,
including those that it shares with another chain.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, TypeVar

from agentrl.workflow.call_json import json_key
from agentrl.workflow.token_chains import chains_of
from agentrl.workflow.trajectory import Episode, Step, StopReason

SCALAR = "reward"
"""The name of the weighted sum of the reward parts."""
AROUND_TOKENS = 16
"""The most tokens before a difference, and after it, whose text is shown."""

T = TypeVar("T")
Decode = Callable[[Sequence[int]], str]
"""A function that returns the text of token ids."""


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first position at which two token sequences differ.

    Args:
        step: the index of the step that has the token, in the episode whose `part` is longer; in the left episode if both parts
            have the same length.
        part: whether the token is a new prompt token of the step or a sampled one. In the first step of a chain, all prompt
            tokens count as new.
        index: the index of the token in that part, from 0.
        ids: the token ids at that position, left and right; None for a sequence that ends before the position.
        before_ids: the last tokens of the part before that position. Both sequences have them.
        after_ids: the next tokens of the part after that position, left and right.
        texts, before, after: the texts of `ids`, `before_ids` and `after_ids`; empty if there is no tokenizer.
    """

    step: int
    part: Literal["prompt", "sampled"]
    index: int
    ids: tuple[int | None, int | None]
    texts: tuple[str, str] = ("", "")
    before_ids: tuple[int, ...] = ()
    after_ids: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    before: str = ""
    after: tuple[str, str] = ("", "")

    def with_texts(self, left: Decode, right: Decode) -> "TokenDifference":
        """Return the difference with its texts. `left` and `right` decode the tokens of the two sequences."""
        texts = tuple(decode(() if token is None else (token,)) for decode, token in zip((left, right), self.ids, strict=True))
        after = (left(self.after_ids[0]), right(self.after_ids[1]))
        return replace(self, texts=(texts[0], texts[1]), before=left(self.before_ids), after=after)


def token_difference(
    step: int, part: Literal["prompt", "sampled"], left: Sequence[int], right: Sequence[int]
) -> TokenDifference | None:
    """Return the first difference between the tokens of a part, without texts; None if they are equal."""
    index = common_prefix(left, right)
    if index >= max(len(left), len(right)):
        return None
    before = tuple(left[max(0, index - AROUND_TOKENS) : index])
    after = [tuple(ids[index + 1 : index + 1 + AROUND_TOKENS]) for ids in (left, right)]
    ids = (_at(left, index), _at(right, index))
    return TokenDifference(step, part, index, ids, before_ids=before, after_ids=(after[0], after[1]))


@dataclass(frozen=True, slots=True)
class _Part:
    step: int
    part: Literal["prompt", "sampled"]
    ids: tuple[int, ...]


_NOTHING = _Part(0, "sampled", ())
Chain = Sequence[Step]


@dataclass(frozen=True, slots=True)
class ResultDifference:
    """Two different results of the same call. `step` and `call` are the call's position in the left episode. `left` or `right`
    is None if that episode has no result of the call.
    """

    step: int
    call: int
    left: str | None
    right: str | None


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """The name of the tool and the arguments of a call that the policy wrote."""

    tool: str
    arguments: Mapping[str, Any]

    def key(self) -> tuple[str, str]:
        """Return a value that is equal for the same tool with the same arguments, compared as JSON values."""
        return self.tool, json_key(dict(self.arguments))


@dataclass(frozen=True, slots=True)
class ArgumentsDifference:
    """Two different calls at the same position. `step` and `call` are the position in the left episode. `left` or `right` is
    None if that episode has no call there.
    """

    step: int
    call: int
    left: WrittenCall | None
    right: WrittenCall | None


@dataclass(frozen=True, slots=True)
class EpisodeComparison:
    """The comparison of two episodes.

    Args:
        common: the number of tokens before the first difference.
        tokens: the numbers of all tokens, left and right.
        calls: the calls whose tool or arguments differ.
        rewards: (part, left, right) of the reward parts that differ; the weighted sum is the part `reward`.
        stop_reasons, tasks: left and right, if they differ.
    """

    common: int
    tokens: tuple[int, int]
    token: TokenDifference | None
    calls: tuple[ArgumentsDifference, ...] = ()
    results: tuple[ResultDifference, ...] = ()
    rewards: tuple[tuple[str, float | None, float | None], ...] = ()
    stop_reasons: tuple[StopReason | None, StopReason | None] | None = None
    tasks: tuple[str, str] | None = None

    @property
    def same(self) -> bool:
        """True if tokens, calls, results, rewards and stop reasons are the same."""
        return self.token is None and not (self.calls or self.results or self.rewards) and self.stop_reasons is None


def compare(left: Episode, right: Episode) -> EpisodeComparison:
    """Compare two episodes chain by chain and step by step. Also compare their reward parts and the weighted sum."""
    pairs = _chain_pairs(left, right)
    common, token = _first_difference(left, right, pairs)
    counts = (_token_count(left), _token_count(right))
    reasons = (left.stop_reason, right.stop_reason)
    keys = (left.task.key, right.task.key)
    return EpisodeComparison(
        common=common,
        tokens=counts,
        token=token,
        calls=tuple(ArgumentsDifference(*difference) for difference in _differences(pairs, _calls, WrittenCall.key)),
        results=tuple(ResultDifference(*difference) for difference in _differences(pairs, _results, str)),
        rewards=tuple(_part_differences(left, right)),
        stop_reasons=reasons if reasons[0] != reasons[1] else None,
        tasks=keys if keys[0] != keys[1] else None,
    )


def _chain_pairs(left: Episode, right: Episode) -> list[tuple[Chain, Chain]]:
    theirs: dict[tuple[tuple[int, ...], ...], list[Chain]] = {}
    for chain in reversed(chains_of(right)):
        theirs.setdefault(_key(right, chain), []).append(chain)
    pairs: list[tuple[Chain, Chain | None]] = []
    for chain in chains_of(left):
        same = theirs.get(_key(left, chain))
        pairs.append((chain, same.pop() if same else None))
    rest = iter(sorted((chain for chains in theirs.values() for chain in chains), key=lambda chain: chain[0].index))
    chain_pairs = [(one, next(rest, ()) if other is None else other) for one, other in pairs]
    return [*chain_pairs, *(((), other) for other in rest)]


def _key(episode: Episode, chain: Chain) -> tuple[tuple[int, ...], ...]:
    return tuple(part.ids for part in _parts(episode, chain))


def _first_difference(
    left: Episode, right: Episode, pairs: Sequence[tuple[Chain, Chain]]
) -> tuple[int, TokenDifference | None]:
    """Return the number of tokens before the first difference, and that difference."""
    common = 0
    for ours, theirs in pairs:
        for one, other in zip_longest(_parts(left, ours), _parts(right, theirs), fillvalue=_NOTHING):
            longer = max(one, other, key=lambda part: len(part.ids))
            difference = token_difference(longer.step, longer.part, one.ids, other.ids)
            if difference is not None:
                return common + difference.index, difference
            common += len(longer.ids)
    return common, None


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the number of items at the beginning of two sequences that are equal."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _parts(episode: Episode, chain: Chain) -> Iterator[_Part]:
    for step in chain:
        begins = step is chain[0] and step.parent is not None
        before = episode.tokens_of(step.parent)[: step.shared] if begins and step.parent is not None else ()
        yield _Part(step.index, "prompt", before + step.prompt_ids)
        yield _Part(step.index, "sampled", step.sampled_ids)


def _at(ids: Sequence[int], index: int) -> int | None:
    return ids[index] if index < len(ids) else None


def _token_count(episode: Episode) -> int:
    return sum(len(part.ids) for chain in chains_of(episode) for part in _parts(episode, chain))


def _differences(
    pairs: Sequence[tuple[Chain, Chain]], values: Callable[[Step], Sequence[T]], key: Callable[[T], object]
) -> Iterator[tuple[int, int, T | None, T | None]]:
    """Yield step, call, and left and right value of each call whose values have different keys."""
    for ours, theirs in pairs:
        for left, right in zip_longest(ours, theirs):
            sides = (() if step is None else values(step) for step in (left, right))
            step = right.index if left is None else left.index
            for call, (one, other) in enumerate(zip_longest(*sides)):
                if one is None or other is None or key(one) != key(other):
                    yield step, call, one, other


def _calls(step: Step) -> list[WrittenCall]:
    return [WrittenCall(call.name, call.arguments) for call in step.message.tool_calls]


def _results(step: Step) -> list[str]:
    return [
        f"{result.error_class}: {result.content}" if result.error_class else result.content for result in step.results or ()
    ]


def _part_differences(left: Episode, right: Episode) -> Iterator[tuple[str, float | None, float | None]]:
    one, other = ({**episode.rewards, SCALAR: episode.reward} for episode in (left, right))
    for part in (*dict.fromkeys((*left.rewards, *right.rewards)), SCALAR):
        if one.get(part) != other.get(part):
            yield part, one.get(part), other.get(part)
