"""The report of an update, and sums of metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Update:
    """The report of an update.

    Args:
        metrics: metrics of the complete update. They are `loss`, `grad_norm` (before clipping), `tokens` and `rows` (the
            numbers that trained), and `seconds`. Means over the tokens that the model read again (those with an advantage; all
            of them if the loss has a KL, an entropy bonus or a critic): `entropy`, `ratio`, `clip_fraction`,
            `log_ratio_clamped`, `policy_kl` (to the policy before the update), `kl` (to the reference, if kl_coef > 0; if it is
            in the reward, over all tokens and before the update), `sampler_difference_mean` and its maximum `_max` (|sampler's
            - trainer's logprob|), `importance_outside` (the share with a ratio of trainer to sampler outside of [0.9, 1.1]),
            `importance_weight`, `importance_truncated` (the share above the cap) and `effective_sample_size` of the weights
            (`UpdateLoss` applies the weights if `RunConfig.importance_method` says so). With a critic: `value_loss`, and
            `explained_variance` before the update. With max_sampler_difference: `sampler_dropped`, the number of episodes that
            were not used because of it. With mask_truncated: `truncated_dropped`, the number of episodes that a limit cut off.
            With max_staleness > 0: `staleness`, in versions.
        steps: the same metrics per optimizer step.
        advantages: the mean advantage over an episode's tokens, by the id of each used episode.
        dropped: by the group's `slot`, the reason why the group, or some of its finished episodes, were not used.
        skipped: the reason why the weights were not updated; None if they were.
        bad: whether a value was not finite. The weights in memory may then be wrong, and the caller loads the last checkpoint.
        costs: the cost of the update: `tflops` and, on a GPU, `peak_memory_bytes` and `mfu` (see `training.update_cost`).
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
    """The report of an update's first optimizer step, which was undone.

    Args:
        update: the report as if the update had ended after that step.
        after: `ratio`, `clip_fraction` and `policy_kl` of the same tokens with the weights after the step.
        gradient: (P,), the gradient of the policy's trainable weights on the CPU, clipped to max_grad_norm; None without a
            step.
        blank: the parts that have not been trained yet: `critic`, `optimizer`, both or none.
    """

    update: Update
    after: Metrics = field(default_factory=dict)
    gradient: Tensor | None = None
    blank: tuple[str, ...] = ()


def add_up(parts: Iterable[Metrics]) -> dict[str, float]:
    """Combine the metrics of several parts by name: the maximum if the name ends in `_max`, else the sum."""
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = max(sums.get(name, 0.0), value) if name.endswith("_max") else sums.get(name, 0.0) + value
    return sums
