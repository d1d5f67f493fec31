"""How a token is drawn: one uniform number per (key, position), turned into a token by the inverse CDF. Pure functions.

Nothing else decides a draw, so that an episode that is sampled again, elsewhere, in other company, says the same.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (key, position), both (N,): a counter hash, the same on every machine.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014), once over the position and once over key + that.
    """
    return (_mix(keys + _mix(positions)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: Tensor, uniforms: Tensor, temperature: Tensor | float) -> tuple[Tensor, Tensor]:
    """Draws one token per row by inverse CDF over float32 probabilities, in vocabulary order.

    Args:
        logits: (N, V); float64 is kept, all else is computed in float32.
        uniforms: (N,) float64 in [0, 1).
        temperature: a number, or (N,).

    Returns:
        ids (N,) int64, never one of probability 0, and their logprobs (N,) float32. A row with a NaN gives the logprob NaN.
    """
    everything, cumulative = distribution(logits, temperature)
    ids = draw(cumulative, uniforms)[:, None]
    return ids[:, 0], everything.gather(-1, ids)[:, 0].float()


def distribution(logits: Tensor, temperature: Tensor | float) -> tuple[Tensor, Tensor]:
    """What tokens are drawn from: their logprobs (N, V), and the sums (N, V) float64 of their float32 probabilities so far."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scale = torch.as_tensor(temperature, dtype=logits.dtype, device=logits.device).reshape(-1, 1)
    everything = torch.log_softmax(logits / scale, dim=-1)
    return everything, everything.exp().float().double().cumsum(-1)


def draw(cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """The ids (N,) that the uniforms (N,) choose by the sums (N, V) of `distribution`."""
    total = cumulative[:, -1:].contiguous()
    # The sum of rounded probabilities is not 1: the draw is scaled to it, instead of favouring the last token.
    ids = torch.searchsorted(cumulative, uniforms.double()[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(ids, last).clamp(max=cumulative.shape[-1] - 1)[:, 0]


def distance(cumulative: Tensor, uniforms: Tensor, ids: Tensor) -> Tensor:
    """How much probability (N,) lies between each uniform and its id's share of [0, 1); 0 inside of it."""
    total = cumulative[:, -1]
    draws = uniforms.double() * total
    above = cumulative.gather(-1, ids[:, None])[:, 0]
    below = torch.where(ids > 0, cumulative.gather(-1, (ids - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    return torch.maximum(below - draws, draws - above).clamp(min=0.0) / total


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
