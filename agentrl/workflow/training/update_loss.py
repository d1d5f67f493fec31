"""The loss of a microbatch in an update, and its metrics. See `training.losses`."""

import math

import torch
from torch import Tensor

from agentrl.workflow.algorithms import find_gradient, resolve_options
from agentrl.workflow.config import RunConfig
from agentrl.workflow.models.logprobs import Scores
from agentrl.workflow.plugins import find
from agentrl.workflow.training.losses import (
    LossTerms,
    Normaliser,
    Surrogate,
    TokenBatch,
    aggregate,
    importance_weights,
    k3,
    policy_loss,
    value_loss,
)
from agentrl.workflow.training.prepared_update import TokenConstants
from agentrl.workflow.training.training_rows import Microbatch

LOW_LOG_RATIO, HIGH_LOG_RATIO = math.log(0.9), math.log(1.1)
"""The logarithms of 0.9 and 1.1.

`importance_outside` is the share of tokens whose log ratio of trainer to sampler is outside this range.
"""


class UpdateLoss:
    """The loss of a run's updates: a surrogate and, if the options say so, a KL, an entropy bonus and a critic's error."""

    def __init__(self, config: RunConfig, same_numbers: bool) -> None:
        """Make the loss of this config's updates.

        Args:
            same_numbers: see `RunConfig.importance_method`.
        """
        algorithm = find_gradient(config.algorithm.name)
        self._config = config
        self._options = resolve_options(config.algorithm)
        self._surrogate: Surrogate = find("surrogates", algorithm.surrogate_of(config.algorithm))
        self.importance = config.importance_method(same_numbers)

    def terms(
        self, batch: Microbatch, scores: Scores, constants: TokenConstants, counts: Normaliser, kl_coef: float
    ) -> LossTerms:
        """Return the microbatch's share of its minibatch's loss, by the `counts` of the minibatch."""
        mask, behavior = batch.loss_mask[:, 1:], batch.behavior_logprobs[:, 1:]  # (B, T-1)
        logprobs, credit = scores.logprobs, constants.advantages
        start = logprobs.detach() if constants.start is None else constants.start
        old = behavior.to(logprobs.dtype) if self._config.source.given else start
        sums: dict[str, Tensor] = {}
        cap, level = self._options.importance_cap, self._options.importance_level
        weights, cut = importance_weights(start, behavior, mask, cap, level, self.importance or "truncate")
        if self.importance is not None:
            credit = credit * weights.to(credit.dtype)
        tokens = TokenBatch(logprobs, old, credit, mask, constants.reference, scores.entropy, batch.weights)
        terms = policy_loss(self._surrogate, tokens, self._options.model_copy(update={"kl_coef": kl_coef}), counts)
        loss = terms.loss
        if scores.values is not None and constants.values is not None and constants.returns is not None:
            errors = value_loss(scores.values, constants.values, constants.returns, self._config.critic.clip or None)
            loss = loss + self._config.critic.loss_coef * aggregate(errors, mask, "token-mean", counts)
            sums["value_loss"] = (errors * mask).sum().detach()
        log_ratio = torch.where(mask, start - behavior, 0.0)
        sums |= {
            "loss": loss.detach(),
            "entropy": (scores.entropy.detach() * mask).sum(),
            "sampler_difference_mean": log_ratio.abs().sum(),
            "policy_kl": k3(*(torch.where(mask, values, 0.0) for values in (start, logprobs.detach()))).sum(),
            "sampler_difference_max": log_ratio.abs().max(),
            "importance_weight": (weights * mask).sum(),
            "importance_square": (weights**2 * mask).sum(),
            "importance_truncated": cut.sum(),
            "importance_outside": ((log_ratio < LOW_LOG_RATIO) | (log_ratio > HIGH_LOG_RATIO)).sum(),
            **terms.sums,
        }
        return LossTerms(loss, sums)
