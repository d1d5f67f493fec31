"""What a run is like that measures a policy: one iteration with all of its tasks, no update; else as the run it measures."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from agentrl.workflow.config import RunConfig, build, flatten
from agentrl.workflow.datasets import load_tasks
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.tool_formats import HERMES

MAX_TASKS = 4096
"""In one evaluation, at most: its tasks are one iteration."""

TRAINING_KEYS = ("algorithm.", "update.", "critic.", "source.", "eval.")
"""Sections of the config that say nothing of how episodes are made."""

NEUTRAL_ROLLOUT_KEYS = ("group_size", "tasks_per_iteration", "max_attempts", "max_staleness", "dynamic_sampling")
"""Keys of the section `rollout` that say how many episodes are made and when, and nothing of what is in one."""

SINGLE_PASS = {"epochs": 1, "iterations": None, "rollout.max_staleness": 0, "rollout.dynamic_sampling": 1}
"""Values of a run that goes over its tasks once, neither ahead nor with more groups, whatever the run of the config did."""


def eval_config(
    config: RunConfig, dataset: str | None, split: str, n: int | None, rollout: Mapping[str, Any], env: str | None = None
) -> RunConfig:
    """The config that measures a policy of a run with `config`; `in_one_iteration` says how many tasks it has.

    Args:
        dataset: the run's where None; of another one the env is that dataset's own.
        n: only the first N tasks; None: all.
        rollout: keys of the section `rollout` that are not the run's; None is the run's.
        env: another one than these.
    """
    values = sampling_values(config) | SINGLE_PASS | {"name": None, "output_dir": None}
    values |= {"dataset.split": split, "dataset.max_samples": n}
    values |= {f"rollout.{key}": value for key, value in rollout.items() if value is not None}
    if dataset is not None and dataset != config.dataset.name:
        values |= {"dataset.name": dataset, "env": None, "dataset.skip_bad_rows": False}
    return build(values | ({} if env is None else {"env": env}))


def sampling_values(config: RunConfig) -> dict[str, Any]:
    """What the config says of how episodes are made, for a run that updates nothing."""
    return {key: value for key, value in config.flat().items() if not key.startswith(TRAINING_KEYS)}


def sampling_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By which keys two runs make their episodes otherwise, with both values; their weights, tasks and rewards aside.

    Args:
        first, second: configs as their rows hold them; a key that one of them lacks is younger than it.
    """
    one, other = stored_sampling_values(first), stored_sampling_values(second)
    return {key: (one[key], other[key]) for key in one if one[key] != other[key]}


def stored_sampling_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a stored config says how its episodes are made; see `sampling_differences`."""
    values = _comparable_values(config)
    keys = [key for key in values if key.startswith("rollout.") and key.removeprefix("rollout.") not in NEUTRAL_ROLLOUT_KEYS]
    of_model = ("load_in_4bit", "load_in_8bit", "dtype", "numerics", "tool_format", "chat_template")
    keys += ["env", "tools", "hooks", *(f"model.{name}" for name in of_model)]
    return {key: values[key] for key in keys}


def _comparable_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a stored config, its template by its hash; calls were written as Hermes does before there was a choice."""
    values = {**RunConfig().flat(), **dict(flatten(config))}
    source = values["model.chat_template"]
    words = {"model.tool_format": values["model.tool_format"] or HERMES}
    return values | words | {"model.chat_template": sha256(source.encode()).hexdigest()[:12] if source else None}


def in_one_iteration(config: RunConfig) -> RunConfig:
    """The config with all of its tasks in one iteration.

    Raises:
        ConfigError: they are too many.
        DatasetError: they cannot be read.
    """
    tasks = len(load_tasks(config.dataset).tasks)
    if tasks > MAX_TASKS:
        hint = f"Take the first {MAX_TASKS} or less: -n of `agentrl eval`, eval.tasks of a run."
        raise ConfigError(f"{tasks} tasks are more than an evaluation takes.", hint)
    return build(config.flat() | {"rollout.tasks_per_iteration": tasks})
