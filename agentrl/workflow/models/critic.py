"""The critic's value head: a linear layer on the body of the policy. Only the trainer has it; samplers never load it.

The head's weights are initialised to 0. So the head predicts 0 before it is trained, and all processes start from the same
weights.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from agentrl.workflow.checkpoints import broken_error
from agentrl.workflow.models.logprobs import causal_model
from agentrl.workflow.models.policy import Policy

FILE = "critic.safetensors"


def make_critic(policy: Policy) -> nn.Linear:
    """Return a new value head (H) -> (1) for the policy: float32, or float64 under `numerics: exact`."""
    with policy.training() as model:
        head = causal_model(model).get_output_embeddings()  # type: ignore[no-untyped-call]
        width = int(head.in_features)
    critic = nn.Linear(
        width, 1, device=policy.device, dtype=torch.float64 if policy.config.numerics == "exact" else torch.float32
    )
    nn.init.zeros_(critic.weight)
    nn.init.zeros_(critic.bias)
    return critic


def critic_parameters(critic: nn.Linear) -> dict[str, nn.Parameter]:
    """Return the critic's parameters, under names that no parameter of a policy has."""
    return {f"critic.{name}": parameter for name, parameter in critic.named_parameters()}


def save_critic(critic: nn.Linear, folder: Path) -> None:
    save_file({name: p.detach().cpu().contiguous() for name, p in critic_parameters(critic).items()}, folder / FILE)


@torch.no_grad()
def load_critic(critic: nn.Linear, folder: Path) -> None:
    """Load the critic from a checkpoint, bit for bit.

    Raises:
        CheckpointError: the checkpoint has no critic, or its critic has another width.
    """
    try:
        tensors = load_file(folder / FILE)
        for name, parameter in critic_parameters(critic).items():
            if tensors[name].shape != parameter.shape:
                raise broken_error(folder, f"{FILE} is of another model")
            parameter.copy_(tensors[name])
    except (OSError, SafetensorError, KeyError) as error:
        raise broken_error(folder, f"{FILE} cannot be read: {error}") from error
