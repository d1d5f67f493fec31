"""Schedules over updates: the learning rate, and the weight of the KL.

The learning rate follows from the iteration's number alone, so that a resumed run goes on with the one it would have had.
"""

import math

from agentrl.workflow.config import AlgorithmConfig, UpdateConfig

MAX_ERROR = 0.2
"""The KL's distance from its target counts as at most this share of it."""

KL_HORIZON = 10_000
"""The default number of episodes in which kl_coef grows by at most a fifth."""


def learning_rate_share(options: UpdateConfig, iteration: int, iterations: int) -> float:
    """Return share of the learning rate in an iteration, counted from 0: up over `warmup` of them, then down to 0 after the
    last.

    The decay is as long as what is left after the warm-up; the first iteration after it has the whole rate.
    """
    if iteration < options.warmup:
        return (iteration + 1) / (options.warmup + 1)
    if options.decay == "none":
        return 1.0
    gone = (iteration - options.warmup) / max(1, iterations - options.warmup)
    return max(0.0, 1 - gone) if options.decay == "linear" else 0.5 * (1 + math.cos(math.pi * min(1.0, gone)))


def next_kl_coef(coef: float, kl: float, episodes: int, options: AlgorithmConfig) -> float:
    """Return the weight of the KL after an update in which the KL to the reference was `kl`, in nats per token.

    coef (1 + clip(kl / target - 1, +-0.2) episodes / horizon); without a target it stays.
    Source: Ziegler et al., arXiv 1909.08593, section 2.2.
    """
    if options.kl_target is None:
        return coef
    error = max(-MAX_ERROR, min(MAX_ERROR, kl / options.kl_target - 1))
    return coef * (1 + error * episodes / (options.kl_horizon or KL_HORIZON))
