"""Reads a config from YAML, environment variables, flags and `-s key=value`.

Precedence: flags > environment (`AGENTRL_RUN_<KEY>`, dots as `__`) > file > defaults. `resolve` also returns the source of each
value.
"""

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from agentrl.workflow.config import FLAGS, KEYS, OLDER_KEYS, RunConfig, build, flatten
from agentrl.workflow.errors import ConfigError, closest_name, suggest

ENV_PREFIX = "AGENTRL_RUN_"
MISSPELT = 0.85
"""The similarity, from 0 to 1, above which an unknown key is treated as a misspelt key or section."""
MAX_FILE = 1 << 20
MAX_DIGITS = 100
OTHER_NAMES = {"agent": "agent.name", "max_samples": "max_tasks", **OLDER_KEYS}
"""A mapping from other names of keys and flags to their first name: older names, and `agent` for `agent.name`."""
TASK_COUNTS = ("max_samples", "max_tasks", "num_samples", "limit")
"""Names that users may type for the number of tasks, in a section whose key is `tasks`."""
INSTEAD = {"epochs": "iterations", "iterations": "epochs"}
"""Pairs of keys that exclude each other. If both are set, the key from the source with the higher precedence replaces the other
key.
"""


def resolve(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: tuple[str, ...] = (),
    environ: Mapping[str, str] | None = None,
) -> tuple[RunConfig, dict[str, str]]:
    """Return the config, and the source of each dotted key's value.

    A source is `default`, the file's path, `environment` or `flag`. Raise ConfigError if a key is unknown (the hint has a
    suggestion), a value is invalid, or the file cannot be read.

    Args:
        file: a YAML file with nested or dotted keys.
        flags: values by dotted key; None: the flag was not passed.
        assignments: texts `key=value`; the values are parsed as YAML.
        environ: the environment variables.
    """
    layers = [
        (str(file), read_yaml(file) if file else {}),
        ("environment", _read_environ(environ or {})),
        ("flag", {key: value for key, value in (flags or {}).items() if value is not None}),
        ("flag", dict(_parse_assignment(text) for text in assignments)),
    ]
    layers = [(origin, by_first_name(layer.items())) for origin, layer in layers]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(KEYS, "default")
    for origin, layer in layers:
        for key, value in layer.items():
            if key not in KEYS:
                place = "-s" if origin == "flag" else origin
                raise ConfigError(f"Unknown option {key!r:.100} ({place}).", _suggest(key, value))
            values[key] = value
            origins[key] = origin
            other = INSTEAD.get(key)
            if value is not None and other in values and origins[other] != origin:
                del values[other]
                origins[other] = "default"
    config = build(values)
    if "algorithm.convention" not in values and config.update.trainer == "trl":
        origins["algorithm.convention"] = origins["update.trainer"]
    return config, origins


def parse_weights(texts: Iterable[str]) -> dict[str, float]:
    """Parse texts `NAME` (weight 1) or `NAME=WEIGHT`. Raise ConfigError if a weight is not finite, or a name repeats."""
    weights: dict[str, float] = {}
    for text in texts:
        name, separator, weight = text.partition("=")
        try:
            value = float(weight) if separator else 1.0
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"{weight!r} is not a weight for the reward {name!r}.", "Write --reward NAME=0.5")
        if name in weights:
            raise ConfigError(f"The reward {name!r} is named twice.", "Give it one weight: --reward NAME=0.5")
        weights[name] = value
    return weights


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """Parse texts `key=value`, with values in YAML. Raise ConfigError if one is not an assignment, or its key is unknown."""
    assignments = by_first_name(map(_parse_assignment, texts))
    for key in assignments:
        if key not in KEYS:
            raise ConfigError(f"Unknown option {key!r:.100}.", _suggest(key))
    return assignments


def by_first_name(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the values under the first names of keys (`OTHER_NAMES`). Raise ConfigError if a key has two."""
    entries: dict[str, tuple[str, Any]] = {}
    for key, value in pairs:
        name = OTHER_NAMES.get(key, key)
        if entries.setdefault(name, (key, value))[0] != key:
            raise ConfigError(f"{key!r} and {entries[name][0]!r} are the same option.", "Pass one of them.")
        entries[name] = (key, value)
    return {name: value for name, (_, value) in entries.items()}


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses constructs that no config needs."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            problem = f"aliases are not supported; write the value of *{event.anchor} in full"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node; refuse duplicate keys. Without this check, YAML would silently use the last value."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text, without brackets", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is written twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return the integer of a node; refuse an integer with too many digits."""
        if len(node.value) > MAX_DIGITS:
            problem = f"a number of {len(node.value)} digits is too large"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the values of a YAML file by dotted key. Raise ConfigError if the file is unreadable or not a mapping."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise ConfigError(f"The config {str(path)!r} is larger than {MAX_FILE} bytes.", "Is it the right file?")
        tree = _load_yaml(data.decode())
    except OSError as error:
        raise ConfigError(f"Cannot read the config {str(path)!r}: {error.strerror}.") from error
    except ValueError as error:  # also for bytes that are not UTF-8
        raise ConfigError(f"{str(path)!r} is not YAML: {error}.") from error
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{str(path)!r} must contain keys and values, not a {type(tree).__name__}.")
    return dict(flatten(tree))


def _load_yaml(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:  # a tag that says what its value is not
        raise ValueError(f"it contains an invalid value ({error})") from error


def _read_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        name.removeprefix(ENV_PREFIX).lower().replace("__", "."): _yaml_value(name, value)
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX)
    }


def _parse_assignment(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"{text!r} is not KEY=VALUE.", "Write -s key=value, for example -s rollout.group_size=4.")
    return key.strip(), _yaml_value(key.strip(), value)


def _yaml_value(name: str, text: str) -> Any:
    try:
        return _load_yaml(text)
    except ValueError as error:
        raise ConfigError(f"The value of {name!r} is not YAML: {text!r:.80}.", "Quote it as YAML text.") from error


def _suggest(key: str, value: Any = None) -> str:
    section, _, name = key.partition(".")
    if section == "rewards" and value is not None:
        return f"Write --reward {name}={value}, or in a file rewards: {{{name}: {value}}}."
    if name in TASK_COUNTS and f"{section}.tasks" in KEYS:
        return f"Did you mean '{section}.tasks'?"
    if flags := get_close_matches(key, FLAGS, 1, MISSPELT):
        return f"Did you mean {FLAGS[flags[0]]!r}?"
    sections = {option.partition(".")[0] for option in KEYS if "." in option}
    (key,) = get_close_matches(key, [*KEYS, *sections], 1, MISSPELT) or [key]
    if key in KEYS:
        return f"Did you mean {key!r}?"
    of_section = [option for option in KEYS if option.startswith(f"{key}.")]
    same_leaf = [option for option in KEYS if option.rpartition(".")[2] == key.rpartition(".")[2]]
    if of_section or same_leaf:
        return f"Did you mean {(of_section or same_leaf)[0]!r}?"
    if hint := suggest(key, KEYS):
        return hint
    if leaf := closest_name(key.rpartition(".")[2], [option.rpartition(".")[2] for option in KEYS]):
        return f"Did you mean {next(option for option in KEYS if option.rpartition('.')[2] == leaf)!r}?"
    return "`agentrl config show` lists them."
