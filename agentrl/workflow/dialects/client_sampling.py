"""A client's sampling options. Stop strings apply in all runs. The other options apply only in runs of the kind `serve`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.workflow.config import RolloutConfig
from agentrl.workflow.trajectory import SamplingKey

SEED_BITS = 63
COLDEST = 1e-4
"""The lowest temperature. Below it, divided logits would overflow."""
GREEDY = {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}


def limits_asked(limits: RolloutConfig, options: Mapping[str, Any]) -> RolloutConfig:
    """Return the run's limits, with the client's sampling options in place of the run's.

    If the temperature is below `COLDEST` or `top_p` is 0, the most likely token is always sampled.

    Args:
        limits: the run's limits.
        options: the options that the client sent among `temperature`, `top_p`, `top_k` and `min_p`, within the bounds of the
            dialect.
    """
    if options.get("temperature", COLDEST) < COLDEST or options.get("top_p") == 0:
        return limits.model_copy(update=GREEDY)
    changes = {name: options[name] for name in ("temperature", "top_p", "min_p") if name in options}
    if "top_k" in options:
        changes["top_k"] = max(0, options["top_k"])  # -1 is vLLM's word for all
    return limits.model_copy(update=changes)


def with_stop(limits: RolloutConfig, stop: Sequence[str]) -> RolloutConfig:
    """Return the limits with the client's stop strings added to the run's."""
    return limits.model_copy(update={"stop": tuple(dict.fromkeys((*limits.stop, *stop)))}) if stop else limits


def key_asked(key: SamplingKey, options: Mapping[str, Any]) -> SamplingKey:
    """Return the key of the random draws.

    If the client sent a seed, the key does not depend on the episode. So the same request samples the same tokens.
    """
    if "seed" not in options:
        return key
    return replace(key, seed=int(options["seed"]) % 2**SEED_BITS, purpose="client", iteration=0, task="", sample=0)
