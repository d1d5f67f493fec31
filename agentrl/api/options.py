"""Converts keyword arguments to the keys of a run's config."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from agentrl import elsewhere
from agentrl.api.dataset_input import plain
from agentrl.workflow.config import FLAGS, KEYS, flatten
from agentrl.workflow.errors import ConfigError, suggest
from agentrl.workflow.resolve import OTHER_NAMES, read_yaml


def keys_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keyword arguments to config keys. Raise ConfigError if an option does not exist (the message names the nearest
    one), or a config cannot hold an option's value.
    """
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    leaves: dict[str, list[str]] = {}
    for key in KEYS:
        leaves.setdefault(key.rpartition(".")[2], []).append(key)
    values: dict[str, Any] = {}
    for option, value in options.items():
        name = option if isinstance(value, Mapping) else OTHER_NAMES.get(option, option)
        if name in KEYS:
            values[name] = value
        elif name in sections and isinstance(value, Mapping):
            values |= _check_section(dict(flatten({name: value})))
        elif name in FLAGS:
            values[FLAGS[name]] = value
        elif len(leaves.get(name, ())) == 1:
            values[leaves[name][0]] = value
        elif name in leaves:
            raise ConfigError(f"The option {name!r} is ambiguous: {', '.join(leaves[name])}.", "Write its full name.")
        elif name in sections:
            raise ConfigError(f"{name!r} is a section of options, not {value!r:.40}.", f"Write {name}={{'KEY': VALUE}}.")
        else:
            raise _no_option_error(name, {*KEYS, *FLAGS, *leaves})
    return {key: _as_in_file(key, value) for key, value in values.items()}


def keys_of_file(config: Any) -> dict[str, Any]:
    """Return the keys of a config file; an empty mapping if `config` is None. Raise ConfigError if `config` is not a path, or
    the file cannot be read.
    """
    if config is None:
        return {}
    if not isinstance(config, str | Path):
        message = f"config= must be the path of a YAML file, not a {type(config).__name__}."
        raise ConfigError(message, "Pass keys as options: Trainer(seed=1).")
    return read_yaml(Path(config))


def _check_section(values: dict[str, Any]) -> dict[str, Any]:
    for key in values:
        if key not in KEYS:
            raise _no_option_error(key, KEYS)
    return values


def _as_in_file(key: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, default=lambda other: str(other) if isinstance(other, Path) else plain(other)))
    except (TypeError, ValueError, RecursionError) as error:
        message = f"The option {key!r} cannot be {value!r:.60}: {error}."
        raise ConfigError(message, "Pass objects as the Trainer's agent, env, rewards, hooks or algorithm.") from error


def _no_option_error(name: str, options: Collection[str]) -> ConfigError:
    if name in elsewhere.OPTIONS:
        advice = elsewhere.OPTIONS[name]
        hint = f"{advice[:1].upper()}{advice[1:]}."
    else:
        hint = suggest(name[:100], options) or "`agentrl config show` lists them."
    return ConfigError(f"There is no option {name!r:.100}.", hint)
