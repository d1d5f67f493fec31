"""Logprobs of chosen tokens without all logits: a language model's head, applied to a few hundred positions at a time.

With a vocabulary of 152,000 tokens, the logits of 4,096 positions take 2.5 GB, and their gradient takes as much. This is the
peak of an update's memory. So the head is applied only to the requested positions, in chunks. Only one chunk of (positions,
vocabulary) exists at a time.

The gradient needs no stored logits either. With p = softmax(W h / T), d logprob(t) / d h = (W[t] - p W) / T. This is one vector
per position. It is computed together with the chunk, and the backward pass only scales it. If the head itself trains, d
logprob(t) / d W = (onehot(t) - p) h / T is as large as the chunk, so the backward pass computes each chunk again. An entropy
bonus also needs the entropy's gradient, d H / d h = -(p (log p + H)) W / T. It is computed together with the chunk too.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from agentrl.workflow.models.memory_estimate import HEAD_CHUNK


def head_logprobs(
    head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float, entropy_trains: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the logprobs of the targets after the hidden states, with a gradient, and the entropies.

    Args:
        head: (H) -> (V), with or without a bias, frozen or trained.
        hidden: (N, H).
        targets: (N,) ids.
        temperature: the divisor of the logits.
        entropy_trains: whether the entropies have a gradient too.

    Returns:
        Two tensors (N,), in nats: float32, or float64 if the hidden states are float64.
    """
    device = hidden.device.type
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    if torch.is_autocast_enabled(device):  # cast here, so that the backward pass computes in the same precision
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        result: tuple[Tensor, Tensor] = _Head.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, temperature, entropy_trains
        )
    return result


def logits_logprobs(logits: Tensor, targets: Tensor, temperature: float, entropy_trains: bool = False) -> tuple[Tensor, Tensor]:
    """Compute the result of `head_logprobs` from logits (N, V) that a model returned.

    The logits are processed in chunks. If a gradient is needed, each chunk is computed twice.
    """
    size = _chunk_size(logits.shape[-1])
    pairs = zip(torch.split(logits, size), torch.split(targets, size), strict=True)
    parts = [checkpoint(_scores, *pair, temperature, entropy_trains, use_reentrant=False) for pair in pairs]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _scores(logits: Tensor, targets: Tensor, temperature: float, entropy_trains: bool) -> tuple[Tensor, Tensor]:
    everything = torch.log_softmax(_widen(logits) / temperature, dim=-1)
    seen = everything if entropy_trains else everything.detach()
    return everything.gather(-1, targets[:, None])[:, 0], -torch.linalg.vecdot(seen.exp(), seen)


class _Head(Function):
    """The linear head and the softmax as one differentiable function; H hidden features, V token ids, N positions."""

    @staticmethod
    def forward(
        ctx: "_Context",
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy_trains: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the logprobs and the entropies, (N,) each.

        For the backward pass, save their gradients (N, H), or all inputs if the head trains.
        """
        like = _widen(hidden[:0])
        logprobs, entropy = like.new_empty(len(hidden)), like.new_empty(len(hidden))
        trains = any(ctx.needs_input_grad[1:3])
        shape = hidden.shape if ctx.needs_input_grad[0] and not trains else (0,)
        slopes, spreads = like.new_empty(shape), like.new_empty(shape if entropy_trains else (0,))
        for part in _chunk_slices(len(hidden), len(weight)):
            shares, logs, total = _softmax(hidden[part], weight, bias, temperature)
            logprobs[part] = logs.gather(-1, targets[part, None])[:, 0] - total.log()
            entropy[part] = total.log() - torch.linalg.vecdot(shares, logs) / total
            if len(spreads):
                spreads[part] = _entropy_gradient(shares, logs, total).to(weight.dtype) @ weight
            if len(slopes):
                slopes[part] = _logit_gradient(shares, total, targets[part], 1.0).to(weight.dtype) @ weight
        ctx.save_for_backward(slopes, spreads, targets, *((hidden, weight, bias) if trains else ()))
        ctx.temperature = temperature
        ctx.dtype = hidden.dtype
        ctx.entropy_trains = entropy_trains
        if not entropy_trains:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: "_Context", *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the hidden states and, if the head trains, of its weight and bias.

        Args:
            gradients: d loss / d logprobs and d loss / d entropy, (N,) each.
        """
        scale = gradients[0] / ctx.temperature
        widening = gradients[1] / ctx.temperature if ctx.entropy_trains else None
        slopes, spreads, targets, *inputs = ctx.saved_tensors
        if not inputs:
            to_hidden = slopes * scale[:, None]
            if widening is not None:
                to_hidden += spreads * widening[:, None]
            return to_hidden.to(ctx.dtype), None, None, None, None, None
        hidden, weight, bias = inputs
        to_hidden, to_weight = torch.empty_like(hidden), _widen(weight[:0]).new_zeros(weight.shape)
        to_bias = None if bias is None else to_weight.new_zeros(len(bias))
        for part in _chunk_slices(len(hidden), len(weight)):
            shares, logs, total = _softmax(hidden[part], weight, bias, ctx.temperature)
            spread = None if widening is None else _entropy_gradient(shares, logs, total) * widening[part, None]
            rise = _logit_gradient(shares, total, targets[part], scale[part])
            if spread is not None:
                rise += spread
            narrow = rise.to(weight.dtype)
            to_hidden[part] = narrow @ weight
            _add_product(to_weight, narrow.T, hidden[part])
            if to_bias is not None:
                to_bias += rise.sum(0)
        return to_hidden, to_weight.to(weight.dtype), None if to_bias is None else to_bias.to(weight.dtype), None, None, None


class _Context(FunctionCtx):
    """The values that `forward` saves for `backward`."""

    temperature: float
    dtype: torch.dtype
    entropy_trains: bool
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]


def _softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute exp(l) and l, (C, V) each, of a chunk, and the sums (C,) of exp(l). l is logits / T minus the maximum of each
    row.
    """
    logs = _widen(linear(hidden, weight, bias))
    if temperature != 1:
        logs /= temperature
    logs -= logs.amax(-1, keepdim=True)
    shares = logs.exp()
    return shares, logs, shares.sum(-1)


def _logit_gradient(shares: Tensor, total: Tensor, targets: Tensor, scale: Tensor | float) -> Tensor:
    """Compute (onehot(t) - p) * scale, (C, V), of a chunk. The result overwrites the probabilities.

    The 1 - p of a likely token is small. It is computed here, because the difference of two products in 16 bits would be noise.
    """
    rise = shares.mul_((-scale / total)[:, None])
    rise[torch.arange(len(rise), device=rise.device), targets] += scale
    return rise


def _entropy_gradient(shares: Tensor, logs: Tensor, total: Tensor) -> Tensor:
    """Compute d entropy / d (logits / T) = -p (log p + H), (C, V), of a chunk, in new memory."""
    ours = logs - total.log()[:, None]
    probabilities = shares / total[:, None]
    entropy = -torch.linalg.vecdot(probabilities, ours)
    return probabilities.mul_(-(ours + entropy[:, None]))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`. The sum has the dtype of `total`."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _chunk_slices(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = _chunk_size(vocabulary)
    return (slice(start, start + size) for start in range(0, tokens, size))


def _chunk_size(vocabulary: int) -> int:
    return max(1, HEAD_CHUNK // vocabulary)


def _widen(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
