"""Keyed sampling: one uniform number per (key, position), converted to a token by the inverse CDF. Pure functions.

A draw depends on no other state. So an episode that is sampled again, on another machine or in another batch, has the same
tokens.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 128
"""The number of tokens per block.

Probabilities are summed by blocks first. Then only the block that contains the draw is searched.
"""


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return uniform numbers (N,) in [0, 1) for keys (N,) and positions (N,).

    The hash gives the same numbers on every machine.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014), applied to the position and then to key + that result.
    """
    return (_mix(keys + _mix(positions)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor | float,
    floor: Tensor | None = None,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverse CDF over float32 probabilities, in vocabulary order.

    The probabilities are first summed by blocks of the vocabulary. Then only the block that contains the draw is searched. So
    only one tensor as large as the logits is written, and none in float64.

    Args:
        logits: (N, V); float64 is kept, other types are computed in float32.
        uniforms: (N,) float64 in [0, 1).
        temperature: a number, or (N,).
        floor: (N,), the lowest logit that may be drawn, already divided by the temperature (see `lowest_logit`).
        allowed: (N, V) bool, the tokens that a grammar allows, at least one in each row.

    Returns:
        The ids (N,) int64, never one of probability 0 unless `allowed` leaves no other, and their logprobs (N,) float32 over
        the complete vocabulary. In a row whose logits contain a NaN, the logprob is NaN.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    vocabulary = logits.shape[-1]
    scale = torch.as_tensor(temperature, dtype=logits.dtype, device=logits.device).reshape(-1, 1)
    top = logits.amax(-1, keepdim=True)
    weights = logits.new_empty((len(logits), -(-vocabulary // BLOCK) * BLOCK))
    weights[:, vocabulary:] = -torch.inf
    torch.sub(logits, top, out=weights[:, :vocabulary])
    weights.div_(scale).exp_()
    blocks = weights.view(len(logits), -1, BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)
    total = sums[:, -1].log()
    if allowed is not None:  # the allowed tokens may all be so unlikely that their weights are 0
        drawable = logits.masked_fill(~allowed, -torch.inf)
        torch.sub(drawable, drawable.amax(-1, keepdim=True), out=weights[:, :vocabulary])
        weights[:, :vocabulary].div_(scale).exp_()
        sums = blocks.sum(-1).double().cumsum(-1)
    if floor is not None:
        weights[:, :vocabulary].masked_fill_(scale_logits(logits, temperature) < floor[:, None], 0.0)
        sums = blocks.sum(-1).double().cumsum(-1)
    ids = _choose_ids(blocks, sums, uniforms).clamp(max=vocabulary - 1)
    logprobs = ((logits.gather(-1, ids) - top) / scale)[:, 0].double() - total
    return ids[:, 0], logprobs.float()


def draw(logits: Tensor, uniforms: Tensor, temperature: Tensor | float, floor: Tensor | None = None) -> Tensor:
    """Return the ids and the logprobs of `sample` as one tensor (2, N), float64, in which ids are exact.

    So a CPU waits for a GPU once, not twice.
    """
    ids, logprobs = sample(logits, uniforms, temperature, floor)
    return torch.stack([ids.double(), logprobs.double()])


def allowed_mass(logits: Tensor, temperature: Tensor | float, allowed: Tensor) -> Tensor:
    """Return the sum of the probabilities of the allowed tokens: (N,), float64.

    Args:
        logits: (N, V).
        temperature: a number, or (N,).
        allowed: (N, V) bool.
    """
    scaled = scale_logits(logits, temperature).double()
    return (scaled.masked_fill(~allowed, -torch.inf).logsumexp(-1) - scaled.logsumexp(-1)).exp()


def likeliest(logits: Tensor, temperature: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ids and the logprobs, (N, K) each, of the K likeliest tokens of each row, likeliest first.

    The logprobs are over the complete vocabulary.

    Args:
        logits: (N, V).
        temperature: (N,).
        count: K, at most the size of the vocabulary.
    """
    scaled = scale_logits(logits, temperature)
    best = scaled.topk(min(count, scaled.shape[-1]), dim=-1)
    return best.indices, best.values - scaled.logsumexp(-1, keepdim=True)


def _choose_ids(blocks: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """Return the ids (N, 1) that the uniforms (N,) select among weights (N, B, BLOCK).

    `sums` (N, B) are the cumulative sums of the blocks' weights.
    """
    total = sums[:, -1:].contiguous()
    target = uniforms.double()[:, None] * total
    block = _first_place(sums, target, total)
    chosen = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(-1)
    inside = chosen[:, -1:].contiguous()
    # Rounding of the cumulative sums must not put a draw before the block's first weight.
    within = (target - (sums.gather(-1, block) - inside)).clamp(min=0.0)
    return block * BLOCK + _first_place(chosen, within, inside)


def _first_place(sums: Tensor, target: Tensor, total: Tensor) -> Tensor:
    """Return the first index (N, 1) at which the sums (N, B) exceed the target.

    If the target exceeds all sums because of rounding, return the last index that has a weight.
    """
    return torch.minimum(torch.searchsorted(sums, target, right=True), torch.searchsorted(sums, total)).clamp(
        max=sums.shape[1] - 1
    )


def distribution(logits: Tensor, temperature: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return the sampling distribution: its logprobs (N, V), and the cumulative sums (N, V) of its float32 probabilities, in
    float64.
    """
    everything = torch.log_softmax(scale_logits(logits, temperature), dim=-1)
    return everything, cumulative_probabilities(everything)


def scale_logits(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """Divide the logits (N, V) by the temperature, a number or (N,). The result has float64 if the logits do, else float32."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits / torch.as_tensor(temperature, dtype=logits.dtype, device=logits.device).reshape(-1, 1)


def cumulative_probabilities(logprobs: Tensor) -> Tensor:
    """Return the cumulative sums (N, V), float64, of the float32 probabilities, in vocabulary order."""
    return logprobs.exp().float().double().cumsum(-1)


WIDTHS = (256, 8192)
"""The numbers of likeliest tokens that are tried before all tokens: sorting a complete vocabulary takes as long as a small
model.
"""


def mask_below(logits: Tensor, floor: Tensor) -> Tensor:
    """Return the logits (N, V), with -inf for those below the floor (N,)."""
    return logits.masked_fill(logits < floor[:, None], -torch.inf)


def lowest_logit(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the lowest logit (N,) that may be drawn: `top_k` applies first, then `top_p` to the remaining tokens, then
    `min_p`.

    This is the order of transformers' `generate`, after the temperature (vLLM applies `min_p` first). The limit is a logit, not
    a rank. So tokens that are as likely as the last allowed token are allowed too. The likeliest token is always allowed.

    Args:
        logits: (N, V) divided by the temperature, up to a constant per row; logprobs are allowed.
        top_k: (N,) int64, the number of likeliest tokens; 0: all (Fan et al., arXiv 1805.04833).
        top_p: (N,) float, the probability that the allowed tokens must reach together; 1: all (Holtzman et al., arXiv
            1904.09751).
        min_p: (N,) float, the lowest probability, as a share of the likeliest token's; 0: all (Nguyen et al., arXiv
            2407.01082).

    Returns:
        (N,) in the logits' dtype; -inf if all tokens are allowed, NaN in a row whose logits contain a NaN.
    """
    vocabulary = logits.shape[-1]
    for width in (*(width for width in WIDTHS if width < vocabulary), vocabulary):
        best = logits.topk(width, dim=-1).values
        by_count = _kth(best, top_k)
        mass = mask_below(logits, by_count).logsumexp(-1)
        by_mass, reached = _nucleus(best, mass, top_p)
        if width == vocabulary or bool((reached & (top_k <= width)).all()):
            break
    by_share = best[:, 0] + min_p.to(logits.dtype).log()
    return torch.maximum(torch.maximum(by_count, by_mass), by_share)


def _kth(best: Tensor, top_k: Tensor) -> Tensor:
    last = best.gather(-1, (top_k.clamp(1, best.shape[-1]) - 1)[:, None])[:, 0]
    return torch.where(top_k > 0, last, -torch.inf)


def _nucleus(best: Tensor, mass: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest of the best logits (N, W) that top_p allows, and whether these logits reach top_p together; both (N,).

    A logit is allowed if the logits before it have less than top_p of the mass (N,).
    """
    sums = (best - mass[:, None]).double().exp().cumsum(-1)
    before = (sums[:, :-1] < top_p[:, None]).sum(-1)
    last = best.gather(-1, before[:, None])[:, 0]
    return torch.where(top_p < 1, last, -torch.inf), (top_p >= 1) | (sums[:, -1] >= top_p)


def draw_distance(cumulative: Tensor, uniforms: Tensor, ids: Tensor) -> Tensor:
    """Return the distance (N,) from each uniform number to the interval of its id in [0, 1); 0 inside the interval."""
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
