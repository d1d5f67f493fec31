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
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scale = torch.as_tensor(temperature, dtype=logits.dtype, device=logits.device).reshape(-1, 1)
    everything = torch.log_softmax(logits / scale, dim=-1)
    cumulative = everything.exp().float().double().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    # The sum of rounded probabilities is not 1: the draw is scaled to it, instead of favouring the last token.
    ids = torch.searchsorted(cumulative, uniforms.double()[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total)
    ids = torch.minimum(ids, last).clamp(max=logits.shape[-1] - 1)
    return ids[:, 0], everything.gather(-1, ids)[:, 0].float()


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
