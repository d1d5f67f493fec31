"""The report of an update, and sums of metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Update:
    """The report of an update.

    Args:
        metrics: over the whole update: `loss`, `grad_norm` (before clipping), `tokens` and `rows` that trained, `seconds`;
            means over the tokens that the model read again (those with an advantage; all where a KL, an entropy bonus or a
            critic is in the loss): `entropy`, `ratio`, `clip_fraction`, `log_ratio_clamped`, `policy_kl` (to the policy before
            the update), `kl` (to the reference, where kl_coef > 0; where it is in the reward, over all tokens and before the
            update),
            `sampler_difference_mean` and its maximum `_max` (|sampler's - trainer's logprob|), `importance_outside` (the share
            with a ratio of trainer to sampler outside of [0.9, 1.1]), the mean `importance_weight`, `importance_truncated` (the
            share above the cap) and `effective_sample_size` of the weights (`UpdateLoss`, which applies them where
            `RunConfig.importance_method` says so); with a critic `value_loss`, and
            `explained_variance` before the update; with max_sampler_difference the number of episodes that were not used for
            it, `sampler_dropped`; with mask_truncated of those that a limit cut off, `truncated_dropped`. With
            max_staleness > 0 also `staleness`, in versions.
        steps: the same per optimizer step.
        advantages: by episode id, of the episodes that were used: the mean over its tokens.
        dropped: why a group was not used, or not all of its finished episodes, by slot.
        skipped: why the weights were left as they were; None where they were updated.
        bad: something was not finite; what is in memory may be spoiled, and the last checkpoint is to be loaded.
        costs: what it took of the machine: `tflops`, on a GPU `peak_memory_bytes` and `mfu` (see `training.update_cost`).
    """

    metrics: Metrics = field(default_factory=dict)
    steps: tuple[Metrics, ...] = ()
    advantages: Mapping[int, float] = field(default_factory=dict)
    dropped: Mapping[int, str] = field(default_factory=dict)
    skipped: str | None = None
    bad: bool = False
    costs: Metrics = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpdatePreview:
    """The first optimizer step of an update, of which nothing was kept.

    Args:
        update: what the update would have said of itself, had it ended after that step.
        after: `ratio`, `clip_fraction` and `policy_kl` of the same tokens with the weights that the step made.
        gradient: (P,) of the policy's trainable weights on the CPU, as far as max_grad_norm lets it; None without a step.
        blank: of `critic` and `optimizer` what had learned nothing yet.
    """

    update: Update
    after: Metrics = field(default_factory=dict)
    gradient: Tensor | None = None
    blank: tuple[str, ...] = ()


def add_up(parts: Iterable[Metrics]) -> dict[str, float]:
    """Return the sums of the parts by name; of what is called `_max` the greatest."""
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = max(sums.get(name, 0.0), value) if name.endswith("_max") else sums.get(name, 0.0) + value
    return sums
