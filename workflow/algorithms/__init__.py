"""Algorithms: a file here names how tokens are credited and what is minimised. See `Algorithm`.

It only names them, so that the command line can check a run's options without loading torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.workflow.config import ALGORITHM_OPTIONS, AlgorithmConfig, CriticConfig, RunConfig
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.plugins import find

ROUNDING = 1e-6
"""Advantages that are made of rewards alone differ by less between two machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """How to credit and what to minimise.

    Args:
        name: the file's name.
        credit: `module:function` of what the tokens of an update earned -> their advantages (`training.advantages.Credit`).
        surrogate: `module:function` of a microbatch's tokens -> each token's loss (`training.losses.Surrogate`).
        needs_group: whether an episode is compared with the others of its group, so that a group of one teaches nothing.
        critic: whether a value head is trained beside the policy.
        options: those those of `config.ALGORITHM_OPTIONS` that it reads, and their values where a run names none.
        trl: of these, what is another value in TRL's convention; None: not read there.
        trl_surrogate: in TRL's convention, where it is another.
    """

    name: str
    credit: str
    surrogate: str
    needs_group: bool = False
    critic: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    trl: Mapping[str, Any] = field(default_factory=dict)
    trl_surrogate: str | None = None

    def surrogate_of(self, config: AlgorithmConfig) -> str:
        """`module:function` of the convention."""
        return self.trl_surrogate if self.trl_surrogate and config.convention == "trl" else self.surrogate

    def options_in(self, convention: str) -> dict[str, Any]:
        """What it reads of `config.ALGORITHM_OPTIONS` in the convention, and their values where a run names none."""
        own = {**self.options, **(self.trl if convention == "trl" else {})}
        return {name: value for name, value in own.items() if value is not None}


def settle_options(config: AlgorithmConfig) -> AlgorithmConfig:
    """The options with the algorithm's own values where none was named. Settled ones stay as they are.

    Raises:
        ConfigError: no such algorithm, or one was named that it does not read.
    """
    algorithm: Algorithm = find("algorithms", config.name)
    own = algorithm.options_in(config.convention)
    given = {name: getattr(config, name) for name in ALGORITHM_OPTIONS if getattr(config, name) is not None}
    for name in given:
        if name not in own:
            takes = ", ".join(sorted(own)) or "no options of its own"
            raise ConfigError(f"algorithm.{name} does nothing with {algorithm.name}.", f"It takes {takes}.")
    return config.model_copy(update={**own, **given})


def _check_dual_clip(chosen: AlgorithmConfig) -> None:
    highest = 1 + (chosen.clip_high or 0.0)
    if chosen.dual_clip and chosen.dual_clip <= highest:
        raise ConfigError(
            f"algorithm.dual_clip={chosen.dual_clip:g} is not above 1 + clip_high, {highest:g}, where the other clip ends.",
            f"Set algorithm.dual_clip above {highest:g}, or to 0, which is none.",
        )


def settle_run(config: RunConfig) -> RunConfig:
    """A training run's config with the algorithm's own values where none was named.

    Raises:
        ConfigError: as `settle_options`; a critic's option without one, a dual clip within the other, or a group of one where
            it compares within groups.
    """
    algorithm: Algorithm = find("algorithms", config.algorithm.name)
    options = settle_options(config.algorithm)
    _check_dual_clip(options)
    if not algorithm.critic and config.critic != CriticConfig():
        raise ConfigError(f"critic.* does nothing with {algorithm.name}: it has no critic.", "Leave it out, or take ppo.")
    if algorithm.needs_group and config.rollout.group_size < 2 and not config.source.given:
        raise ConfigError(
            f"{algorithm.name} compares the episodes of a group, and a group of one has nobody to compare with.",
            "Set --group-size to 2 or more.",
        )
    return config.model_copy(update={"algorithm": options})


def credits_alike(options: AlgorithmConfig, advantages: Mapping[int, float], recorded: Mapping[int, float]) -> bool:
    """Whether an update that was computed again credits its episodes as it did, by their ids.

    Also on another machine: 1e-6 apart at most. Where the model's own words are in the advantages, a critic's values or a KL in
    the reward, only the episodes are compared: logprobs and values are rounded otherwise there (1e-7 to 1e-6 in float32, 2e-3
    to 7e-3 in bfloat16), and whitening by a small deviation multiplies that by up to 1e4.
    """
    algorithm: Algorithm = find("algorithms", options.name)
    if advantages.keys() != recorded.keys():
        return False
    of_the_model = algorithm.critic or options.kl_in == "reward"
    return of_the_model or all(abs(advantages[episode] - recorded[episode]) <= ROUNDING for episode in recorded)
