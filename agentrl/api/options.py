"""Options that a person passes as keywords, as keys of a run's config."""

from collections.abc import Mapping, Set
from typing import Any

from agentrl import elsewhere
from agentrl.workflow.config import KEYS, flatten
from agentrl.workflow.errors import ConfigError, did_you_mean
from agentrl.workflow.resolve import FLAGS


def keys_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as keys of the config.

    Raises:
        ConfigError: there is no such option; with the nearest.
    """
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    leaves: dict[str, list[str]] = {}
    for key in KEYS:
        leaves.setdefault(key.rpartition(".")[2], []).append(key)
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in KEYS:
            found[name] = value
        elif name in sections and isinstance(value, Mapping):
            found |= dict(flatten({name: value}))
        elif name in FLAGS:
            found[FLAGS[name]] = value
        elif len(leaves.get(name, ())) == 1:
            found[leaves[name][0]] = value
        elif name in leaves:
            raise ConfigError(f"The option {name!r} is several: {', '.join(leaves[name])}.", "Write it in full.")
        else:
            raise ConfigError(f"There is no option {name!r:.100}.", _way(name, {*KEYS, *FLAGS, *leaves}))
    return found


def _way(name: str, known: Set[str]) -> str:
    """What to write in place of an option that there is none of."""
    if name in elsewhere.OPTIONS:
        way = elsewhere.OPTIONS[name]
        return f"{way[:1].upper()}{way[1:]}."
    near = did_you_mean(name[:100], known)
    return near if near.startswith("Did") else "`agentrl config show` lists them."
