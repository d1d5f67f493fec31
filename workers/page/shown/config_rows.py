"""A stored config, key by key: where each value came from, and how it differs from another run's.

The rows of a run hold its settled values and not who said them: what equals the default is `default`, anything else `given`,
by a person or by what settled the request (an algorithm's own options, the model's tool format).
"""

from collections.abc import Mapping
from typing import Any

from agentrl.workers.page.shown.cutting import cut_value
from agentrl.workflow.config import NO_AGENT, RunConfig, flatten


def list_config(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Key, value, origin of each value, and `cut`: the characters of one that is too long to show."""
    values, defaults = _flat(config), RunConfig().flat()
    return [{"key": key, **_shown(value), "origin": _origin(defaults, key, value)} for key, value in values.items()]


def compare_configs(config: Mapping[str, Any], other: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """As `list_config`, with the `other` run's value, its origin, and whether they differ; null without another run."""
    values, defaults = _flat(config), RunConfig().flat()
    theirs = {} if other is None else _flat(other)
    return [_compared(key, values, theirs, defaults) for key in dict.fromkeys((*values, *theirs))]


def _compared(key: str, mine: Mapping[str, Any], theirs: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    value, other = mine.get(key), theirs.get(key)
    return {
        "key": key,
        **_shown(value),
        "origin": _origin(defaults, key, value),
        "other": cut_value(other)[0],
        "other_origin": _origin(defaults, key, other) if theirs else None,
        "differs": bool(theirs) and value != other,
    }


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values by dotted key, those of the code's keys that an older run lacks at their defaults."""
    tree = config if config.get("agent") else {**config, "agent": NO_AGENT}
    return {**RunConfig().flat(), **dict(flatten(tree))}


def _shown(value: Any) -> dict[str, Any]:
    shown, cut = cut_value(value)
    return {"value": shown, "cut": cut}


def _origin(defaults: Mapping[str, Any], key: str, value: Any) -> str:
    return "default" if key in defaults and defaults[key] == value else "given"
