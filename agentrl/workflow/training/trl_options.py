"""The translation of a run's options to those of TRL's `GRPOTrainer`; options that TRL lacks are refused. See
`training.trl_trainer`.

TRL is an extra (`trl`). This module works without it, so the command line can check a run before it writes anything. An
algorithm is identified by its advantage and loss functions. So a user's algorithm with the same functions is supported too.
"""

from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from agentrl.workflow.algorithms import Algorithm, find_gradient, gradients, resolve_options
from agentrl.workflow.config import AlgorithmConfig, RunConfig
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.installation import install_command
from agentrl.workflow.settings import settings

VERSION = "1.16.0"
"""The supported version of TRL. `rollout_func` is experimental, so another version may call it differently."""

CREDIT = "agentrl.workflow.training.advantages:relative_to_group"

_CLIPPED_LOSSES = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
LOSSES: Mapping[str, Mapping[str, str]] = {
    "agentrl.workflow.training.losses:clipped": _CLIPPED_LOSSES,
    "agentrl.workflow.training.losses:clipped_sequence_mean": _CLIPPED_LOSSES,
    "agentrl.workflow.training.losses:clipped_weight": {"token-mean": "cispo"},
    "agentrl.workflow.training.losses:soft_gate": {"seq-mean-token-mean": "sapo"},
}
"""For each surrogate, TRL's `loss_type` by aggregation."""


def check_run(config: RunConfig) -> None:
    """Refuse a run that TRL cannot train.

    If the run has a `broker_url`, the installation of TRL is not checked: the run's workers may have packages that this machine
    lacks. Raise ConfigError if TRL cannot train the run; the message has the reason.
    """
    check_trl(config)
    if not settings().broker_url:
        require_trl()


def require_trl() -> None:
    """Check that the supported version of TRL is installed. Raise ConfigError if TRL is missing, or has another version."""
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError as error:
        raise ConfigError("The trainer trl needs TRL, which is not installed here.", install_command("trl")) from error
    if version != VERSION:
        raise ConfigError(
            f"The trainer trl was made for TRL {VERSION}, and {version} is installed here.", install_command("trl")
        )


def check_trl(config: RunConfig) -> None:
    """Raise ConfigError, with the reason, if TRL's trainer does not support an option of the config."""
    refusal = next(_refusals(config), None)
    if refusal is not None:
        raise ConfigError(f"The trainer trl cannot do this: {refusal}.", "Leave that out, or take --trainer agentrl.")


def grpo_options(config: RunConfig) -> dict[str, Any]:
    """Return the options of the loss as fields of `trl.GRPOConfig`. The options of the KL are set in `training.trl_trainer`."""
    options, limits = resolve_options(config.algorithm), config.rollout
    fields = {
        "loss_type": _loss_type(options),
        "importance_sampling_level": "sequence" if _is_sequence_level(options) else "token",
        "scale_rewards": options.scale,
        "epsilon": options.clip_low,
        "epsilon_high": options.clip_high,
        "delta": options.dual_clip or None,
        "sapo_temperature_pos": options.tau_positive,
        "sapo_temperature_neg": options.tau_negative,
        "use_bias_correction_kl": options.kl_estimator == "k3-corrected",
        "entropy_coef": options.entropy_coef,
        "num_iterations": config.update.epochs,
        "max_grad_norm": config.update.max_grad_norm,
        "temperature": limits.temperature,
        "max_completion_length": limits.max_steps * limits.max_new_tokens,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _refusals(config: RunConfig) -> Iterator[str]:
    yield from _algorithm_refusals(resolve_options(config.algorithm))
    yield from _episode_refusals(config)
    update = config.update
    if update.batch_size is not None:
        yield "update.batch_size, since TRL's minibatches must be equal, and an iteration may lose groups"
    for name in ("max_kl", "max_sampler_difference"):
        if getattr(update, name) is not None:
            yield f"update.{name}, which TRL does not have"
    if update.mask_truncated:
        yield "update.mask_truncated, since TRL sees a limit only where a turn lacks its end token"
    if update.epochs > 1 and config.model.lora_dropout:
        yield "update.epochs above 1 with model.lora_dropout, which is on where TRL reads the policy before the update"
    if config.model.load_in_4bit or config.model.load_in_8bit:
        yield "a quantised base, whose adapters TRL rounds to bfloat16"


def _algorithm_refusals(options: AlgorithmConfig) -> Iterator[str]:
    if options.convention != "trl":
        yield f"algorithm.convention={options.convention}, since TRL supports only the convention trl"
    if _loss_type(options) is None:
        yield _no_loss(options)
    if options.kl_coef and (options.kl_in, options.kl_estimator[:2]) != ("loss", "k3"):
        yield f"algorithm.kl_in={options.kl_in} with {options.kl_estimator}, where TRL has a k3 in the loss"
    if options.kl_coef and options.kl_estimator == "k3-corrected" and _is_sequence_level(options):
        yield f"algorithm.kl_estimator=k3-corrected with {options.name}, where TRL multiplies it by the ratio of the whole row"
    if options.importance in ("truncate", "mask"):
        yield f"algorithm.importance={options.importance}, since TRL corrects for another sampler only with vLLM"
    if options.kl_target is not None:
        yield "algorithm.kl_target, since TRL's weight of the KL is constant"
    if options.entropy_coef and options.aggregation != "token-mean":
        yield f"algorithm.entropy_coef with aggregation={options.aggregation}, where TRL's bonus is a mean over tokens"


def _episode_refusals(config: RunConfig) -> Iterator[str]:
    if config.source.given:
        yield "stored episodes, whose ratio to their sampler TRL knows only from vLLM"
    if config.rollout.max_staleness:
        yield "rollout.max_staleness above 0, since TRL corrects for an older sampler only with vLLM"
    if config.rollout.group_size < 2:
        yield "rollout.group_size=1, since TRL compares the episodes of a group"


def _is_sequence_level(options: AlgorithmConfig) -> bool:
    return find_gradient(options.name).surrogate_of(options).endswith(":clipped_sequence_mean")


def _losses(algorithm: Algorithm, options: AlgorithmConfig) -> Mapping[str, str]:
    """Return TRL's `loss_type` for each aggregation of an algorithm; empty if TRL does not have the algorithm."""
    if algorithm.critic or algorithm.credit != CREDIT:
        return {}
    return LOSSES.get(algorithm.surrogate_of(options), {})


def _loss_type(options: AlgorithmConfig) -> str | None:
    return _losses(find_gradient(options.name), options).get(options.aggregation or "")


def _no_loss(options: AlgorithmConfig) -> str:
    algorithm = find_gradient(options.name)
    there = _losses(algorithm, options)
    if there:
        return f"algorithm.aggregation={options.aggregation} of {algorithm.name}, where TRL has {', '.join(there)}"
    names = [name for name, gradient in gradients().items() if _losses(gradient, options)]
    return f"the algorithm {algorithm.name}, where TRL's GRPOTrainer has {', '.join(names)}"
