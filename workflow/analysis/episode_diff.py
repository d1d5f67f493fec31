"""Two episodes side by side: the first token that differs, then what differs in results, rewards and endings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from agentrl.workflow.trajectory import Episode, StopReason

SCALAR = "reward"
"""The name of the weighted sum of the reward parts."""


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first place where two token sequences part; an id is None where one has ended.

    Args:
        step: whose tokens.
        part: among those that were new in its prompt, or those that were sampled.
        index: which of them, from 0.
        ids: on both sides (recorded and rendered again; this episode and the other).
        texts: of the ids; empty where no tokenizer is at hand.
    """

    step: int
    part: Literal["prompt", "sampled"]
    index: int
    ids: tuple[int | None, int | None]
    texts: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class _Part:
    step: int
    part: Literal["prompt", "sampled"]
    ids: tuple[int, ...]


_NOTHING = _Part(0, "sampled", ())


@dataclass(frozen=True, slots=True)
class ResultDifference:
    """The results of the calls at one place of both episodes; None where a side has no such call, or no result yet."""

    step: int
    call: int
    left: str | None
    right: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two episodes.

    Args:
        common: tokens that they begin with alike, prompts and sampled ones.
        tokens: left and right, in all.
        token: the first that differs; None where all are the same.
        results: tool results that differ.
        rewards: (part, left, right) of the parts that differ, the weighted sum as `reward`.
        stop_reasons, tasks: left and right, where they differ.
    """

    common: int
    tokens: tuple[int, int]
    token: TokenDifference | None
    results: tuple[ResultDifference, ...] = ()
    rewards: tuple[tuple[str, float | None, float | None], ...] = ()
    stop_reasons: tuple[StopReason | None, StopReason | None] | None = None
    tasks: tuple[str, str] | None = None

    @property
    def same(self) -> bool:
        """Whether none of this differs."""
        return self.token is None and not self.results and not self.rewards and self.stop_reasons is None


def compare(left: Episode, right: Episode) -> Comparison:
    """Compares two episodes step by step, and their `rewards` and `reward`."""
    common, token = first_difference(left, right)
    counts = (_token_count(left), _token_count(right))
    reasons = (left.stop_reason, right.stop_reason)
    keys = (left.task.key, right.task.key)
    return Comparison(
        common=common,
        tokens=counts,
        token=token,
        results=tuple(_result_differences(left, right)),
        rewards=tuple(_part_differences(left, right)),
        stop_reasons=reasons if reasons[0] != reasons[1] else None,
        tasks=keys if keys[0] != keys[1] else None,
    )


def first_difference(left: Episode, right: Episode) -> tuple[int, TokenDifference | None]:
    """The number of tokens that two episodes begin with alike, and the first that differs."""
    common = 0
    for one, other in zip_longest(_parts(left), _parts(right), fillvalue=_NOTHING):
        index = common_prefix(one.ids, other.ids)
        common += index
        if index < max(len(one.ids), len(other.ids)):
            longer = max(one, other, key=lambda part: len(part.ids))
            return common, TokenDifference(longer.step, longer.part, index, (_at(one.ids, index), _at(other.ids, index)))
    return common, None


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of ids that two sequences begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _parts(episode: Episode) -> Iterator[_Part]:
    for step in episode.steps:
        yield _Part(step.index, "prompt", step.prompt_ids)
        yield _Part(step.index, "sampled", step.sampled_ids)


def _at(ids: Sequence[int], index: int) -> int | None:
    return ids[index] if index < len(ids) else None


def _token_count(episode: Episode) -> int:
    return sum(len(part.ids) for part in _parts(episode))


def _result_differences(left: Episode, right: Episode) -> Iterator[ResultDifference]:
    one, other = _results(left), _results(right)
    for place in sorted(one.keys() | other.keys()):
        if one.get(place) != other.get(place):
            yield ResultDifference(*place, one.get(place), other.get(place))


def _results(episode: Episode) -> dict[tuple[int, int], str]:
    """(step, call) -> the call's result, in words."""
    return {
        (step.index, index): f"{result.error_class}: {result.content}" if result.error_class else result.content
        for step in episode.steps
        for index, result in enumerate(step.results or ())
    }


def _part_differences(left: Episode, right: Episode) -> Iterator[tuple[str, float | None, float | None]]:
    one, other = ({**episode.rewards, SCALAR: episode.reward} for episode in (left, right))
    for part in (*dict.fromkeys((*left.rewards, *right.rewards)), SCALAR):
        if one.get(part) != other.get(part):
            yield part, one.get(part), other.get(part)
