"""The scoring of rows with the policy: logprobs and values of their tokens, with or without a gradient."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import compress

import torch
from torch import Tensor, nn

from agentrl.workflow.config import RunConfig
from agentrl.workflow.models.headers import read_model_files
from agentrl.workflow.models.logprobs import Scores, shares_prefixes, token_scores
from agentrl.workflow.models.memory import free_cached_blocks
from agentrl.workflow.models.memory_estimate import MICROBATCH_TOKENS, microbatch_that_fits, shape_of
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.losses import k3
from agentrl.workflow.training.oom_backoff import OomBackoff
from agentrl.workflow.training.ranks import ALONE, Ranks
from agentrl.workflow.training.training_rows import (
    Microbatch,
    Row,
    TokenLayout,
    collate,
    microbatches,
    row_tokens,
    size,
)
from agentrl.workflow.training.update_cost import UpdateCost

NO_ROOM = "Set update.gradient_checkpointing=true or model.load_in_4bit=true, or lower rollout.max_new_tokens."


def _microbatch_tokens(policy: Policy, config: RunConfig) -> int:
    """Return the most tokens of a microbatch: the number in the config, or what fits into the free memory of a GPU.

    The gradient depends on this number only by rounding. Under `numerics: exact` the number does not depend on the device.
    """
    if config.update.microbatch_tokens is not None:
        return config.update.microbatch_tokens
    if policy.device.type != "cuda" or config.model.numerics == "exact":
        return MICROBATCH_TOKENS
    free_cached_blocks(policy.device)
    free, _ = torch.cuda.mem_get_info(policy.device)
    shape = shape_of(config, read_model_files(policy.folder), policy.rank, on_gpu=True)
    return microbatch_that_fits(shape, free, config.update.gradient_checkpointing)


class RowScorer:
    """A scorer of training rows: it computes the logprobs and values of their tokens at the run's temperature.

    The rows are split into microbatches that fit into memory.
    """

    def __init__(self, policy: Policy, config: RunConfig, ranks: Ranks = ALONE) -> None:
        self._policy = policy
        self._config = config
        self._ranks = ranks
        self._share = _may_share(policy, config)
        with policy.training() as model:
            self.cost = UpdateCost(model, policy.device)
        self.oom_backoff = OomBackoff(
            _microbatch_tokens(policy, config),
            partial(microbatches, at_least=config.update.gradient_accumulation_steps, share=self._share),
            partial(size, share=self._share),
            "row",
            NO_ROOM,
        )

    def score(
        self, model: nn.Module, rows: Sequence[Row], critic: nn.Linear | None, trains: bool = False
    ) -> tuple[Microbatch, Scores]:
        """Return the rows as a microbatch, and the scores of its tokens. If `trains` is True, the scores have the gradients
        that the loss needs.
        """
        self._ranks.report_progress()
        batch = collate(rows, self._policy.device, self._share)
        self.cost.add(rows, batch.prefixes is not None, torch.is_grad_enabled())
        return batch, token_scores(
            model,
            batch.input_ids,
            batch.attention_mask,
            self._config.rollout.temperature,
            batch.loss_mask,
            batch.prefixes,
            critic,
            entropy_trains=trains and self._config.algorithm.entropy_coef > 0,
        )

    def read_constants(
        self,
        tokens: TokenLayout,
        rows: Sequence[Row],
        module: Callable[[], AbstractContextManager[nn.Module]],
        critic: nn.Linear | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the logprobs and the critic's values before the update, without dropout.

        Both are flat, (tokens,), and 0 for tokens that are not in `rows`. The values are None without a critic. Each rank reads
        some of the rows, and all get the values of all rows.
        """
        for attempt in self.oom_backoff.attempts(self._ranks.deal(rows, row_tokens)):
            logprobs: list[Tensor] = []
            values: list[Tensor] = []
            with attempt as microbatches, module() as model, torch.no_grad():
                model.eval()
                for some in microbatches:
                    batch, scores = self.score(model, some, critic)
                    mask = batch.loss_mask[:, 1:]
                    logprobs.append(scores.logprobs[mask])
                    values += [] if scores.values is None else [scores.values[mask]]
        read = [row for some in microbatches for row in some]
        return self._of_all(tokens, read, logprobs), None if critic is None else self._of_all(tokens, read, values)

    def _of_all(self, tokens: TokenLayout, read: Sequence[Row], values: Sequence[Tensor]) -> Tensor:
        """Return the flat values of all ranks' rows. `read` are this rank's rows, and `values` those of their tokens."""
        if values:
            return self._ranks.add_values(tokens.flatten(read, torch.cat(list(values))))
        dtype = torch.float64 if self._config.model.numerics == "exact" else torch.float32  # as `token_scores` returns
        return self._ranks.add_values(torch.zeros(int(tokens.lengths.sum()), dtype=dtype, device=self._policy.device))

    @torch.no_grad()
    def kl_from_start(self, tokens: TokenLayout, rows: Sequence[Row], start: Tensor) -> float:
        """Return the KL to the policy before the update, in nats: the mean of k3 over the rows' trained tokens. `start` is
        (tokens,), the logprobs before the update.
        """
        now, _ = self.read_constants(tokens, rows, self._policy.training)
        return float(k3(start, now)[tokens.places(rows)].mean())

    def sampler_mismatch(self, tokens: TokenLayout) -> set[int]:
        """Return the numbers of the episodes in which the trainer's logprobs differ too much from the sampler's.

        The mean absolute difference of such an episode is above `update.max_sampler_difference`. Without that option the set is
        empty.
        """
        limit = self._config.update.max_sampler_difference
        if limit is None:
            return set()
        ours, _ = self.read_constants(tokens, tokens.rows, self._policy.training)
        behavior = [value for row in tokens.rows for value in compress(row.behavior_logprobs, row.loss_mask)]
        difference = (ours - torch.tensor(behavior, device=self._policy.device)).abs()
        by_episode = torch.split(difference, tokens.lengths.tolist())
        # NaN is left to the guard against it.
        return {number for number, some in enumerate(by_episode) if float(some.mean()) > limit}


@contextmanager
def seed_dropout(key: str, device: torch.device) -> Iterator[None]:
    """Seed torch's random generators for dropout with the key. Restore their states when the context ends."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
        yield


def _may_share(policy: Policy, config: RunConfig) -> bool:
    """Return True if the model may read the common beginning of several rows only once."""
    # Layers that are computed again keep no keys and values; bodies of float64 norm in float32, so that sums' order shows.
    if config.update.gradient_checkpointing or config.model.numerics == "exact":
        return False
    with policy.training() as model:
        return shares_prefixes(model)
