"""The rounding noise of a model in 16 bits or on a 4-bit base, measured on the episode that is verified.

A token's logprob depends on how the model was run: on all tokens of a row at once, as in verification, or token by token in a
batch, as in the sampler. In 16 bits, two such readings differ so much that a constant tolerance would also allow forgery. So
each sampled token is read a second time, in the sampler's way and in a batch of three rows. The difference between the two
readings measures the rounding noise on this device, with these weights, for these tokens.

The logprob of a token with probability p has the noise (1 - p) * e, where e is the noise of the logits. At a position, e is the
root mean square of (difference of logprobs) / (1 - p) over all tokens that could be drawn there. e is at least the root mean
square over all positions of the episode. A few tokens measure the noise badly, so for N tokens e is multiplied by 1 + 10 / N.
This noise is the unit of the bounds below (one "deviation").

The bound of a draw is a multiple of the largest distance between the two readings' cumulative distributions. No token's
tolerance exceeds `verify_tokens.TOLERANCES`. docs/measurements.md says how often honest episodes fail and forged ones pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from agentrl.workflow.analysis.verify_episode import NoiseReport
from agentrl.workflow.inference.model_rows import ModelRows

MAX_DEVIATION = 8.0
"""The largest allowed difference between one token's logprob and the record, in deviations."""
MAX_SHIFT = 3.0
"""The largest allowed distance of a draw from its token, as a multiple of the distance between the two readings' distributions.
"""
MAX_RMS, MAX_MEAN, PER_TOKEN = 1.25, 0.1, 4.0
"""The limits for all deviations of an episode with N tokens.

Their root mean square is at most `MAX_RMS` + `PER_TOKEN` / sqrt(N). The absolute value of their mean is at most `MAX_MEAN` +
`PER_TOKEN` / sqrt(N).
"""
LEAST_DOUBT = 0.01
"""The lowest value of 1 - p that is used.

For tokens that are more certain, the rounding of float32 itself then counts as noise.
"""


@dataclass(frozen=True, slots=True)
class TokenNoise:
    """The noise at a token's position, from two readings.

    Args:
        again: the token's logprob in the second reading, in nats.
        doubt: 1 - p, at least `LEAST_DOUBT`; p is the token's probability.
        spread: the noise of the logits, in nats.
        shift: the largest distance between the two cumulative distributions, in probability.
    """

    again: float
    doubt: float
    spread: float
    shift: float


def read_in_company(rows: ModelRows, ids: Sequence[int], places: Sequence[int]) -> Tensor:
    """Return the logits (N, V) from which the tokens at N positions were drawn. The positions are ascending.

    The tokens are read one by one, in a batch with two other rows. The other rows have the same tokens, without the first one
    or the first two.
    """
    logits: list[Tensor] = []
    cuts = (2, 1, 0) if places[0] > 3 else (0, 0, 0)  # a row needs a token
    try:
        for place, before in zip(places, (None, *places), strict=False):
            if before != place - 1:
                rows.clear()
                rows.read(0, [tuple(ids[cut : place - 1]) for cut in cuts])
            read = torch.tensor([place - 1 - cut for cut in cuts])
            logits.append(rows.next_logits(torch.full((3,), ids[place - 1]), read)[2])
    finally:
        rows.clear()
    return torch.stack(logits)


def compare_readings(logprobs: Tensor, again: Tensor, cumulative: tuple[Tensor, Tensor], ids: Tensor) -> list[TokenNoise]:
    """Return the noise at each of N positions.

    Args:
        logprobs, again: (N, V), the logprobs of the first and of the second reading, in nats.
        cumulative: the cumulative distributions of the two readings, (N, V) each.
        ids: (N,), the tokens.
    """
    shares = logprobs.exp()
    deviations = (again - logprobs) / (1 - shares).clamp(min=LEAST_DOUBT)
    spread = torch.where(shares > 0, shares * deviations**2, 0.0).sum(-1).sqrt()
    one, other = (sums / sums[:, -1:] for sums in cumulative)
    chosen = ids[:, None]
    doubt = (1 - shares.gather(-1, chosen)[:, 0]).clamp(min=LEAST_DOUBT)
    values = (again.gather(-1, chosen)[:, 0], doubt, spread, (one - other).abs().amax(-1))
    return [TokenNoise(*numbers) for numbers in zip(*(value.tolist() for value in values), strict=True)]


@dataclass(frozen=True, slots=True)
class NoiseBounds:
    """The tolerances of an episode's tokens. The module's docstring defines the two readings and the noise e.

    Args:
        spread: the root mean square of the noise e over all positions of the episode, in nats.
        shift: the distance between the cumulative distributions of the two readings, over all positions, as a probability.
        factor: 1 + 10 / N for an episode with N tokens; e is multiplied by it.
    """

    spread: float
    shift: float
    factor: float

    @classmethod
    def of(cls, noises: Sequence[TokenNoise]) -> "NoiseBounds":
        """Return the bounds for the tokens with these noises."""
        count = max(1, len(noises))
        spread, shift = (sqrt(sum(getattr(noise, name) ** 2 for noise in noises) / count) for name in ("spread", "shift"))
        return cls(spread, shift, 1 + 10 / count)

    def deviation(self, noise: TokenNoise) -> float:
        """Return the noise of the token's logprob, in nats: the length of one deviation."""
        return self.factor * noise.doubt * max(noise.spread, self.spread)

    def logprob(self, noise: TokenNoise) -> float:
        """Return the tolerance of the token's logprob, in nats."""
        return MAX_DEVIATION * self.deviation(noise)

    def draw(self, noise: TokenNoise) -> float:
        """Return the tolerance of the token's draw, in probability."""
        return MAX_SHIFT * max(noise.shift, self.shift)

    def report(self, noises: Sequence[TokenNoise], logprobs: Sequence[float], recorded: Sequence[float]) -> NoiseReport:
        """Compare the recorded logprobs of all tokens with the noise.

        The deviations must not be too large together, and must not mostly have the same sign. `logprobs` are those of the first
        reading, in nats. `recorded` are the recorded ones.
        """
        units = [self.deviation(noise) or 1.0 for noise in noises]
        off = [(old - new) / unit for old, new, unit in zip(recorded, logprobs, units, strict=True)]
        # The second reading is the sampler's own way, so that a difference between the ways is in no mean.
        drift = [(old - noise.again) / unit for old, noise, unit in zip(recorded, noises, units, strict=True)]
        count = max(1, len(off))
        return NoiseReport(
            noise=self.spread,
            rms=sqrt(sum(value**2 for value in off) / count),
            max_rms=MAX_RMS + PER_TOKEN / sqrt(count),
            mean=sum(drift) / count,
            max_mean=MAX_MEAN + PER_TOKEN / sqrt(count),
        )
