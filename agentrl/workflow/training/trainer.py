"""One update of a policy: from groups of finished episodes to new weights, or to unchanged weights and the reason.

An update is split into minibatches (one optimizer step each), and each minibatch into microbatches (one forward and backward
pass each). The split into microbatches changes memory and time, never the gradient. A result that is not finite is never
published: the update reports the reason, and the weights are restored or loaded again. All orders follow from the order of the
groups, so an update can be repeated.
"""

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentrl.workflow import checkpoints
from agentrl.workflow.algorithms import find_gradient, resolve_options
from agentrl.workflow.config import RunConfig
from agentrl.workflow.engines import Backend
from agentrl.workflow.models import exported_files
from agentrl.workflow.models.critic import FILE, critic_parameters, load_critic, make_critic, save_critic
from agentrl.workflow.models.logprobs import checkpointing
from agentrl.workflow.models.memory import return_freed_memory
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find
from agentrl.workflow.training.losses import Normaliser
from agentrl.workflow.training.optimizer import (
    BETAS,
    LossScale,
    learning_rate_share,
    make_optimizer,
    next_kl_coef,
    optimizer_state,
    set_optimizer_state,
    take_step,
)
from agentrl.workflow.training.prepared_update import Minibatch, PreparedUpdate, UpdatePreparation
from agentrl.workflow.training.ranks import ALONE, Ranks
from agentrl.workflow.training.reports import Metrics, Update, UpdatePreview, add_up
from agentrl.workflow.training.row_scorer import RowScorer, seed_dropout
from agentrl.workflow.training.training_rows import Row, row_tokens
from agentrl.workflow.training.update_loss import UpdateLoss
from agentrl.workflow.trajectory import Group

MIN_EFFECTIVE_SAMPLE_SIZE = 0.1
"""The least effective sample size of the importance weights, as a share of the tokens. An update below it is skipped."""


class Unusable(Exception):
    """An optimizer step is impossible. The update is undone."""


class NotFinite(Unusable):
    """A loss, gradient or weight is NaN or infinite."""


