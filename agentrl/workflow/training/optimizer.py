"""The optimizers and their state as named tensors; the schedules of the learning rate and of the KL's weight; the loss scale of
models in float16.

The learning rate depends only on the iteration's number, so a resumed run continues with the same rates.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from agentrl.workflow.config import AlgorithmConfig, UpdateConfig
from agentrl.workflow.errors import CheckpointError, ConfigError, InfraError
from agentrl.workflow.installation import install_command
from agentrl.workflow.models.device_errors import classify
from agentrl.workflow.models.memory import free_cached_blocks
from agentrl.workflow.trainers import full_float16_error

BETAS = (0.9, 0.999)
NO_ROOM = "Train LoRA (model.lora_r=8), or keep the moments in 8 bits: update.optimizer=adamw_8bit."
QUANTISED_ELEMENTS = 4096
"""The fewest elements of a parameter whose moments bitsandbytes keeps in 8 bits."""
MAX_ERROR = 0.2
"""The largest relative difference between the KL and its target that `next_kl_coef` uses; larger ones are clipped to it."""

KL_HORIZON = 10_000
"""The default horizon, in episodes: over that many episodes, kl_coef grows or falls by at most a fifth."""
INITIAL_FACTOR = 2.0**16
MAX_FACTOR = 2.0**24
GROWTH_STEPS = 200
"""The number of steps without an overflow after which the factor is doubled."""


def make_optimizer(
    name: str, parameters: Mapping[str, nn.Parameter], learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """Make the optimizer that the config names.

    `adamw` is AdamW (arXiv 1711.05101) as one fused kernel per parameter, which makes no copies. `adamw_8bit` stores the
    moments of large parameters in 8 bits (arXiv 2110.02861).
    """
    if name == "adamw":
        return torch.optim.AdamW(parameters.values(), lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True)
    from bitsandbytes.optim.adamw import AdamW8bit  # here and not above: it takes long to import

    optimizer = AdamW8bit(parameters.values(), learning_rate, betas, weight_decay=weight_decay)  # type: ignore[no-untyped-call]
    return optimizer


def check_optimizer(name: str, device: str) -> None:
    """Raise ConfigError, with the reason, if the optimizer fails on a small tensor on this machine."""
    if name == "adamw":
        return
    try:
        weight = nn.Parameter(torch.ones(QUANTISED_ELEMENTS, device=device))
        weight.grad = torch.ones_like(weight)
        make_optimizer(name, {"": weight}, 0.1, BETAS, 0.0).step()
        moved = float(weight.detach().max()) < 1
    except (ImportError, OSError, RuntimeError, NotImplementedError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _unusable(name, device, reason) from error
    if not moved:
        raise _unusable(name, device, "its step changes no weight")


def _unusable(name: str, device: str, why: str) -> ConfigError:
    return ConfigError(
        f"The optimizer {name} does not work here on {device}: {why}.",
        f"Take adamw, or type: {install_command('bitsandbytes')}",
    )


def take_step(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Make one optimizer step, completely or not at all.

    A parameter's first step allocates its moments. If memory runs out then, other parameters may have been updated already:
    torch's AdamW allocates a complete parameter group before it updates it, bitsandbytes allocates and updates parameter by
    parameter. So until all moments exist, the weights and moments from before the step are copied to the CPU. If memory runs
    out, they are restored, and the step is tried once more. Later steps allocate no moments; if memory runs out in such a step,
    the exception is raised at once. `parameters` are all parameters that the optimizer trains, by name. Raise InfraError if
    memory does not suffice for the moments; weights and moments are unchanged.
    """
    allocates = any(p.grad is not None and not optimizer.state.get(p) for p in parameters.values())
    if not allocates:
        optimizer.step()
        return
    weights = {name: p.detach().to("cpu", copy=True) for name, p in parameters.items()}
    moments = {name: tensor.clone() for name, tensor in optimizer_state(optimizer, parameters).items()}
    for is_last in (False, True):
        try:
            optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if classify(error) != "out_of_memory":
                raise
            _restore(optimizer, parameters, weights, moments)
            if is_last:
                raise InfraError("Memory does not suffice for the optimizer's moments.", NO_ROOM) from error
        else:
            return


@torch.no_grad()
def _restore(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    weights: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
) -> None:
    optimizer.state.clear()
    for device in {parameter.device for parameter in parameters.values()}:
        free_cached_blocks(device)
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
    set_optimizer_state(optimizer, parameters, moments)


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the optimizer's state as tensors on the CPU, by `<parameter>:<moment>`. It is empty before the first step."""
    return {
        f"{name}:{moment}": torch.as_tensor(value).cpu().contiguous()
        for name, parameter in parameters.items()
        for moment, value in optimizer.state.get(parameter, {}).items()
    }


