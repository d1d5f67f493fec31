"""Algorithms and datasets with which one of two ranks runs out of memory, hangs, or computes something else."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist

from agentrl.workflow.algorithms.grpo import grpo
from agentrl.workflow.config import AlgorithmConfig
from agentrl.workflow.datasets.arithmetic import arithmetic
from agentrl.workflow.training import offline_training
from agentrl.workflow.training.advantages import Advantages, TokenRewards, relative_to_group
from agentrl.workflow.training.row_scorer import RowScorer
from agentrl.workflow.training.training_rows import Row
from agentrl.workflow.trajectory import Task


def _is_rank_one() -> bool:
    return dist.is_initialized() and dist.get_rank() == 1


def _credit_and_limit(most: int, earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    score = RowScorer.score

    def scored(scorer: RowScorer, model: torch.nn.Module, rows: Sequence[Row], *rest: Any, **more: Any) -> Any:
        if len(rows) > most:
            raise torch.OutOfMemoryError("as if")
        return score(scorer, model, rows, *rest, **more)

    if _is_rank_one():
        RowScorer.score = scored  # type: ignore[method-assign]
    return relative_to_group(earned, options)


def short(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """GRPO's; from then on rank 1 has memory for one row at a time."""
    return _credit_and_limit(1, earned, options)


def out(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """GRPO's; from then on rank 1 has memory for no row."""
    return _credit_and_limit(0, earned, options)


def astray(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """GRPO's; those of rank 1 are a little larger."""
    credited = relative_to_group(earned, options)
    return replace(credited, advantages=credited.advantages * (1.001 if _is_rank_one() else 1.0))


def hang(earned: TokenRewards, options: AlgorithmConfig) -> Advantages:
    """GRPO's, which rank 1 never returns."""
    while _is_rank_one():
        time.sleep(1)
    return relative_to_group(earned, options)


short_of_memory = replace(grpo, name="short_of_memory", credit=f"{__name__}:short")
out_of_memory = replace(grpo, name="out_of_memory", credit=f"{__name__}:out")
endless = replace(grpo, name="endless", credit=f"{__name__}:hang")
gone_astray = replace(grpo, name="gone_astray", credit=f"{__name__}:astray")


# datasets for `sft`


def _spoil_rank_one(fails: Callable[[int, int], None]) -> Callable[[str], Iterator[Task]]:
    """Arithmetic's tasks; in rank 1, each forward pass first calls `fails` with its number and its rows."""

    def load(split: str) -> Iterator[Task]:
        score, passes = offline_training.token_logprobs, count(1)

        def scored(module: torch.nn.Module, ids: torch.Tensor, *rest: Any) -> Any:
            fails(next(passes), len(ids))
            return score(module, ids, *rest)

        if _is_rank_one():
            offline_training.token_logprobs = scored
        return arithmetic.load(split)

    return load


def _refuse_two_rows(number: int, rows: int) -> None:
    if rows > 1:
        raise torch.OutOfMemoryError("as if")


def _hang_in_third(number: int, rows: int) -> None:
    while number == 3:
        time.sleep(1)


cramped = replace(arithmetic, load=_spoil_rank_one(_refuse_two_rows))
"""Rank 1 has memory for one row at a time."""


def _drift(split: str) -> Iterator[Task]:
    """Arithmetic's tasks; in rank 1, the third optimizer step changes a weight too much."""
    take_step, steps = offline_training.take_step, count(1)

    def take_wrong_step(optimizer: Any, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        take_step(optimizer, parameters)
        if next(steps) == 3:
            next(iter(parameters.values())).data.view(-1)[0] += 1e-3

    if _is_rank_one():
        offline_training.take_step = take_wrong_step
    return arithmetic.load(split)


def _reverse(split: str) -> Iterator[Task]:
    """Arithmetic's first tasks; in rank 1, from the last to the first."""
    return iter(sorted(islice(arithmetic.load(split), 8), key=lambda task: task.key, reverse=_is_rank_one()))


unequal = replace(arithmetic, load=_reverse)
"""Rank 1 reads other examples."""

drifting = replace(arithmetic, load=_drift)
"""The weights of rank 1 differ from the third step on."""

stuck = replace(arithmetic, load=_spoil_rank_one(_hang_in_third))
"""Rank 1 never returns from its third forward pass."""
