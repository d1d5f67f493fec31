"""Algorithms. Each file of this folder defines an `Algorithm` (a credit function and a surrogate loss) or a `Search` for
prompts.

The functions are given by name and are not imported, so the command line can check a run's options without loading torch.
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
        credit: `module:function` of a function from the rewards of an update's tokens to their advantages
            (`training.advantages.Credit`).
        surrogate: `module:function` of a function from a microbatch's tokens to the loss of each token
            (`training.losses.Surrogate`).
        needs_group: True if an episode is compared with the other episodes of its group. A group with one episode then cannot
            train.
        critic: True if a value head is trained in addition to the policy.
        options: the options of `config.ALGORITHM_OPTIONS` that the algorithm uses, with their defaults.
        trl: the defaults that differ in TRL's convention. None means that the option is not used in this convention.
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
        """Return the options of `config.ALGORITHM_OPTIONS` that the algorithm uses in this convention, with their defaults."""
        own = {**self.options, **(self.trl if convention == "trl" else {})}
        return {name: value for name, value in own.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """An algorithm without gradients. It tries prompts in episodes, and may choose the best ones (`workflow.search`).

    A user's class with a method `run` is a search too. The parameters of `run` are names of fields of `workflow.search.Given`.

    Args:
        name: the file's name.
        function: `module:function`.
        chooses: True if the search chooses texts. The search then chooses by the rewards on separate tasks, and the chosen
            texts are measured on other tasks.
        options: the options of `config.SEARCH_OPTIONS` that the search uses, with their defaults.
        needs: the package that the search needs, which is also the name of the extra; empty if it needs none.
    """

    name: str
    function: str
    chooses: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""


def find_gradient(name: str) -> Algorithm:
    """Return the training algorithm with this name. Raise ConfigError if the algorithm does not exist, or is a search."""
    algorithm = find("algorithms", name)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"The algorithm {name!r} changes prompts, not weights.", "Use one that trains, such as grpo.")
    return algorithm


def gradients() -> dict[str, Algorithm]:
    """Return the built-in training algorithms, by name."""
    algorithms = {name: find("algorithms", name) for name in names("algorithms")}
    return {name: algorithm for name, algorithm in algorithms.items() if isinstance(algorithm, Algorithm)}


def searches(algorithm: Any) -> bool:
    """Return True if a loaded algorithm is a search."""
    return isinstance(algorithm, Search) or (not isinstance(algorithm, Algorithm) and callable(getattr(algorithm, "run", None)))


def search_function(algorithm: Any) -> Callable[..., Any]:
    """Return a search's function. Raise ConfigError if a package that the search needs is missing, or if the search's class
    cannot be instantiated.
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
    """Return the config of a search run, in which unset options have the algorithm's defaults. Raise ConfigError if an option
    is set that has no effect in such a run.
    """
    algorithm, search = find("algorithms", config.algorithm.name), config.search
    name = getattr(algorithm, "name", config.algorithm.name)
    untouched = RunConfig()
    for section in ("update", "critic", "source"):
        if getattr(config, section) != getattr(untouched, section):
            raise ConfigError(f"{section}.* has no effect with {name}: it changes no weights.", "Leave it out.")
    if config.algorithm.model_copy(update={"name": "grpo"}) != untouched.algorithm:
        message = f"With {name}, no option algorithm.* has an effect except algorithm.name."
        raise ConfigError(message, f"The options of {name} are search.*: agentrl config show")
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
            raise ConfigError(f"search.{key} has no effect with {name}.", f"{name} takes {takes}.")
    return {**algorithm.options, **options}


def resolve_options(config: AlgorithmConfig) -> AlgorithmConfig:
    """Return the options, in which unset options have the algorithm's defaults. The function is idempotent. Raise ConfigError
    if the algorithm does not exist, or an option is set that the algorithm does not use.
    """
    algorithm = find_gradient(config.name)
    own = algorithm.options_in(config.convention)
    options = {name: getattr(config, name) for name in ALGORITHM_OPTIONS if getattr(config, name) is not None}
    for name in options:
        if name not in own:
            takes = ", ".join(sorted(own)) or "no options of its own"
            raise ConfigError(f"algorithm.{name} has no effect with {algorithm.name}.", f"{algorithm.name} takes {takes}.")
    return config.model_copy(update={**own, **options})


def _check_dual_clip(chosen: AlgorithmConfig) -> None:
    highest = 1 + (chosen.clip_high or 0.0)
    if chosen.dual_clip and chosen.dual_clip <= highest:
        raise ConfigError(
            f"algorithm.dual_clip={chosen.dual_clip:g} must be above 1 + clip_high = {highest:g}.",
            f"Set algorithm.dual_clip above {highest:g}, or to 0 for none.",
        )


def resolve_run(config: RunConfig) -> RunConfig:
    """Return the config of a training run, in which unset options have the algorithm's defaults.

    Raises:
        ConfigError: see `resolve_options`. Also: an option of the critic is set but the algorithm has no critic, `dual_clip`
            is not above 1 + `clip_high`, or groups have one episode although the algorithm compares episodes within a group.
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
    """Return True if the advantages of a recomputed update equal the recorded ones. Both are given by episode id.

    Two advantages may differ by 1e-6, because machines round differently. If the advantages depend on the model's outputs,
    through a critic's values or a KL in the reward, only the sets of episodes are compared. Machines round logprobs and values
    differently (1e-7 to 1e-6 in float32, 2e-3 to 7e-3 in bfloat16), and whitening by a small deviation multiplies the
    difference by up to 1e4.
    """
    algorithm = find_gradient(options.name)
    if advantages.keys() != recorded.keys():
        return False
    of_the_model = algorithm.critic or options.kl_in == "reward"
    return of_the_model or all(abs(advantages[episode] - recorded[episode]) <= ROUNDING for episode in recorded)
