"""Reading rows with the policy: what it says of their tokens, with a gradient or without."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from agentrl.workflow.config import RunConfig
from agentrl.workflow.models.logprobs import Scores, shares_prefixes, token_scores
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.training.batch import Microbatch, Row, collate, microbatches, size, split_by_row
from agentrl.workflow.training.losses import k3
from agentrl.workflow.training.oom_backoff import OomBackoff
from agentrl.workflow.training.token_layout import Constants

NO_ROOM = "Set update.gradient_checkpointing=true or model.load_in_4bit=true, or lower rollout.max_new_tokens."


class RowScorer:
    """Scores rows at the run's temperature, in pieces that fit into memory; with `share` the beginning that rows have in common
    is read once.
    """

    def __init__(self, policy: Policy, config: RunConfig) -> None:
        self._policy = policy
        self._config = config
        self.share = _may_share(policy, config)
        self.oom_backoff = OomBackoff(
            config.update.microbatch_tokens,
            partial(microbatches, at_least=config.update.gradient_accumulation_steps, share=self.share),
            partial(size, share=self.share),
            "row",
            NO_ROOM,
        )

    def scores(self, model: nn.Module, batch: Microbatch, critic: nn.Linear | None, trains: bool = False) -> Scores:
        """Scores a microbatch; `trains`: with all gradients that the loss wants."""
        return token_scores(
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
        self, rows: Sequence[Row], module: Callable[[], AbstractContextManager[nn.Module]], critic: nn.Linear | None = None
    ) -> tuple[Constants, Constants]:
        """Logprobs, and a critic's values, of the rows as the module says them before the update, without dropout."""

        for attempt in self.oom_backoff.attempts(rows):
            logprobs: Constants = {}
            values: Constants = {}
            with attempt as microbatches, module() as model, torch.no_grad():
                model.eval()
                for some in microbatches:
                    batch = collate(some, self._policy.device, self.share)
                    scores = self.scores(model, batch, critic)
                    logprobs |= split_by_row(batch, scores.logprobs)
                    values |= {} if scores.values is None else split_by_row(batch, scores.values)
        return logprobs, values

    @torch.no_grad()
    def kl_from_start(self, rows: Sequence[Row], start: Constants) -> float:
        """The KL of the policy to where it began: the mean of k3 over the rows' trained tokens.

        Args:
            start: the logprobs that it began with.
        """
        now, _ = self.read_constants(rows, self._policy.training)
        masks = {row.key: torch.tensor(row.loss_mask[row.prefix + 1 :], device=self._policy.device) for row in rows}
        return float(torch.cat([k3(start[key], now[key])[mask] for key, mask in masks.items()]).mean())

    def sampler_mismatch(self, rows: Sequence[Row]) -> set[int]:
        """Episodes whose sampled tokens have, on average, other logprobs here than the sampler recorded."""
        limit = self._config.update.max_sampler_difference
        if limit is None:
            return set()
        apart: dict[int, list[Tensor]] = {}
        ours, _ = self.read_constants(rows, self._policy.training)
        for row in rows:
            start = row.prefix + 1
            mask = torch.tensor(row.loss_mask[start:], device=self._policy.device)
            difference = ours[row.key] - torch.tensor(row.behavior_logprobs[start:], device=self._policy.device)
            apart.setdefault(row.episode, []).append(difference[mask].abs())
        # What is not a number is left to the guard against it.
        return {episode for episode, found in apart.items() if float(torch.cat(found).mean()) > limit}


@contextmanager
def seed_dropout(key: str, device: torch.device) -> Iterator[None]:
    """Dropout inside draws from the key, and nothing outside notices."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
        yield


def _may_share(policy: Policy, config: RunConfig) -> bool:
    """Whether rows that begin alike may have their beginning read once."""
    # Layers that are computed again keep no keys and values; bodies of float64 norm in float32, so that sums' order shows.
    if config.update.gradient_checkpointing or config.model.numerics == "exact":
        return False
    with policy.training() as model:
        return shares_prefixes(model)
