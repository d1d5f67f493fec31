"""Algorithms: each file here defines an `Algorithm` (a credit function and a surrogate loss) or a `Search` for prompts.

The functions are given by name and not imported, so the command line can check a run's options without loading torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from agentrl.workflow.config import (
    ALGORITHM_OPTIONS,
    SEARCH_OPTIONS,
    AlgorithmConfig,
    CriticConfig,
    RunConfig,
    SearchConfig,
)
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.installation import install_command
from agentrl.workflow.plugins import find, names

ROUNDING = 1e-6
"""The largest difference between two machines in advantages that depend only on rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A training algorithm: how tokens get advantages, and which loss is minimised.

    Args:
        name: the file's name.
        credit: `module:function`: the rewards of an update's tokens -> their advantages (`training.advantages.Credit`).
        surrogate: `module:function`: a microbatch's tokens -> each token's loss (`training.losses.Surrogate`).
        needs_group: whether an episode is compared with the others of its group; a group of one then cannot train.
        critic: whether a value head is trained besides the policy.
        options: the options of `config.ALGORITHM_OPTIONS` that the algorithm reads, with their defaults.
        trl: the defaults that differ in TRL's convention; None if the option is not read there.
        trl_surrogate: the surrogate in TRL's convention, if it differs.
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
        """Return the surrogate's `module:function` in the config's convention."""
        return self.trl_surrogate if self.trl_surrogate and config.convention == "trl" else self.surrogate

    def options_in(self, convention: str) -> dict[str, Any]:
        """Return the options of `config.ALGORITHM_OPTIONS` that the algorithm reads in this convention, with their defaults."""
        own = {**self.options, **(self.trl if convention == "trl" else {})}
        return {name: value for name, value in own.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """An algorithm without gradients: it tries prompts in episodes, and may choose some (`workflow.search`).

    A user's class with a method `run` is a search too; the parameters of `run` are names of fields of `workflow.search.Given`.

    Args:
        name: the file's name.
        function: `module:function`.
        chooses: whether it chooses texts. It then gets separate tasks to choose by, and the choice is measured on others.
        options: the options of `config.SEARCH_OPTIONS` that the search reads, with their defaults.
        needs: the package that it needs, which is also the name of the extra; empty for none.
    """

    name: str
    function: str
    chooses: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""


def find_gradient(name: str) -> Algorithm:
    """Return the training algorithm with that name.

    Raises:
        ConfigError: there is no such algorithm, or it is a search.
    """
    algorithm = find("algorithms", name)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"The algorithm {name!r} changes prompts, not weights.", "Use one that trains, such as grpo.")
    return algorithm


def gradients() -> dict[str, Algorithm]:
    """Return the built-in training algorithms, by name."""
    algorithms = {name: find("algorithms", name) for name in names("algorithms")}
    return {name: algorithm for name, algorithm in algorithms.items() if isinstance(algorithm, Algorithm)}


def searches(algorithm: Any) -> bool:
    """Return whether a loaded algorithm is a search."""
    return isinstance(algorithm, Search) or (not isinstance(algorithm, Algorithm) and callable(getattr(algorithm, "run", None)))


def search_function(algorithm: Any) -> Callable[..., Any]:
    """Return the function of a search.

    Raises:
        ConfigError: its package is not installed, or its class cannot be made without arguments.
    """
    if not isinstance(algorithm, Search):
        try:
            own: Callable[..., Any] = (algorithm() if isinstance(algorithm, type) else algorithm).run
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise ConfigError(f"Cannot create the algorithm {algorithm.__name__!r} without arguments: {problem}.") from error
        return own
    module, _, name = algorithm.function.partition(":")
    try:
        function: Callable[..., Any] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if not algorithm.needs or error.name != algorithm.needs:
            raise
        raise ConfigError(
            f"{algorithm.name} needs the package {algorithm.needs!r}.", install_command(algorithm.needs)
        ) from error
    return function


