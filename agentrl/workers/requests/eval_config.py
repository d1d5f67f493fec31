"""Builds the configs of evaluations. An evaluation has one iteration with all tasks and no update. Its episodes are sampled
with the options of the run whose policy is measured.
"""

from collections.abc import Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentrl.workflow.config import LOOP_LIMITS, RunConfig, build, flatten
from agentrl.workflow.datasets import is_file
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.tool_formats import HERMES

if TYPE_CHECKING:
    from agentrl.workflow.store.connect import Database

MAX_TASKS = 4096

TRAINING_KEYS = ("algorithm.", "update.", "critic.", "source.", "eval.", "report.")
"""Prefixes of config keys that do not affect how episodes are sampled."""

NEUTRAL_ROLLOUT_KEYS = ("group_size", "tasks_per_iteration", "max_attempts", "max_staleness", "dynamic_sampling")
"""Config keys of the section `rollout` that affect the number of episodes and the time at which they are sampled, but not the
contents of an episode.
"""

LOOP_KEYS = ("tools", "served_tools", *(f"rollout.{name}" for name in LOOP_LIMITS))
"""Config keys that only the built-in loop uses, not an agent."""

SINGLE_PASS = {
    **{"epochs": 1, "iterations": None, "rollout.max_staleness": 0, "rollout.dynamic_sampling": 1},
    **{"dataset.keep_solved": None, "dataset.order": "shuffled"},
}
"""Config values for a run that uses each of its tasks once, without rollouts during updates and without dynamic sampling."""


def eval_config(
    config: RunConfig,
    dataset: str | None,
    split: str | None,
    n: int | None,
    rollout: Mapping[str, Any],
    env: str | None = None,
    agent: Mapping[str, Any] = MappingProxyType({}),
    rewards: Mapping[str, float] = MappingProxyType({}),
    rows: Mapping[str, Any] = MappingProxyType({}),
) -> RunConfig:
    """Return the config of an evaluation of a run's policy. Pass it to `in_one_iteration`, which sets `tasks_per_iteration`.

    Where an argument is None or empty, the run's value is used.

    Args:
        split: None for `test`, or for the only split of a file.
        n: the number of tasks, counted from the first; None for all tasks.
        rollout: values that replace the run's in the section `rollout`.
        env: None for the run's env or, if the run has none, the dataset's.
        agent: values that replace the run's in the section `agent`. If they name another agent, it replaces the run's agent or
            the built-in loop with its options.
        rows: values of the section `dataset` that say how dataset rows are read. The run's values are used only for the run's
            own dataset.
    """
    values = sampling_values(config) | SINGLE_PASS | {"name": None, "output_dir": None}
    split = split or ("train" if is_file(dataset or config.dataset.name) else "test")
    values |= {"dataset.split": split, "dataset.max_tasks": n}
    values |= _agent_values(agent)
    values |= {f"rollout.{key}": value for key, value in rollout.items() if value is not None}
    if dataset is not None and dataset != config.dataset.name:
        values |= {"dataset.name": dataset, "dataset.skip_bad_rows": False, "dataset.map": {}, "dataset.filter": None}
    values |= {f"dataset.{key}": value for key, value in rows.items() if value}
    return build(values | ({} if env is None else {"env": env}) | ({"rewards": dict(rewards)} if rewards else {}))


def _agent_values(agent: Mapping[str, Any]) -> dict[str, Any]:
    values = {f"agent.{key}": value for key, value in agent.items() if value is not None}
    if "agent.name" not in values:
        return values
    before = RunConfig().flat()
    defaults = {key: value for key, value in before.items() if key.startswith("agent.") or key in LOOP_KEYS}
    return defaults | values


def sampling_values(config: RunConfig) -> dict[str, Any]:
    """Return the config values that affect how episodes are sampled and scored, without the values about updates."""
    return {key: value for key, value in config.flat().items() if not key.startswith(TRAINING_KEYS)}


def sampling_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the config keys in which two runs sample differently, each with the values of both runs. Weights, tasks and
    rewards are not compared.

    Args:
        first, second: the stored configs. A key that an older run does not have gets its default.
    """
    one, other = stored_sampling_values(first), stored_sampling_values(second)
    return {key: (one[key], other[key]) for key in one if one[key] != other[key]}


def stored_sampling_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a stored config that affect how its episodes are sampled; see `sampling_differences`."""
    values = _comparable_values(config)
    keys = [key for key in values if key.startswith("rollout.") and key.removeprefix("rollout.") not in NEUTRAL_ROLLOUT_KEYS]
    of_model = ("load_in_4bit", "load_in_8bit", "dtype", "numerics", "tool_format", "strict_calls", "chat_template")
    keys += ["env", "tools", "agent.name", "hooks", *(f"model.{name}" for name in of_model)]
    return {key: values[key] for key in keys}


def _comparable_values(config: Mapping[str, Any]) -> dict[str, Any]:
    values = {**RunConfig().flat(), **dict(flatten(config))}
    source = values["model.chat_template"]
    chat_format = {"model.tool_format": values["model.tool_format"] or HERMES}
    return values | chat_format | {"model.chat_template": sha256(source.encode()).hexdigest()[:12] if source else None}


def in_one_iteration(db: "Database | None", config: RunConfig) -> RunConfig:
    """Return the config with one iteration for all tasks. Raise ConfigError if there are more than MAX_TASKS. The tasks
    may be prompts of a served run. `db` is then the database of the served run; otherwise it may be None.
    """
    from agentrl.workers.requests.served_prompts import load_run_tasks  # `compare` needs no database connection of SQLAlchemy

    tasks = len(load_run_tasks(db, config.dataset).tasks)
    if tasks > MAX_TASKS:
        hint = f"Use at most {MAX_TASKS}: pass -n to `agentrl eval`, or set eval.tasks of a run."
        raise ConfigError(f"{tasks} tasks are too many for an evaluation.", hint)
    return build(config.flat() | {"rollout.tasks_per_iteration": tasks})
