"""Options that a person passes as keywords, as keys of a run's config."""

from collections.abc import Mapping
from typing import Any

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
            near = did_you_mean(name[:100], [*KEYS, *FLAGS, *leaves])
            raise ConfigError(f"There is no option {name!r:.100}.", near)
    return found