def resolve_search(config: RunConfig) -> RunConfig:
    """Return the config of a search run with the algorithm's defaults filled in.

    Raises:
        ConfigError: an option is set that has no effect in such a run.
    """
    algorithm, search = find("algorithms", config.algorithm.name), config.search
    name = getattr(algorithm, "name", config.algorithm.name)
    untouched = RunConfig()
    for section in ("update", "critic", "source"):
        if getattr(config, section) != getattr(untouched, section):
            raise ConfigError(f"{section}.* has no effect with {name}: it changes no weights.", "Leave it out.")
    if config.algorithm.model_copy(update={"name": "grpo"}) != untouched.algorithm:
        raise ConfigError(f"Only algorithm.name has an effect with {name}.", "Its options are search.*: agentrl config show")
    for key, instead in (("group_size", "search.group_size"), ("max_staleness", ""), ("dynamic_sampling", "")):
        value = getattr(config.rollout, key)
        if value not in (getattr(untouched.rollout, key), search.group_size if instead else None):
            raise ConfigError(f"rollout.{key} has no effect with {name}.", f"Set {instead}." if instead else "Leave it out.")
    if config.iterations is not None or config.epochs not in (untouched.epochs, 1):
        raise ConfigError(f"{name} sets its own length.", "Leave epochs and iterations out.")
    options = _search_options(algorithm, name, search)
    rollout = config.rollout.model_copy(update={"group_size": search.group_size})
    return config.model_copy(update={"epochs": 1, "rollout": rollout, "search": search.model_copy(update=options)})


def _search_options(algorithm: Any, name: str, search: SearchConfig) -> dict[str, Any]:
    if not isinstance(algorithm, Search):
        return {}
    options = {key: getattr(search, key) for key in SEARCH_OPTIONS if getattr(search, key) is not None}
    if not algorithm.chooses:
        options |= {
            key: 0 for key in ("choose_tasks", "held_out_tasks") if getattr(search, key) != getattr(SearchConfig(), key)
        }
    for key in options:
        if key not in algorithm.options:
            takes = ", ".join(f"search.{option}" for option in algorithm.options) or "none of them"
            raise ConfigError(f"search.{key} has no effect with {name}.", f"It takes {takes}.")
    return {**algorithm.options, **options}


def resolve_options(config: AlgorithmConfig) -> AlgorithmConfig:
    """Return the options with the algorithm's defaults filled in. Resolving them again changes nothing.

    Raises:
        ConfigError: there is no such algorithm, or an option is set that it does not read.
    """
    algorithm = find_gradient(config.name)
    own = algorithm.options_in(config.convention)
    options = {name: getattr(config, name) for name in ALGORITHM_OPTIONS if getattr(config, name) is not None}
    for name in options:
        if name not in own:
            takes = ", ".join(sorted(own)) or "no options of its own"
            raise ConfigError(f"algorithm.{name} has no effect with {algorithm.name}.", f"It takes {takes}.")
    return config.model_copy(update={**own, **options})


def _check_dual_clip(chosen: AlgorithmConfig) -> None:
    highest = 1 + (chosen.clip_high or 0.0)
    if chosen.dual_clip and chosen.dual_clip <= highest:
        raise ConfigError(
            f"algorithm.dual_clip={chosen.dual_clip:g} must be above 1 + clip_high = {highest:g}.",
            f"Set algorithm.dual_clip above {highest:g}, or to 0 for none.",
        )


def resolve_run(config: RunConfig) -> RunConfig:
    """Return a training run's config with the algorithm's defaults filled in.

    Raises:
        ConfigError: see `resolve_options`. Also: a critic's option without a critic, a dual clip within the other clip, or
            groups of one for an algorithm that compares within groups.
    """
    algorithm = find_gradient(config.algorithm.name)
    if config.search != SearchConfig():
        raise ConfigError(
            f"search.* has no effect with {algorithm.name}.", "It is only for prompt searches such as apo and gepa."
        )
    options = resolve_options(config.algorithm)
    _check_dual_clip(options)
    if not algorithm.critic and config.critic != CriticConfig():
        raise ConfigError(f"critic.* has no effect with {algorithm.name}: it has no critic.", "Leave it out, or use ppo.")
    if algorithm.needs_group and config.rollout.group_size < 2 and not config.source.given:
        raise ConfigError(
            f"{algorithm.name} compares the episodes of a group, so a group of one cannot train.",
            "Set --group-size to 2 or more.",
        )
    return config.model_copy(update={"algorithm": options})


def credits_alike(options: AlgorithmConfig, advantages: Mapping[int, float], recorded: Mapping[int, float]) -> bool:
    """Return whether a recomputed update gives its episodes the recorded advantages, by episode id.

    Advantages may differ by 1e-6, as between two machines. If they depend on the model's outputs, through a critic's values or
    a KL in the reward, only the sets of episodes are compared. Other machines round logprobs and values differently (1e-7 to
    1e-6 in float32, 2e-3 to 7e-3 in bfloat16), and whitening by a small deviation multiplies the difference by up to 1e4.
    """
    algorithm = find_gradient(options.name)
    if advantages.keys() != recorded.keys():
        return False
    of_the_model = algorithm.critic or options.kl_in == "reward"
    return of_the_model or all(abs(advantages[episode] - recorded[episode]) <= ROUNDING for episode in recorded)
