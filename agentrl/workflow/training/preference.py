"""Direct preference optimisation on pairs of episodes of a group. The better episode becomes more likely than the worse one.

Rafailov et al. 2023, arXiv 2305.18290. The implicit reward of an episode is beta x (its logprob under the policy - its logprob
under the reference). A logprob is summed over the tokens that the episode sampled itself. There are two references:

- "start": the weights that the training starts from. They score all pairs once, and the margin begins at 0.
- "sampler": the logprobs that are stored with the tokens. The two episodes of a pair may then have different references.

The metric `margin` is the mean, over the pairs, of the difference between the two implicit rewards. `accuracy` is the share of
pairs with a margin above 0.
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
from agentrl.workflow.training.ranks import ALONE, Ranks
from agentrl.workflow.training.training_rows import Row
from agentrl.workflow.trajectory import Episode

Reference = Literal["start", "sampler"]
REFERENCES: tuple[Reference, ...] = ("start", "sampler")

PASSES = 3
"""The default number of passes over the pairs."""

EMPTY = "nothing sampled"
"""The reason for leaving out a pair in which an episode sampled no tokens."""


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two episodes of one group: their training rows, and the reference's logprobs.

    Args:
        chosen: the rows of the better episode.
        rejected: the rows of the worse episode.
        reference: the logprob of the chosen episode's sampled tokens minus that of the rejected episode's, both under the
            reference, in nats.
    """

    chosen: tuple[Row, ...]
    rejected: tuple[Row, ...]
    reference: float = 0.0

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows of the pair: those of the chosen episode, then those of the rejected one."""
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
    ranks: Ranks = ALONE,
) -> TrainedModel:
    """Train a run's model to prefer the first episode of each pair to the second, and save the model.

    Args:
        pairs: the selected pairs (`stats.best_episodes.select_pairs`), of one base and temperature.
        start: the model and the weights that learn.
        target: the model folder to make.
        beta: the factor of the implicit reward. With a smaller one the policy moves further from the reference.
        reference: "start" or "sampler", see the module.
        recipe: None: `PASSES` passes over the pairs at a learning rate of 1e-4.
        overwrite: whether an existing target is replaced.
        save_every: the number of steps from one checkpoint to the next; see `offline_checkpoint.Resumable`.
        ranks: the ranks that train together. All of them call this function with the same arguments, except the device.

    Raises:
        ConflictError: the target exists, and `overwrite` is False.
        StateError: no pair has sampled tokens in both episodes.
        ConfigError: beta is not above 0, or the recipe's optimizer does not work here.
        ModelError, CheckpointError: see `training.offline_training.load_learner` and `train`.
    """
    refuse_existing(target, overwrite)
    if not 0 < beta < float("inf"):
        raise ConfigError(f"beta must be above 0, not {beta:g}.", "0.1 is customary.")
    chosen, rejected = (rows_by_episode(side) for side in zip(*pairs, strict=True)) if pairs else ([], [])
    both = [
        (ids, PreferencePair(*rows)) for ids, rows in zip(pairs, zip(chosen, rejected, strict=True), strict=True) if all(rows)
    ]
    if not both:
        raise StateError(
            f"None of {len(pairs)} pairs has sampled tokens in both episodes.", "See the episodes: agentrl episodes RUN"
        )
    recipe = recipe or recipe_for(len(both), PASSES, 1e-4)
    check_optimizer(recipe.optimizer, pick_device(device))
    learner = load_learner(start, device, threads)
    examples = [pair for _, pair in both]
    objective = preference_objective(beta, start.temperature)
    differences = (
        sampler_differences(examples)
        if reference == "sampler"
        else model_differences(learner.module, examples, objective, ranks)
    )
    examples = [PreferencePair(pair.chosen, pair.rejected, value) for pair, value in zip(examples, differences, strict=True)]
    ids = [[better.id, worse.id] for (better, worse), _ in both]
    source = start.record("dpo") | {"beta": beta, "reference": reference, "pairs": ids}
    key = training_key(learner, recipe, source, [pair.rows for pair in examples])
    with open_resumable(target, key, save_every, overwrite, ranks=ranks) as resumable:
        metrics = train(learner.module, examples, recipe, objective, progress, resumable=resumable, ranks=ranks)
        trained_model = TrainedModel(target, recipe, len(both), +Counter({EMPTY: len(pairs) - len(both)}), metrics)
        return save(learner, trained_model, source, ranks)


def dpo_loss(difference: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair, and the margin between its two implicit rewards; both (N,).

    The loss is -log sigmoid(margin), margin = beta x ((lp_chosen - ref_chosen) - (lp_rejected - ref_rejected)). Source: arXiv
    2305.18290, equation 7.

    Args:
        difference: (N,), lp_chosen - lp_rejected: the policy's logprobs, in nats.
        reference: (N,), ref_chosen - ref_rejected: the reference's logprobs, in nats, without a gradient.
        beta: the factor of the implicit reward, above 0.
    """
    margin = beta * (difference - reference)
    return -logsigmoid(margin), margin


