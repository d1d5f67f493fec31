"""Counterfactual updates: other algorithms on the same episodes and the same weights. Nothing is stored.

Each algorithm computes advantages for the episodes, and takes one step on all of them. The step starts from exactly the
weights, critic and optimizer state that the run's own update started from. The step is measured and undone. Before the step,
every ratio is 1 by definition, so the effect of a clip is visible only after the step. (In a run on stored episodes, the ratio
compares with the policy that sampled them, so it may differ from 1 before the step.)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import fsum, isfinite, nan, sqrt

import torch
from torch import Tensor

from agentrl.workflow import checkpoints
from agentrl.workflow.config import AlgorithmConfig, RunConfig
from agentrl.workflow.errors import BrokenCheckpoint
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.reports import Metrics, UpdatePreview
from agentrl.workflow.training.trainer import Trainer
from agentrl.workflow.trajectory import Group, PolicyRef

CHUNK = 1 << 20
"""The number of elements of two gradients that are multiplied at a time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The results of one algorithm on the episodes.

    Args:
        own: True if this is the run's own algorithm, not an alternative.
        skipped: why the algorithm takes no step; None if it takes one.
        advantages: the mean advantage over an episode's tokens, by episode id.
        spread: the unbiased standard deviation of the advantages; None for fewer than two advantages.
        zero: the share of advantages that are 0; None if there are no advantages.
        correlation: Pearson's correlation with the advantages of the run's own algorithm, over the episodes that have both;
            None if the advantages of one algorithm are all equal.
        start: the metrics of the update (`training.reports.Update`) before the step: `loss`, `grad_norm`, ...
        cosine: the cosine between the policy's gradient and that of the run's own algorithm; None if one of the two is missing
            or 0.
        after: `ratio`, `clip_fraction` and `policy_kl` of the same tokens after the step.
        blank: which of the parts `critic` and `optimizer` have not been trained yet.
    """

    options: AlgorithmConfig
    own: bool
    skipped: str | None
    advantages: Mapping[int, float]
    spread: float | None
    zero: float | None
    correlation: float | None
    start: Metrics
    cosine: float | None
    after: Metrics
    blank: tuple[str, ...]


def whatif(
    policy: Policy,
    configs: Sequence[RunConfig],
    start: PolicyRef,
    borrowed: bool,
    groups: Sequence[Group],
    iteration: int,
    iterations: int,
) -> Iterator[Finding]:
    """Repeat the update with each of the configs, and yield the results for each. The first config is that of the run.

    Args:
        policy: the run's base model. The function leaves its trained weights at those of `start`.
        start: the checkpoint that the update started from.
        borrowed: True if `start` is a checkpoint of another run.
        groups: the groups that the update trained on.
        iteration: the number of the update's iteration.
        iterations: the run's number of iterations.

    Raises:
        CheckpointError: the checkpoint is missing or incomplete.
        InfraError, RewardError: see `Trainer.update`.
    """
    own: UpdatePreview | None = None
    for config in configs:
        trainer = _load_start(Trainer(policy, config, iterations), start, borrowed)
        look = trainer.preview(groups, iteration)
        first = own is None
        own = own or look
        yield _finding(config.algorithm, first, look, own)


def _load_start(trainer: Trainer, start: PolicyRef, borrowed: bool) -> Trainer:
    if not start.path:
        trainer.load(None)
    elif borrowed:
        checkpoints.read(start.path, start.sha256, "start", partial(trainer.load, fresh=True))
    else:
        try:
            checkpoints.read(start.path, start.sha256, "all", trainer.load_partial)
        except BrokenCheckpoint:  # a URL's may lack the optimizer's state alone
            checkpoints.read(start.path, start.sha256, "start", trainer.load_partial)
    return trainer


def _finding(options: AlgorithmConfig, is_own: bool, look: UpdatePreview, own: UpdatePreview) -> Finding:
    update, advantages = look.update, look.update.advantages
    values = torch.tensor(list(advantages.values()), dtype=torch.float64)
    both = [episode for episode in advantages if episode in own.update.advantages]
    sides = [torch.tensor([of[episode] for episode in both], dtype=torch.float64) for of in (advantages, own.update.advantages)]
    return Finding(
        options=options,
        own=is_own,
        skipped=update.skipped,
        advantages=advantages,
        spread=float(values.std()) if len(values) > 1 else None,
        zero=float((values == 0).double().mean()) if len(values) else None,
        correlation=_cosine(*(side - side.mean() for side in sides)) if len(both) > 1 else None,
        start=update.metrics,
        cosine=None if look.gradient is None or own.gradient is None else _cosine(look.gradient, own.gradient),
        after=look.after,
        blank=look.blank,
    )


def _cosine(one: Tensor, other: Tensor) -> float | None:
    cosine = _dot(one, other) / sqrt(squares) if (squares := _dot(one, one) * _dot(other, other)) > 0 else nan
    return cosine if isfinite(cosine) else None


def _dot(one: Tensor, other: Tensor) -> float:
    """Return the dot product in float64, in chunks: all weights in float64 would need too much memory."""
    parts = (slice(start, start + CHUNK) for start in range(0, len(one), CHUNK))
    return fsum(float(one[part].double() @ other[part].double()) for part in parts)
