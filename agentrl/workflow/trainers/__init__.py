"""Trainers. Each file of this folder defines a `TrainerBackend`: a class that updates policies, and a check of a run's options.

Both are given by name and are not imported, so the command line can check a run's options without loading torch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.workflow.config import RunConfig
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.plugins import find

if TYPE_CHECKING:
    from agentrl.workflow.models.policy import Policy
    from agentrl.workflow.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class TrainerBackend:
    """A trainer that a run can choose.

    Args:
        name: the file's name.
        start: `module:class` of the `Trainer`. It is called with a `Policy`, the run's config and its number of iterations.
        check: `module:function`, which is called with the config when a run is submitted. It raises ConfigError if the trainer
            does not support an option. Empty: the trainer supports all options.
    """

    name: str
    start: str
    check: str = ""


def start(backend: TrainerBackend, policy: "Policy", config: RunConfig, iterations: int) -> "Trainer":
    """Return the trainer of this policy. Raise ConfigError if the trainer cannot be loaded here."""
    trainer: Trainer = find("trainer", backend.start)(policy, config, iterations)
    return trainer


def full_float16_error() -> ConfigError:
    """Return the error for training all weights in float16."""
    message = "float16 has too few bits to train all weights in it."
    return ConfigError(message, "Set model.dtype=float32, or train LoRA: model.lora_r=8.")


def check(config: RunConfig) -> None:
    """Refuse options that the run's trainer does not support or read. Raise ConfigError if there is such an option."""
    backend: TrainerBackend = find("trainers", config.update.trainer)
    if config.update.devices != 1 and backend.name != "agentrl":
        message = f"The trainer {backend.name} updates on one device, and update.devices is {config.update.devices}."
        raise ConfigError(message, "Leave update.devices out, or take --trainer agentrl.")
    if config.update.hosts != 1 and backend.name != "agentrl":
        message = f"The trainer {backend.name} updates on one host, and update.hosts is {config.update.hosts}."
        raise ConfigError(message, "Leave update.hosts out, or take --trainer agentrl.")
    if backend.check:
        find("trainer", backend.check)(config)
