"""Direct preference optimisation on siblings: of two episodes of one group the better one is made likelier than the worse.

Rafailov et al. 2023, arXiv 2305.18290. The implicit reward of an episode is beta x (its logprob under the policy - under the
reference), a sum over the tokens that it sampled itself: what tools and templates wrote, and what forks share with their
parent, is no part of it. The reference is either the weights that the training starts from, read once before it (the margin
begins at 0), or the sampler, whose logprobs are stored with the tokens (nothing is read; the two episodes of a pair may then
have different references, and the margin does not begin at 0 unless the start is what sampled them).

`margin` is the mean difference of the two implicit rewards, `accuracy` how often it is above 0.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from agentrl.workflow.errors import ConfigError, StateError
from agentrl.workflow.models.device_errors import translate_device_lost
from agentrl.workflow.models.devices import pick_device
from agentrl.workflow.models.logprobs import keeps_apart
from agentrl.workflow.models.lookup import refuse_existing
from agentrl.workflow.training.offline_checkpoint import open_resumable
from agentrl.workflow.training.offline_training import (
    SILENT,
    Objective,
    ProgressListener,
    Recipe,
    Start,
    TrainedModel,
    backoff_over_rows,
    load_learner,
    recipe_for,
    row_logprob_sums,
    rows_by_episode,
    save,
    train,
    training_key,
)
from agentrl.workflow.training.oom_backoff import OomBackoff
from agentrl.workflow.training.optimizer import check_optimizer
from agentrl.workflow.training.training_rows import Row
from agentrl.workflow.trajectory import Episode

Reference = Literal["start", "sampler"]
REFERENCES: tuple[Reference, ...] = ("start", "sampler")

PASSES = 3
"""The default number of passes over the pairs."""

EMPTY = "nothing sampled"
"""The reason for which a pair is left out: one of its episodes."""


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two episodes of one group: their training rows, and the reference's logprobs.

    Args:
        chosen, rejected: rows of the better and of the worse one.
        reference: the reference's logprob of the chosen one's sampled tokens minus the rejected one's, in nats.
    """

    chosen: tuple[Row, ...]
    rejected: tuple[Row, ...]
    reference: float = 0.0

    @property
    def rows(self) -> tuple[Row, ...]:
        """All of them, the chosen one's first."""
        return (*self.chosen, *self.rejected)


@translate_device_lost()
def dpo(
    pairs: Sequence[tuple[Episode, Episode]],
    start: Start,
    target: Path,
    *,
    beta: float = 0.1,
    reference: Reference = "start",
    recipe: Recipe | None = None,
    device: str = "auto",
    threads: int = 0,
    overwrite: bool = False,
    save_every: int | None = None,
    progress: ProgressListener = SILENT,
) -> TrainedModel:
    """Train a run's model to prefer the first episode of each pair to the second, and save it.

    Args:
        pairs: already chosen (`stats.selection.select_pairs`), of one base and temperature.
        start: the model and the weights that learn.
        target: the model folder to make.
        beta: the weight of a nat; the smaller, the further the policy goes from the reference.
        recipe: unset: `PASSES` over them at 1e-4.

    Raises:
        ConflictError: the target exists, and overwrite is off.
        StateError: in no pair both episodes sampled a token of their own.
        ConfigError: beta is not above 0, or the recipe's optimizer does not work here.
        ModelError, CheckpointError: as `training.offline_training.load_learner` and `train` do.
    """
    refuse_existing(target, overwrite)
    if not 0 < beta < float("inf"):
        raise ConfigError(f"beta must be above 0, not {beta:g}.", "0.1 is customary.")
    chosen, rejected = (rows_by_episode(side) for side in zip(*pairs, strict=True)) if pairs else ([], [])
    both = [
        (ids, PreferencePair(*rows)) for ids, rows in zip(pairs, zip(chosen, rejected, strict=True), strict=True) if all(rows)
    ]
    if not both:
        raise StateError(f"In none of {len(pairs)} pairs both episodes sampled anything to learn from.", "agentrl episodes RUN")
    recipe = recipe or recipe_for(len(both), PASSES, 1e-4)
    check_optimizer(recipe.optimizer, pick_device(device))
    learner = load_learner(start, device, threads)
    examples = [pair for _, pair in both]
    objective = preference_objective(beta, start.temperature)
    differences = (
        sampler_differences(examples) if reference == "sampler" else model_differences(learner.module, examples, objective)
    )
    examples = [PreferencePair(pair.chosen, pair.rejected, value) for pair, value in zip(examples, differences, strict=True)]
    ids = [[better.id, worse.id] for (better, worse), _ in both]
    source = start.record("dpo") | {"beta": beta, "reference": reference, "pairs": ids}
    key = training_key(learner, recipe, source, [pair.rows for pair in examples])
    with open_resumable(target, key, save_every, overwrite) as resumable:
        metrics = train(learner.module, examples, recipe, objective, progress, resumable=resumable)
        return save(
            learner, TrainedModel(target, recipe, len(both), +Counter({EMPTY: len(pairs) - len(both)}), metrics), source
        )