def preference_objective(beta: float, temperature: float = 1.0) -> Objective[PreferencePair]:
    """Return the objective of DPO: the mean of `dpo_loss` over a batch's pairs."""

    def terms(pairs: Sequence[PreferencePair], logprobs: Sequence[Tensor]) -> dict[str, Tensor]:
        difference = pair_differences(pairs, logprobs)
        loss, margin = dpo_loss(difference, difference.new_tensor([pair.reference for pair in pairs]), beta)
        margin = margin.detach()
        return {"loss": loss.sum(), "accuracy": (margin > 0).sum(), "margin": margin.sum()}

    return Objective(rows=lambda pair: pair.rows, weight=lambda pair: 1.0, terms=terms, temperature=temperature)


def pair_differences(pairs: Sequence[PreferencePair], logprobs: Sequence[Tensor]) -> Tensor:
    """Return (N,): for each pair, the logprob of its chosen rows minus that of its rejected rows, in nats.

    Args:
        logprobs: for each pair, the logprobs of its rows, in the order of `PreferencePair.rows`.
    """
    return torch.stack(
        [rows[: len(pair.chosen)].sum() - rows[len(pair.chosen) :].sum() for pair, rows in zip(pairs, logprobs, strict=True)]
    )


def sampler_differences(pairs: Sequence[PreferencePair]) -> list[float]:
    """Return (N,): for each pair, the chosen logprob minus the rejected one, in nats, as the sampler recorded them."""
    return [_recorded_logprob(pair.chosen) - _recorded_logprob(pair.rejected) for pair in pairs]


def _recorded_logprob(rows: Sequence[Row]) -> float:
    return sum(value for row in rows for value, own in zip(row.behavior_logprobs, row.loss_mask, strict=True) if own)


@torch.no_grad()
def model_differences(
    module: nn.Module, pairs: Sequence[PreferencePair], objective: Objective[PreferencePair], ranks: Ranks = ALONE
) -> list[float]:
    """Compute (N,): for each pair, chosen minus rejected logprob in nats, without dropout.

    Each rank reads some of the pairs, and all get the values of all pairs.
    """
    module.eval()
    backoff: OomBackoff[int] = backoff_over_rows(lambda number: pairs[number].rows, apart=keeps_apart(module))
    for attempt in backoff.attempts(ranks.deal(range(len(pairs)), lambda number: objective.tokens(pairs[number]))):
        differences: dict[int, float] = {}
        with attempt as pieces:
            for numbers in pieces:
                ranks.report_progress()
                some = [pairs[number] for number in numbers]
                differences |= zip(
                    numbers, pair_differences(some, row_logprob_sums(module, some, objective)).tolist(), strict=True
                )
    values = torch.tensor([differences.get(number, 0.0) for number in range(len(pairs))], dtype=torch.float64)
    return list(ranks.add_values(values).tolist())