def set_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Copy a state that `optimizer_state` returned into the optimizer. Raise CheckpointError if the state does not fit."""
    states: dict[str, dict[str, Tensor]] = {}  # of no parameter that was left alone so far
    for key, tensor in tensors.items():
        name, _, moment = key.rpartition(":")
        states.setdefault(name, {})[moment] = tensor
    for name, state in states.items():
        if name not in parameters or not _state_fits(optimizer, parameters[name], state):
            raise CheckpointError("The optimizer's state in the checkpoint belongs to another model or optimizer.")
    for name, state in states.items():
        parameter = parameters[name]
        whole = isinstance(optimizer, torch.optim.AdamW)
        optimizer.state[parameter] = {
            moment: tensor.to(parameter.device, copy=True) if whole or moment != "step" else int(tensor)
            for moment, tensor in state.items()
        }


def _state_fits(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> bool:
    """Return True if the state has the names and shapes of the moments that the optimizer stores for the parameter."""
    shape = tuple(parameter.shape)
    if isinstance(optimizer, torch.optim.AdamW):
        expected: dict[str, tuple[int, ...]] = {"step": (), "exp_avg": shape, "exp_avg_sq": shape}
    else:
        expected = {"step": (), "state1": shape, "state2": shape}
        if parameter.numel() >= QUANTISED_ELEMENTS:
            blocks = (-(-parameter.numel() // 256),)
            expected |= {"qmap1": (256,), "qmap2": (256,), "absmax1": blocks, "absmax2": blocks}
    return {moment: tuple(tensor.shape) for moment, tensor in state.items()} == expected


def learning_rate_share(options: UpdateConfig, iteration: int, iterations: int) -> float:
    """Return the factor of the learning rate in an iteration, from 0 to 1. Iterations are counted from 0 here.

    The factor rises over the first `warmup` iterations. In the first iteration after the warm-up, the factor is 1. With a
    decay, the factor then falls and would be 0 in the iteration after the last one.
    """
    if iteration < options.warmup:
        return (iteration + 1) / (options.warmup + 1)
    if options.decay == "none":
        return 1.0
    gone = (iteration - options.warmup) / max(1, iterations - options.warmup)
    return max(0.0, 1 - gone) if options.decay == "linear" else 0.5 * (1 + math.cos(math.pi * min(1.0, gone)))


def next_kl_coef(coef: float, kl: float, episodes: int, options: AlgorithmConfig) -> float:
    """Return the weight of the KL for the next update, from the KL to the reference in this one (`kl`, in nats per token).

    The new weight is coef (1 + clip(kl / target - 1, +-0.2) episodes / horizon). Without a target, the weight does not change.
    Source: Ziegler et al., arXiv 1909.08593, section 2.2.
    """
    if options.kl_target is None:
        return coef
    error = max(-MAX_ERROR, min(MAX_ERROR, kl / options.kl_target - 1))
    return coef * (1 + error * episodes / (options.kl_horizon or KL_HORIZON))


class LossScale:
    """A power of two that multiplies the loss and is divided out of the gradients; 1 unless `module` has float16 weights.

    The gradient of one token among many can be smaller than float16's smallest number, 2**-24, and would become 0. If a
    gradient is neither too small nor too large for float16, the scale does not change it. A gradient that overflows is computed
    again with half the scale. The paper drops that step instead (dynamic loss scaling, Micikevicius et al. 2018, arXiv
    1710.03740).

    Raises:
        ConfigError: the trainable weights are float16, which has too few bits for optimizer steps.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        if any(parameter.requires_grad and parameter.dtype == torch.float16 for parameter in parameters):
            raise full_float16_error()
        self.is_used = any(parameter.dtype == torch.float16 for parameter in parameters)
        self.factor = INITIAL_FACTOR if self.is_used else 1.0
        self.good_steps = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the factor."""
        if self.is_used:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / self.factor)

    def must_repeat(self, loss: float, norm: float) -> bool:
        """Adapt the factor to the result of a backward pass.

        Return True if the pass must be repeated, with a smaller factor. `loss` is the loss. `norm` is the norm of the gradient.
        """
        if not self.is_used:
            return False
        if math.isfinite(norm):
            self.good_steps += 1
            if self.good_steps >= GROWTH_STEPS and self.factor < MAX_FACTOR:
                self.factor, self.good_steps = 2 * self.factor, 0
            return False
        if not math.isfinite(loss) or self.factor == 1:  # no factor mends that
            return False
        self.factor, self.good_steps = self.factor / 2, 0
        return True

    @property
    def state(self) -> tuple[float, int]:
        """The factor and the number of steps without an overflow, for a checkpoint.

        A training that is resumed with this state scales like an uninterrupted one.
        """
        return self.factor, self.good_steps

    @state.setter
    def state(self, state: tuple[float, int]) -> None:
        factor, good_steps = state  # from a file: a TypeError or ValueError where it is not as it was written
        self.factor, self.good_steps = float(factor), int(good_steps)