def dpo_loss(difference: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair and the margin of its implicit rewards; both (N,).

    -log sigmoid(margin), margin = beta x ((lp_chosen - ref_chosen) - (lp_rejected - ref_rejected)).
    Source: arXiv 2305.18290, equation 7.

    Args:
        difference: the policy's logprob of the chosen episode minus that of the rejected one (N,), in nats.
        reference: the reference's, a constant (N,).
        beta: above 0.
    """
    margin = beta * (difference - reference)
    return -logsigmoid(margin), margin


def preference_objective(beta: float, temperature: float = 1.0) -> Objective[PreferencePair]:
    """Return the mean of `dpo_loss` over a batch's pairs."""

    def terms(pairs: Sequence[PreferencePair], logprobs: Sequence[Tensor]) -> dict[str, Tensor]:
        difference = pair_differences(pairs, logprobs)
        loss, margin = dpo_loss(difference, difference.new_tensor([pair.reference for pair in pairs]), beta)
        margin = margin.detach()
        return {"loss": loss.sum(), "accuracy": (margin > 0).sum(), "margin": margin.sum()}

    return Objective(rows=lambda pair: pair.rows, weight=lambda pair: 1.0, terms=terms, temperature=temperature)


def pair_differences(pairs: Sequence[PreferencePair], logprobs: Sequence[Tensor]) -> Tensor:
    """Return the logprob of each pair's (N,) chosen rows minus that of the rejected ones, which come after them."""
    return torch.stack(
        [rows[: len(pair.chosen)].sum() - rows[len(pair.chosen) :].sum() for pair, rows in zip(pairs, logprobs, strict=True)]
    )


def sampler_differences(pairs: Sequence[PreferencePair]) -> list[float]:
    """Return each pair's difference as the sampler computed it, when it sampled."""
    return [_recorded_logprob(pair.chosen) - _recorded_logprob(pair.rejected) for pair in pairs]


def _recorded_logprob(rows: Sequence[Row]) -> float:
    return sum(value for row in rows for value, own in zip(row.behavior_logprobs, row.loss_mask, strict=True) if own)


@torch.no_grad()
def model_differences(module: nn.Module, pairs: Sequence[PreferencePair], objective: Objective[PreferencePair]) -> list[float]:
    """Return each pair's difference under the module as it is, without dropout."""
    module.eval()
    backoff: OomBackoff[int] = backoff_over_rows(lambda number: pairs[number].rows, apart=keeps_apart(module))
    for attempt in backoff.attempts(range(len(pairs))):
        differences: dict[int, float] = {}
        with attempt as pieces:
            for numbers in pieces:
                some = [pairs[number] for number in numbers]
                differences |= zip(
                    numbers, pair_differences(some, row_logprob_sums(module, some, objective)).tolist(), strict=True
                )
    return [differences[number] for number in range(len(pairs))]