def require_finite(loss: float, norm: float) -> None:
    """Raise NotFinite if the loss or the gradient's norm is not a finite number."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise NotFinite(f"the loss is {loss} and the gradient's norm is {norm}")


def _combine_metrics(steps: Sequence[Metrics]) -> dict[str, float]:
    """Combine the metrics of several steps.

    `tokens` and `rows` are summed over the steps, so each pass counts them again. `sampler_difference_max` is the maximum. All
    others are means, weighted by the tokens of each step.
    """
    tokens = sum(step["tokens"] for step in steps)
    combined = {name: sum(step[name] * step["tokens"] for step in steps) / tokens for name in steps[0]}
    return combined | {
        "sampler_difference_max": max(step["sampler_difference_max"] for step in steps),
        "tokens": tokens,
        "rows": sum(step["rows"] for step in steps),
    }


def _undone(prepared: PreparedUpdate, error: Unusable) -> Update:
    bad = isinstance(error, NotFinite)
    return Update(advantages=prepared.advantages, dropped=prepared.dropped, skipped=str(error), bad=bad)


class Trainer:
    """A trainer of a policy.

    Between updates it holds the optimizer, learning rates, critic, KL weight, loss scale and counters.

    Args:
        policy: the policy whose trainable weights are updated; its lock is held during an update.
        iterations: the run's number of iterations; only needed if the learning rate falls to 0 at their end.
        ranks: the ranks that make the update together, each with a trainer. All of these trainers have the same policy, and get
            the same calls.

    Raises:
        ConfigError: an option is set that the algorithm does not use.
    """

    def __init__(self, policy: Policy, config: RunConfig, iterations: int = 0, ranks: Ranks = ALONE) -> None:
        self._policy = policy
        self._config = config
        self._iterations = iterations
        self._ranks = ranks
        self._algorithm = find_gradient(config.algorithm.name)
        self._options = resolve_options(config.algorithm)
        self._scorer = RowScorer(policy, config, ranks)
        engine: Backend = find("engines", config.rollout.engine)
        self._loss = UpdateLoss(config, engine.local and policy.precision != "coarse")
        self._preparation = UpdatePreparation(policy, config, self._scorer, self._loss.importance is not None)
        self._plain: Mapping[str, bytes] = {}
        self.kl_coef = self._options.kl_coef
        self._start_fresh()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the policy in the last update; the critic has another one."""
        return float(self._optimizer.param_groups[0]["lr"])

    def update(self, groups: Sequence[Group], iteration: int) -> Update:
        """Update the policy on the groups' trainable episodes. Raise InfraError if memory does not suffice even for one
        training row at a time, or for the optimizer's moments. Raise RewardError if an episode's reward is not a finite number.
        """
        started = time.perf_counter()
        with self._policy.lock, return_freed_memory(self._policy.device, self._config.lean):
            self._set_rates(iteration)
            self._scorer.cost.begin()
            prepared = self._preparation.prepare(groups, iteration, self._critic, self.kl_coef)
            if isinstance(prepared, Update):
                return prepared
            try:
                steps = self._take_steps(prepared, iteration)
            except Unusable as error:
                return _undone(prepared, error)
        self.iteration = iteration
        self.updates += 1
        steps = [{**step, **prepared.beside} for step in steps]
        metrics = {**_combine_metrics(steps), **prepared.whole}
        self.kl_coef = next_kl_coef(self.kl_coef, metrics.get("kl", 0.0), len(prepared.tokens.episodes), self._options)
        seconds = time.perf_counter() - started
        return Update(
            metrics | {"seconds": seconds},
            tuple(steps),
            prepared.advantages,
            prepared.dropped,
            costs=self._scorer.cost.metrics(seconds),
        )

    def preview(self, groups: Sequence[Group], iteration: int) -> UpdatePreview:
        """Make the first optimizer step of the update, report it, and undo it. Raises as `update` does."""
        with self._policy.lock, return_freed_memory(self._policy.device, self._config.lean):
            self._set_rates(iteration)
            prepared = self._preparation.prepare(groups, iteration, self._critic, self.kl_coef)
            if isinstance(prepared, Update):
                return UpdatePreview(prepared)
            first, blank, before = prepared.minibatches[0], self._untrained_parts(), self._snapshot()
            start = prepared.constants.start
            if start is None:
                start, _ = self._scorer.read_constants(prepared.tokens, first.rows, self._policy.training)
            try:
                with self._seed_dropout(f"{self._config.seed}|{iteration}|0"):
                    step = self._step(prepared, first, iteration)
                gradient = self._flat_gradient()
                after = self._accumulate(
                    replace(prepared, constants=replace(prepared.constants, start=start)), first, learns=False
                )
            except Unusable as error:
                return UpdatePreview(_undone(prepared, error))
            finally:
                self._restore(*before)
                self._optimizer.zero_grad()
        metrics = {**step, **prepared.beside, **prepared.whole}
        moved = {name: value for name, value in first.means(after).items() if name in ("ratio", "clip_fraction", "policy_kl")}
        return UpdatePreview(Update(metrics, (step,), prepared.advantages, prepared.dropped), moved, gradient, blank)

    def _take_steps(self, prepared: PreparedUpdate, iteration: int) -> list[Metrics]:
        """Take all optimizer steps of the update. If one fails, restore the weights and states from before the first step.

        Stop after a pass if the policy has moved too far from its start. Raise Unusable if an optimizer step is impossible.
        """
        epochs = self._config.update.epochs
        before = self._snapshot() if len(prepared.minibatches) * epochs > 1 else None
        steps: list[Metrics] = []
        try:
            for epoch in range(epochs):
                for minibatch in prepared.minibatches:
                    with self._seed_dropout(f"{self._config.seed}|{iteration}|{len(steps)}"):
                        steps.append(self._step(prepared, minibatch, iteration))
                if epoch + 1 < epochs and self._exceeds_max_kl(prepared):
                    break
        except Exception:
            if before is not None:
                self._restore(*before)
            raise
        finally:
            self._optimizer.zero_grad()
        return steps

    def _seed_dropout(self, key: str) -> AbstractContextManager[None]:
        return seed_dropout(self._ranks.dropout_key(key), self._policy.device)

    def _exceeds_max_kl(self, prepared: PreparedUpdate) -> bool:
        """Return True if the policy has moved too far from its start to make another pass."""
        limit = self._config.update.max_kl
        if limit is None or prepared.constants.start is None:
            return False
        rows = [row for minibatch in prepared.minibatches for row in minibatch.rows]
        return self._scorer.kl_from_start(prepared.tokens, rows, prepared.constants.start) > limit

    def _step(self, prepared: PreparedUpdate, minibatch: Minibatch, iteration: int) -> Metrics:
        repeats = True
        while repeats:
            sums = self._accumulate(prepared, minibatch)
            if self._critic is not None and iteration < self._config.critic.warmup:
                for parameter in self._policy.trainable().values():
                    parameter.grad = None
            self._loss_scale.unscale(self._parameters.values())
            norm = float(nn.utils.clip_grad_norm_(self._parameters.values(), self._config.update.max_grad_norm))
            repeats = self._loss_scale.must_repeat(sums["loss"], norm)
        require_finite(sums["loss"], norm)
        means = minibatch.means(sums)
        self._require_enough_samples(means["effective_sample_size"])
        take_step(self._optimizer, self._parameters)
        self._require_finite_weights()
        counts = minibatch.normaliser
        return means | {"grad_norm": norm, "tokens": float(counts.tokens), "rows": float(counts.rows)}

    def _accumulate(self, prepared: PreparedUpdate, minibatch: Minibatch, learns: bool = True) -> dict[str, float]:
        """Compute and add up the gradients of the minibatch's microbatches. Return sums of metrics over trained tokens.

        With `learns` False, only the sums are computed.
        """
        again = self._config.update.gradient_checkpointing and learns
        for attempt in self._scorer.oom_backoff.attempts(self._ranks.deal(minibatch.rows, row_tokens)):
            self._optimizer.zero_grad()
            with (
                attempt as microbatches,
                self._policy.training() as model,
                checkpointing(model, again),
                torch.set_grad_enabled(learns),
            ):
                model.train(learns)
                sums = add_up(self._backward(model, prepared, minibatch.normaliser, rows) for rows in microbatches)
        if learns:
            self._ranks.add_gradients(self._parameters.values())
        return self._ranks.add_sums(sums)

    def _backward(
        self, model: nn.Module, prepared: PreparedUpdate, counts: Normaliser, rows: Sequence[Row]
    ) -> dict[str, float]:
        batch, scores = self._scorer.score(model, rows, self._critic, trains=True)
        constants = prepared.constants.on_lines(prepared.tokens.places(rows), batch.loss_mask[:, 1:], scores.logprobs.dtype)
        terms = self._loss.terms(batch, scores, constants, counts, self.kl_coef)
        if torch.is_grad_enabled():
            (terms.loss * self._loss_scale.factor).backward()  # type: ignore[no-untyped-call]
        return dict(zip(terms.sums, torch.stack([value.double() for value in terms.sums.values()]).tolist(), strict=True))

    def _require_enough_samples(self, share: float) -> None:
        if self._loss.importance is not None and share < MIN_EFFECTIVE_SAMPLE_SIZE:
            raise Unusable(
                "the logprobs of sampler and trainer differ too much: the importance weights of a minibatch leave an effective "
                f"sample size of {share:.1%}, and an update needs {MIN_EFFECTIVE_SAMPLE_SIZE:.0%} (algorithm.importance)"
            )

    def _require_finite_weights(self) -> None:
        # One tensor, so that the CPU waits for the device once, not for each parameter.
        if not bool(torch.stack([parameter.isfinite().all() for parameter in self._parameters.values()]).all()):
            raise NotFinite("some weights are NaN or infinite after the optimizer step")

    def _set_rates(self, iteration: int) -> None:
        share = learning_rate_share(self._config.update, iteration, self._iterations)
        rates = (self._config.update.learning_rate, self._config.critic.learning_rate)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=False):
            group["lr"] = rate * share

    def _untrained_parts(self) -> tuple[str, ...]:
        """Return the names, among `critic` and `optimizer`, of the parts that have not been trained yet."""
        critic = self._critic is not None and not any(bool(parameter.any()) for parameter in self._critic.parameters())
        return (*(("critic",) if critic else ()), *(() if self._optimizer.state else ("optimizer",)))

    def _flat_gradient(self) -> Tensor:
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in self._policy.trainable().values())
        return torch.cat([gradient.detach().cpu().flatten() for gradient in gradients])

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[float, int]]:
        weights = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        state = {name: moment.clone() for name, moment in optimizer_state(self._optimizer, self._parameters).items()}
        return weights, state, self._loss_scale.state

    @torch.no_grad()
    def _restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], loss_scale: tuple[float, int]) -> None:
        self._loss_scale.state = loss_scale
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
        self._optimizer.state.clear()
        set_optimizer_state(self._optimizer, self._parameters, state)

    # checkpoints

    def save(self, folder: Path) -> Collection[str]:
        """Write the state that the next update needs, such as the optimizer's, and the files with which other programs load the
        model. `checkpoints.write` calls this.
        """
        with self._policy.lock:
            self._policy.save_weights(folder / self._policy.weights_name)
            save_file(optimizer_state(self._optimizer, self._parameters), folder / checkpoints.OPTIMIZER)
            if self._critic is not None:
                save_critic(self._critic, folder)
        state: dict[str, Any] = {"iteration": self.iteration, "updates": self.updates, "kl_coef": self.kl_coef}
        state |= {"loss_scale": self._loss_scale.state} if self._loss_scale.is_used else {}
        (folder / checkpoints.STATE).write_text(json.dumps(state))
        self._plain = self._plain or exported_files.make_files(self._policy, folder)
        checkpoints.link_shared(folder, self._plain)
        return self._plain.keys()

    def load(self, folder: Path | None, fresh: bool = False, checked: bool = False) -> None:
        """Restore the state that `save` wrote, bit for bit. `folder` is the checkpoint; None: start from the untrained base.
        `fresh` says whether to load only the weights; the optimizer and all other state are then new. `checked` says whether
        the files were just compared with the manifest (`checkpoints.checked_part`). Raise CheckpointError if a file is missing,
        was changed, or belongs to another model.
        """
        if folder is not None and not checked:
            checkpoints.verify(folder, without=(checkpoints.OPTIMIZER,) if fresh else (), shared=False)
        self._policy.load_weights(None if folder is None else checkpoints.weights_of(folder))
        self._start_fresh()
        if folder is None or fresh:
            return
        if self._critic is not None:
            load_critic(self._critic, folder)
        self._load_optimizer(folder)

    def load_partial(self, folder: Path) -> None:
        """Load a checkpoint that lacks parts: another algorithm wrote it, or its optimizer state was removed.

        The missing parts (the critic, the moments) are made new. Raises as `load` does.
        """
        there = [name for name in (FILE, checkpoints.OPTIMIZER) if (folder / name).is_file()]
        checkpoints.verify(folder, without={checkpoints.OPTIMIZER}.difference(there), shared=False)
        self._policy.load_weights(checkpoints.weights_of(folder))
        self._start_fresh()
        if self._critic is not None and FILE in there:
            load_critic(self._critic, folder)
        self._load_optimizer(folder, partly=True)

    def _load_optimizer(self, folder: Path, partly: bool = False) -> None:
        file = folder / checkpoints.OPTIMIZER
        try:
            tensors = load_file(file) if file.is_file() or not partly else {}
            own_tensors = {name: tensor for name, tensor in tensors.items() if name.rpartition(":")[0] in self._parameters}
            set_optimizer_state(self._optimizer, self._parameters, own_tensors if partly else tensors)
            state = json.loads((folder / checkpoints.STATE).read_text())
            self.iteration = int(state["iteration"])
            self.updates = int(state["updates"])
            if self._options.kl_target is not None:  # else it is the config's
                self.kl_coef = float(state["kl_coef"])
            if self._loss_scale.is_used and "loss_scale" in state:
                self._loss_scale.state = state["loss_scale"]
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise checkpoints.broken_error(folder, f"the optimizer's state cannot be read: {error}") from error

    def _start_fresh(self) -> None:
        self._critic = make_critic(self._policy) if self._algorithm.critic else None
        self._parameters = self._policy.trainable() | (critic_parameters(self._critic) if self._critic is not None else {})
        options = self._config.update
        parameters = self._policy.trainable()
        rate, decay = options.learning_rate, options.weight_decay
        self._optimizer = make_optimizer(options.optimizer, parameters, rate, BETAS, decay)
        if self._critic is not None:
            self._optimizer.add_param_group({"params": list(self._critic.parameters()), "weight_decay": 0.0})
        with self._policy.training() as module:
            self._loss_scale = LossScale(module)
        self.kl_coef = self._options.kl_coef
        self.iteration = -1
        self.updates = 0
