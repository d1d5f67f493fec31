"""The optimizer, and what it remembers as named tensors: what a checkpoint holds of it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from workflow.errors import CheckpointError

BETAS = (0.9, 0.999)
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def adamw(
    parameters: Mapping[str, nn.Parameter], learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) as one kernel per parameter, which keeps no copies of it."""
    return torch.optim.AdamW(parameters.values(), lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True)


def moments(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Its state by `<parameter>:<moment>`, on the CPU; empty before the first step."""
    state = optimizer.state
    return {
        f"{name}:{moment}": state[parameter][moment].cpu().contiguous()
        for name, parameter in parameters.items()
        if parameter in state
        for moment in MOMENTS
    }


def set_moments(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Gives it copies of what `moments` returned.

    Raises:
        CheckpointError: they are of other parameters.
    """
    stepped = {name for name in parameters if f"{name}:{MOMENTS[0]}" in tensors}  # others were left alone so far
    if set(tensors) != {f"{name}:{moment}" for name in stepped for moment in MOMENTS}:
        raise CheckpointError("The optimizer's state in the checkpoint is of another model.")
    for name in stepped:
        parameter = parameters[name]
        values = [tensors[f"{name}:{moment}"].to(parameter.device, copy=True) for moment in MOMENTS]
        optimizer.state[parameter] = dict(zip(MOMENTS, values, strict=True))
