"""Conversion of keyword options to the keys of a run's config."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from agentrl import elsewhere
from agentrl.api.dataset_input import plain
from agentrl.workflow.config import FLAGS, KEYS, flatten
from agentrl.workflow.errors import ConfigError, did_you_mean
from agentrl.workflow.resolve import OTHER_NAMES, read_yaml


def keys_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as keys of the config.

    Raises:
        ConfigError: there is no such option, with the nearest; or its value is nothing that a config can hold.
    """
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    leaves: dict[str, list[str]] = {}
    for key in KEYS:
        leaves.setdefault(key.rpartition(".")[2], []).append(key)
    found: dict[str, Any] = {}
    for given, value in options.items():
        name = given if isinstance(value, Mapping) else OTHER_NAMES.get(given, given)
        if name in KEYS:
            found[name] = value
        elif name in sections and isinstance(value, Mapping):
            found |= _of_section(dict(flatten({name: value})))
        elif name in FLAGS:
            found[FLAGS[name]] = value
        elif len(leaves.get(name, ())) == 1:
            found[leaves[name][0]] = value
        elif name in leaves:
            raise ConfigError(f"The option {name!r} is ambiguous: {', '.join(leaves[name])}.", "Write its full name.")
        elif name in sections:
            raise ConfigError(f"{name!r} is a section of options, not {value!r:.40}.", f"Write {name}={{'KEY': VALUE}}.")
        else:
            raise ConfigError(f"There is no option {name!r:.100}.", _way(name, {*KEYS, *FLAGS, *leaves}))
    return {key: _held(key, value) for key, value in found.items()}


def keys_of_file(config: Any) -> dict[str, Any]:
    """Return the keys of a config file; empty without a file.

    Raises:
        ConfigError: it is not a regular file's name, or the file cannot be read.
    """
    if config is None:
        return {}
    if not isinstance(config, str | Path):
        said = f"config= must be the path of a YAML file, not a {type(config).__name__}."
        raise ConfigError(said, "Pass keys as options: Trainer(seed=1).")
    return read_yaml(Path(config))


def _of_section(found: dict[str, Any]) -> dict[str, Any]:
    for key in found:
        if key not in KEYS:
            raise ConfigError(f"There is no option {key!r:.100}.", _way(key, KEYS))
    return found


def _held(key: str, value: Any) -> Any:
    """The value as a file has it: numbers of numpy are numbers.

    Raises:
        ConfigError: a file cannot have it.
    """
    try:
        return json.loads(json.dumps(value, default=_plain))
    except (TypeError, ValueError, RecursionError) as error:
        said = f"The option {key!r} cannot be {value!r:.60}: {error}."
        raise ConfigError(said, "Pass objects as the Trainer's agent, env, rewards, hooks or algorithm.") from error


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else plain(value)


def _way(name: str, known: Collection[str]) -> str:
    """What to write in place of an option that there is none of."""
    if name in elsewhere.OPTIONS:
        way = elsewhere.OPTIONS[name]
        return f"{way[:1].upper()}{way[1:]}."
    near = did_you_mean(name[:100], known)
    return near if near.startswith("Did") else "`agentrl config show` lists them."
