"""A stored config, key by key: where each value came from, and how it differs from another run's.

A run that `agentrl submit` made has written down where each value came from that a person chose: an option, a variable, a
file. What it has else, and is no default, is `settled`: by the algorithm, the model, the run that it goes on from. Runs of
before, and those that other commands make, say of such values only that they were `given`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from agentrl.workers.page.shown.cutting import LISTED_CHARS, cut_value
from agentrl.workflow.config import NO_AGENT, RunConfig, flatten
from agentrl.workflow.store.reads.run_details import StoredConfig


def list_config(config: StoredConfig) -> list[dict[str, Any]]:
    """Key, value, origin of each value, and `cut`: the characters of one that is too long to show."""
    values, origin = _flat(config.values), _origins(config)
    return [{"key": key, **_shown(value), "origin": origin(key, value)} for key, value in values.items()]


def compare_configs(config: StoredConfig, other: StoredConfig | None) -> list[dict[str, Any]]:
    """As `list_config`, with the `other` run's value, its origin, and whether they differ; null without another run."""
    values, origin = _flat(config.values), _origins(config)
    if other is None:
        unknown = {"other": None, "other_origin": None, "differs": False}
        return [{"key": key, **_shown(value), "origin": origin(key, value), **unknown} for key, value in values.items()]
    theirs, their_origin = _flat(other.values), _origins(other)
    return [
        {
            "key": key,
            **_shown(values.get(key)),
            "origin": origin(key, values.get(key)),
            "other": cut_value(theirs.get(key))[0],
            "other_origin": their_origin(key, theirs.get(key)),
            "differs": values.get(key) != theirs.get(key),
        }
        for key in dict.fromkeys((*values, *theirs))
    ]


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values by dotted key, those of the code's keys that an older run lacks at their defaults."""
    tree = config if config.get("agent") else {**config, "agent": NO_AGENT}
    return {**RunConfig().flat(), **dict(flatten(tree))}


def _shown(value: Any) -> dict[str, Any]:
    shown, cut = cut_value(value)
    return {"value": shown, "cut": cut}


def _origins(config: StoredConfig) -> Callable[[str, Any], str]:
    """Key and value -> where the value came from."""
    defaults, known = RunConfig().flat(), config.origins

    def origin(key: str, value: Any) -> str:
        if known and isinstance(known.get(key), str):
            return known[key][:LISTED_CHARS]
        if key in defaults and defaults[key] == value:
            return "default"
        return "given" if known is None else "settled"

    return origin
