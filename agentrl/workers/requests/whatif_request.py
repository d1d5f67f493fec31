"""Checks a request of `agentrl whatif`, which compares algorithms and their options on a past update. Nothing is written and no
model is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.algorithms import Algorithm, find_gradient, resolve_run
from agentrl.workflow.config import ALGORITHM_OPTIONS, RunConfig, build
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.experiment import Experiment
from agentrl.workflow.resolve import parse_assignments
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.reads.provenance import UpdateInputs, load_update_inputs
from agentrl.workflow.store.run_format import check_format

PLAIN_UPDATE = {"update.batch_size": None, "update.epochs": 1, "update.max_kl": None, "update.trainer": "agentrl"}
"""Config values that replace those of the run, so that agentrl's trainer makes one optimizer step on all episodes."""

REFUSED_KEYS = {
    "name": "use --algorithm",
    "convention": "use --convention",
    "kl_target": "it acts after an update",
    "kl_horizon": "it acts after an update",
}
"""The keys of `algorithm` that have no effect in a what-if, each with the reason."""


@dataclass(frozen=True)
class WhatIfRequest:
    """A past update, and the configs that are compared on this update. The first config is that of the update's run.

    `options` has, for each given config key, the names of the algorithms that use it.
    """

    past: UpdateInputs
    configs: Sequence[RunConfig]
    options: Mapping[str, Sequence[str]]


def prepare_whatif(
    db: Database,
    run: str,
    iteration: int | None,
    algorithms: Sequence[str],
    convention: str | None,
    assignments: Sequence[str],
) -> WhatIfRequest:
    """Check the request, and load the past update and the configs to compare. Each of the `assignments` (`algorithm.KEY=VALUE`)
    applies to the algorithms that have the key. Raise ConfigError if an algorithm does not exist, or an option has no effect
    with any of the algorithms. Raise NotFoundError, StateError or CheckpointError as `load_update_inputs` does.
    """
    names = list(dict.fromkeys(algorithms))
    plugins = [find_gradient(name) for name in names]
    values = parse_assignments(assignments)
    past = load_update_inputs(db, run, iteration)
    check_format(past.run["name"], past.run["format"], "compute updates of")
    config = Experiment.load(past.run["config"]).config
    _refuse_ignored(values, config)
    own_convention = convention or config.algorithm.convention
    takers = {key: [algorithm.name for algorithm in plugins if _has_option(algorithm, key, own_convention)] for key in values}
    for key, algorithm_names in takers.items():
        if not algorithm_names:
            takes = "; ".join(
                f"{algorithm.name} takes {', '.join(sorted(algorithm.options_in(own_convention)))}" for algorithm in plugins
            )
            raise ConfigError(f"{key} has no effect with {', '.join(names)}.", f"{takes}.")
    own = resolve_run(build(config.flat() | PLAIN_UPDATE))
    others = [
        _variant_config(own, name, algorithm, own_convention, values) for name, algorithm in zip(names, plugins, strict=True)
    ]
    return WhatIfRequest(past, [own, *(other for other in others if other != own)], takers)


def _refuse_ignored(values: Mapping[str, Any], config: RunConfig) -> None:
    for key in values:
        section, _, leaf = key.partition(".")
        if section != "algorithm":
            raise ConfigError(f"{key} cannot change: whatif changes only the algorithm.", "Pass keys of `algorithm`.")
        if leaf in REFUSED_KEYS:
            raise ConfigError(f"{key} has no effect in a what-if.", f"{REFUSED_KEYS[leaf]}.")
        if leaf.startswith("importance_") and not config.rollout.max_staleness:
            raise ConfigError(f"{key} has no effect: this run has rollout.max_staleness=0.", "Leave it out.")


def _has_option(algorithm: Algorithm, key: str, convention: str) -> bool:
    leaf = key.partition(".")[2]
    return leaf not in ALGORITHM_OPTIONS or leaf in algorithm.options_in(convention)


def _variant_config(own: RunConfig, name: str, algorithm: Algorithm, convention: str, values: Mapping[str, Any]) -> RunConfig:
    """Return the run's config with another algorithm and its options. Values that all algorithms share are unchanged."""
    flat = own.flat()
    if (name, convention) != (own.algorithm.name, own.algorithm.convention):
        flat |= {f"algorithm.{key}": None for key in ALGORITHM_OPTIONS}
    flat |= {"algorithm.name": name, "algorithm.convention": convention}
    if not algorithm.critic:
        flat = {key: value for key, value in flat.items() if not key.startswith("critic.")}
    if "algorithm.kl_coef" in values:  # the chosen weight, not the one that the run has adapted
        flat |= {"algorithm.kl_target": None, "algorithm.kl_horizon": None}
    return resolve_run(build(flat | {key: value for key, value in values.items() if _has_option(algorithm, key, convention)}))
