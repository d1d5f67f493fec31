"""Calls `cli.probe` in a separate process, so that commands import neither torch nor transformers."""

import json
import subprocess
import sys
from typing import Any

from agentrl.workflow.config import ModelConfig, RunConfig
from agentrl.workflow.errors import ConfigError, ModelError
from agentrl.workflow.runtime.process_output import last_line
from agentrl.workflow.settings import settings

PROBE_SECONDS = 120
SAMPLER_SECONDS = 1800
"""The longest time for loading a model and sampling its first token, in seconds."""


def probe_facts(*arguments: str, seconds: int = PROBE_SECONDS) -> dict[str, Any]:
    """Run a check of `cli.probe` in a separate process. Return its result as a mapping, or a mapping with `error`."""
    command = [sys.executable, "-P", "-m", "agentrl.cli.probe", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"did not answer within {seconds} s"}
    if done.returncode:
        return {"error": last_line(done.stderr, "ended without a message")}
    facts: dict[str, Any] = json.loads(last_line(done.stdout))
    return facts


def check_model(config: ModelConfig, base: str) -> dict[str, Any]:
    """Check that a worker can load the files of the model. A hub model is checked only if it is on this machine. Raise
    ModelError if the files are not a model, or do not fit the config.

    Returns:
        What `submit --dry-run` prints about the model (`models.loading.ModelFacts`); empty for a hub model that is not on this
        machine.
    """
    return _checked(probe_facts("model", base, config.model_dump_json()))


def probe_sampler(config: ModelConfig, base: str) -> dict[str, Any]:
    """Load the model, sample a token, and return how the sampler runs the model. Raise ModelError if loading or sampling
    fails.
    """
    return _checked(probe_facts("sampler", base, config.model_dump_json(), settings().device, seconds=SAMPLER_SECONDS))


def _checked(facts: dict[str, Any]) -> dict[str, Any]:
    if "error" in facts:
        raise ModelError(facts["error"], facts.get("hint", ""))
    return facts


def check_update(config: RunConfig) -> None:
    """Raise ConfigError if the run's optimizer does not work on this machine, or the machine has too few devices for
    `update.devices`. Torch's own optimizers and a single device are not checked.
    """
    update, numerics = config.update, config.model.numerics
    if update.optimizer == "adamw" and update.devices == 1:
        return
    facts = probe_facts("update", update.optimizer, str(update.devices), settings().device, numerics)
    if "error" in facts:
        raise ConfigError(facts["error"], facts.get("hint", ""))
