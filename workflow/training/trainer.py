"""One update: groups of finished episodes in, better weights out, or unchanged weights and the reason.

An update is cut into minibatches (one optimizer step each) and those into microbatches (one forward and backward each). The
cut into microbatches changes memory and time, never the gradient. What is not finite never reaches the weights: the update
is undone and says why. The order of everything follows from the order of the groups, so an update can be repeated.
"""

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentrl.workflow.algorithms import Algorithm, settle_options
from agentrl.workflow.checkpoints import sealed_folder
from agentrl.workflow.config import RunConfig
from agentrl.workflow.models import exported_files
from agentrl.workflow.models.critic import FILE, critic_parameters, explained_variance, load_critic, make_critic, save_critic
from agentrl.workflow.models.logprobs import checkpointing
from agentrl.workflow.models.memory import return_freed_memory
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.plugins import find
from agentrl.workflow.training.advantages import Credit, Credited, Earned
from agentrl.workflow.training.batch import Row, collate, rows_of, to_lines
from agentrl.workflow.training.losses import (
    KL,
    Normaliser,
    Surrogate,
    TokenBatch,
    aggregate,
    importance_weights,
    k3,
    policy_loss,
    value_loss,
)
from agentrl.workflow.training.optimizer import BETAS, make_optimizer, optimizer_state, set_optimizer_state
from agentrl.workflow.training.reports import (
    Metrics,
    Minibatch,
    PreparedUpdate,
    RowConstants,
    Update,
    UpdatePreview,
    add_up,
    combine_metrics,
    episode_advantages,
    mismatch_reasons,
    select_groups,
)
from agentrl.workflow.training.row_scorer import RowScorer, seed_dropout
from agentrl.workflow.training.schedules import learning_rate_share, next_kl_coef
from agentrl.workflow.training.token_layout import Constants, TokenLayout
from agentrl.workflow.trajectory import Group


class NotFinite(Exception):
    """A loss or gradient is NaN or infinite; the update is undone."""


class Trainer:
    """Holds what outlives an update: the optimizer, its learning rate, the critic, the weight of the KL, the counters.

    Args:
        policy: its trainable weights are what is updated; its lock is held during an update.
        config: the run's.
        iterations: how many the run has, where the learning rate falls to 0 at their end.

    Raises:
        ConfigError: an option that the algorithm does not read.
    """

    def __init__(self, policy: Policy, config: RunConfig, iterations: int = 0) -> None:
        self._policy = policy
        self._config = config
        self._iterations = iterations
        self._algorithm: Algorithm = find("algorithms", config.algorithm.name)
        self._options = settle_options(config.algorithm)
        self._credit: Credit = find("credits", self._algorithm.credit)
        self._surrogate: Surrogate = find("surrogates", self._algorithm.surrogate_of(config.algorithm))
        self._importance_cap = config.algorithm.importance_cap if config.rollout.max_staleness else None
        self._scorer = RowScorer(policy, config)
        self._plain: Mapping[str, bytes] = {}
        self.kl_coef = self._options.kl_coef
        self._start_fresh()

    def update(self, groups: Sequence[Group], iteration: int) -> Update:
        """Improves the policy on the groups' trainable episodes.

        Raises:
            InfraError: memory does not suffice even for one row at a time.
            RewardError: an episode's reward is no finite number.
        """
        started = time.perf_counter()
        with self._policy.lock, return_freed_memory(self._config.lean):
            begun = self._prepare(groups, iteration)
            if isinstance(begun, Update):
                return begun
            steps, skipped = self._take_steps(begun.minibatches, begun.known, iteration)
        if skipped:
            return Update(advantages=begun.advantages, dropped=begun.dropped, skipped=skipped, bad=True)
        self.iteration = iteration
        self.updates += 1
        steps = [{**step, **begun.beside} for step in steps]
        metrics = {**combine_metrics(steps), **begun.whole}
        self.kl_coef = next_kl_coef(self.kl_coef, metrics.get("kl", 0.0), begun.episodes, self._options)
        return Update(metrics | {"seconds": time.perf_counter() - started}, tuple(steps), begun.advantages, begun.dropped)

    def preview(self, groups: Sequence[Group], iteration: int) -> UpdatePreview:
        """The first step that the update would take: all is as before when it returns. Raises as `update`."""
        with self._policy.lock, return_freed_memory(self._config.lean):
            begun = self._prepare(groups, iteration)
            if isinstance(begun, Update):
                return UpdatePreview(begun)
            first, blank, before = begun.minibatches[0], self._untrained_parts(), self._snapshot()
            known = self._add_start_logprobs(begun.minibatches, begun.known)
            since = replace(known, start=known.start or self._scorer.read_constants(first.rows, self._policy.training)[0])
            try:
                with seed_dropout(f"{self._config.seed}|{iteration}|0", self._policy.device):
                    step = self._step(first, known, iteration)
                gradient = self._flat_gradient()
                after = self._accumulate(first, since, learns=False)
            except NotFinite as error:
                return UpdatePreview(Update(advantages=begun.advantages, dropped=begun.dropped, skipped=str(error), bad=True))
            finally:
                self._restore(*before)
                self._optimizer.zero_grad()
        metrics = {**step, **begun.beside, **begun.whole}
        moved = {name: value for name, value in first.means(after).items() if name in ("ratio", "clip_fraction", "policy_kl")}
        return UpdatePreview(Update(metrics, (step,), begun.advantages, begun.dropped), moved, gradient, blank)

    def save(self, folder: Path) -> Collection[str]:
        """Writes all that the next update reads, and what makes it a model; the writer for `checkpoint.write`."""
        with self._policy.lock:
            self._policy.save_weights(folder / self._policy.weights_name)
            save_file(optimizer_state(self._optimizer, self._parameters), folder / sealed_folder.OPTIMIZER)
            if self._critic is not None:
                save_critic(self._critic, folder)
        state = {"iteration": self.iteration, "updates": self.updates, "kl_coef": self.kl_coef}
        (folder / sealed_folder.STATE).write_text(json.dumps(state))
        self._plain = self._plain or exported_files.make_files(self._policy, folder)
        sealed_folder.link_shared(folder, self._plain)
        return self._plain.keys()

    def load(self, folder: Path | None, fresh: bool = False) -> None:
        """Restores what `save` wrote, bit for bit; None starts afresh from the base, `fresh` from the folder's weights alone.

        Raises:
            CheckpointError: a file is missing, altered or of another model.
        """
        if folder is None:
            self._policy.load_weights(None)
            self._start_fresh()
            return
        sealed_folder.verify(folder, without=(sealed_folder.OPTIMIZER,) if fresh else (), shared=False)
        self._policy.load_weights(sealed_folder.weights_of(folder))
        self._start_fresh()
        if fresh:
            return
        if self._critic is not None:
            load_critic(self._critic, folder)
        self._load_optimizer(folder, load_file)

    def load_partial(self, folder: Path) -> None:
        """As `load`, of a checkpoint that an update of another algorithm wrote, or one whose optimizer was dropped.

        What it has nothing for is fresh: a critic, moments.
        """
        there = [name for name in (FILE, sealed_folder.OPTIMIZER) if (folder / name).is_file()]
        sealed_folder.verify(folder, without={sealed_folder.OPTIMIZER}.difference(there), shared=False)
        self._policy.load_weights(sealed_folder.weights_of(folder))
        self._start_fresh()
        if self._critic is not None and FILE in there:
            load_critic(self._critic, folder)
        self._load_optimizer(folder, self._load_known_state if sealed_folder.OPTIMIZER in there else lambda file: {})

    def _load_known_state(self, file: Path) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in load_file(file).items() if name.rpartition(":")[0] in self._parameters}

    def _load_optimizer(self, folder: Path, read: Callable[[Path], Mapping[str, Tensor]]) -> None:
        try:
            set_optimizer_state(self._optimizer, self._parameters, read(folder / sealed_folder.OPTIMIZER))
            state = json.loads((folder / sealed_folder.STATE).read_text())
            self.iteration = int(state["iteration"])
            self.updates = int(state["updates"])
            if self._options.kl_target is not None:  # else it is the config's
                self.kl_coef = float(state["kl_coef"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise sealed_folder.broken_error(folder, f"the optimizer's state cannot be read: {error}") from error

    @property
    def learning_rate(self) -> float:
        """The step size of the update that was last, of the policy; the critic has its own."""
        return float(self._optimizer.param_groups[0]["lr"])

    def _start_fresh(self) -> None:
        self._critic = make_critic(self._policy) if self._algorithm.critic else None
        self._parameters = self._policy.trainable() | (critic_parameters(self._critic) if self._critic is not None else {})
        options = self._config.update
        parameters = self._policy.trainable()
        rate, decay = options.learning_rate, options.weight_decay
        self._optimizer = make_optimizer(options.optimizer, parameters, rate, BETAS, decay)
        if self._critic is not None:
            self._optimizer.add_param_group({"params": list(self._critic.parameters()), "weight_decay": 0.0})
        self.kl_coef = self._options.kl_coef
        self.iteration = -1
        self.updates = 0

    def _set_rates(self, iteration: int) -> None:
        share = learning_rate_share(self._config.update, iteration, self._iterations)
        rates = (self._config.update.learning_rate, self._config.critic.learning_rate)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=False):
            group["lr"] = rate * share

    # before the first step

    def _prepare(self, groups: Sequence[Group], iteration: int) -> PreparedUpdate | Update:
        """The update before its first step; where there is nothing to do, the update that says why."""
        kept, dropped = select_groups(groups, self._algorithm.needs_group)
        episodes = [episode for group in kept for episode in group.episodes]
        if not episodes:
            return Update(dropped=dropped, skipped="no group has enough finished episodes")
        self._set_rates(iteration)
        tokens = TokenLayout.of(episodes, rows_of(episodes))
        strayed = self._scorer.sampler_mismatch(tokens.rows)
        known, credited, earned = self._compute_constants(tokens, kept, strayed)
        advantages = {e.id: value for e, value in zip(episodes, episode_advantages(credited, tokens), strict=True)}
        if not all(map(math.isfinite, advantages.values())):  # nothing of it can be learned, or written down
            return Update(dropped=dropped, skipped="an advantage is no finite number", bad=True)
        dropped |= mismatch_reasons(kept, strayed)
        minibatches = self._minibatches([row for row in tokens.rows if row.episode not in strayed], known, len(episodes))
        if not minibatches:
            reason = "sampler and trainer differ" if strayed else "no advantage differs from 0"
            return Update(advantages=advantages, dropped=dropped, skipped=reason)
        beside, whole = self._step_metrics(known, credited, earned), self._update_metrics(strayed, iteration)
        return PreparedUpdate(minibatches, known, len(episodes), beside, whole, advantages, dropped)

    def _untrained_parts(self) -> tuple[str, ...]:
        """The parts that have learned nothing yet."""
        critic = self._critic is not None and not any(bool(parameter.any()) for parameter in self._critic.parameters())
        return (*(("critic",) if critic else ()), *(() if self._optimizer.state else ("optimizer",)))

    def _compute_constants(
        self, tokens: TokenLayout, groups: Sequence[Group], strayed: Set[int]
    ) -> tuple[RowConstants, Credited, Earned]:
        """Reads what credit and loss need to know of the rows, and credits their tokens; strayed episodes have no credit."""
        in_reward = self._options.kl_coef > 0 and self._options.kl_in == "reward"
        start: Constants = {}
        values: Constants = {}
        if self._critic is not None or in_reward:
            start, values = self._scorer.read_constants(tokens.rows, self._policy.training, self._critic)
        reference = self._scorer.read_constants(tokens.rows, self._policy.reference)[0] if in_reward else {}
        penalty, kl = None, None
        if in_reward:
            estimate = KL[self._options.kl_estimator](tokens.gather(start), tokens.gather(reference))
            penalty, kl = self.kl_coef * estimate, float(estimate[tokens.mask].mean())
        earned = tokens.make_earned(groups, penalty, tokens.gather(values) if values else None)
        credited = self._credit(earned, self._options)
        kept = torch.tensor([number not in strayed for number in range(len(tokens.episodes))])
        credited = replace(credited, advantages=credited.advantages * kept[:, None])
        returns = {} if credited.returns is None else tokens.scatter(credited.returns)
        return RowConstants(tokens.scatter(credited.advantages), start, reference, values, returns, kl), credited, earned

    def _minibatches(self, rows: Sequence[Row], known: RowConstants, episodes: int) -> list[Minibatch]:
        """One per optimizer step; a step that would only coast on its momentum is left out.

        A row without advantage has no gradient, unless the loss has a KL, an entropy or a value: it is counted, but the model
        need not read it.
        """
        step = self._config.update.batch_size or episodes
        options = self._options
        all_teach = bool(options.entropy_coef or self._critic is not None or (options.kl_coef and options.kl_in == "loss"))
        parts = [[row for row in rows if start <= row.episode < start + step] for start in range(0, episodes, step)]
        teaching = [([row for row in part if all_teach or known.advantages[row.key].any()], part) for part in parts]
        return [Minibatch(some, self._normaliser(part)) for some, part in teaching if some]

    def _add_start_logprobs(self, minibatches: Sequence[Minibatch], known: RowConstants) -> RowConstants:
        """Adds the logprobs that the steps need: where there are several, those of the policy before the first."""
        used = [row for minibatch in minibatches for row in minibatch.rows]
        one_step = len(minibatches) * self._config.update.epochs == 1
        noisy = self._importance_cap is not None and self._config.model.lora_dropout > 0  # an importance weight must not be
        if one_step and not noisy:
            known = replace(known, start={})  # the step's own are the same, with its dropout
        elif not known.start:
            known = replace(known, start=self._scorer.read_constants(used, self._policy.training)[0])
        if not known.reference and self._options.kl_coef > 0:
            known = replace(known, reference=self._scorer.read_constants(used, self._policy.reference)[0])
        return known

    # the steps

    def _take_steps(
        self, minibatches: Sequence[Minibatch], known: RowConstants, iteration: int
    ) -> tuple[list[Metrics], str | None]:
        """All optimizer steps, or none and the reason."""
        known = self._add_start_logprobs(minibatches, known)
        epochs = self._config.update.epochs
        before = self._snapshot() if len(minibatches) * epochs > 1 else None
        steps: list[Metrics] = []
        try:
            for epoch in range(epochs):
                for minibatch in minibatches:
                    with seed_dropout(f"{self._config.seed}|{iteration}|{len(steps)}", self._policy.device):
                        steps.append(self._step(minibatch, known, iteration))
                if epoch + 1 < epochs and self._exceeds_max_kl(minibatches, known):
                    break
        except Exception as error:
            if before is not None:
                self._restore(*before)
            if isinstance(error, NotFinite):
                return [], str(error)
            raise
        finally:
            self._optimizer.zero_grad()
        return steps, None

    def _exceeds_max_kl(self, minibatches: Sequence[Minibatch], known: RowConstants) -> bool:
        """Whether the policy is by now so far from where it began that there is no other pass."""
        limit = self._config.update.max_kl
        return (
            limit is not None
            and self._scorer.kl_from_start([row for some in minibatches for row in some.rows], known.start) > limit
        )

    def _step(self, minibatch: Minibatch, known: RowConstants, iteration: int) -> Metrics:
        sums = self._accumulate(minibatch, known)
        if self._critic is not None and iteration < self._config.critic.warmup:
            for parameter in self._policy.trainable().values():
                parameter.grad = None
        norm = float(nn.utils.clip_grad_norm_(self._parameters.values(), self._config.update.max_grad_norm))
        if not math.isfinite(sums["loss"]) or not math.isfinite(norm):
            raise NotFinite(f"the loss is {sums['loss']} and the gradient's norm is {norm}")
        self._optimizer.step()
        if not all(bool(parameter.isfinite().all()) for parameter in self._parameters.values()):
            raise NotFinite("the step left weights that are not finite")
        counts = minibatch.normaliser
        return minibatch.means(sums) | {"grad_norm": norm, "tokens": float(counts.tokens), "rows": float(counts.rows)}

    def _accumulate(self, minibatch: Minibatch, known: RowConstants, learns: bool = True) -> dict[str, float]:
        """Adds up the gradients of the microbatches, unless nothing `learns`, and returns sums over trained tokens."""
        again = self._config.update.gradient_checkpointing and learns
        for attempt in self._scorer.oom_backoff.attempts(minibatch.rows):
            self._optimizer.zero_grad()
            with (
                attempt as microbatches,
                self._policy.training() as model,
                checkpointing(model, again),
                torch.set_grad_enabled(learns),
            ):
                model.train(learns)
                sums = add_up(self._backward(model, minibatch.normaliser, known, rows) for rows in microbatches)
        return sums

    def _backward(self, model: nn.Module, counts: Normaliser, known: RowConstants, piece: Sequence[Row]) -> dict[str, float]:
        batch = collate(piece, self._policy.device, self._scorer.share)
        mask = batch.loss_mask[:, 1:]  # (B, T-1)
        scores = self._scorer.scores(model, batch, self._critic, trains=True)
        logprobs = scores.logprobs
        start = to_lines(batch, known.start, logprobs) if known.start else logprobs.detach()
        behavior = batch.behavior_logprobs[:, 1:]
        old = behavior.to(logprobs.dtype) if self._config.source.given else start
        credit = to_lines(batch, known.advantages, logprobs)
        sums: dict[str, Tensor] = {}
        if self._importance_cap is not None:
            how = self._options.importance_level, self._options.importance_beyond
            weights, cut = importance_weights(start, behavior, mask, self._importance_cap, *how)
            credit = credit * weights.to(credit.dtype)
            sums |= {"importance_weight": (weights * mask).sum(), "importance_truncated": cut.sum()}
        reference = to_lines(batch, known.reference, logprobs) if known.reference else None
        tokens = TokenBatch(logprobs, old, credit, mask, reference, scores.entropy)
        options = self._options.model_copy(update={"kl_coef": self.kl_coef})
        terms = policy_loss(self._surrogate, tokens, options, counts)
        loss = terms.loss
        if scores.values is not None:
            before, returns = (to_lines(batch, constants, scores.values) for constants in (known.values, known.returns))
            errors = value_loss(scores.values, before, returns, self._config.critic.clip or None)
            loss = loss + self._config.critic.loss_coef * aggregate(errors, mask, "token-mean", counts)
            sums["value_loss"] = (errors * mask).sum().detach()
        if torch.is_grad_enabled():
            loss.backward()  # type: ignore[no-untyped-call]
        difference = (behavior - start).abs() * mask
        sums |= {
            "loss": loss.detach(),
            "entropy": (scores.entropy.detach() * mask).sum(),
            "sampler_difference_mean": difference.sum(),
            "policy_kl": k3(*(torch.where(mask, values, 0.0) for values in (start, logprobs.detach()))).sum(),
            "sampler_difference_max": difference.max(),
            **terms.sums,
        }
        return dict(zip(sums, torch.stack([value.double() for value in sums.values()]).tolist(), strict=True))

    def _normaliser(self, rows: Sequence[Row]) -> Normaliser:
        limits = self._config.rollout
        return Normaliser(sum(sum(row.loss_mask) for row in rows), len(rows), limits.max_steps * limits.max_new_tokens)

    def _step_metrics(self, known: RowConstants, credited: Credited, earned: Earned) -> dict[str, float]:
        """Metrics that all steps of an update share."""
        found = {"kl_coef": self.kl_coef} if self._options.kl_coef else {}
        if known.kl is not None:
            found["kl"] = known.kl
        if credited.returns is not None and earned.values is not None:
            found["explained_variance"] = explained_variance(earned.values, credited.returns, earned.mask)
        return found

    def _update_metrics(self, strayed: Set[int], iteration: int) -> dict[str, float]:
        """Metrics of the whole update alone."""
        found = {}
        if self._config.update.max_sampler_difference is not None:
            found["sampler_dropped"] = float(len(strayed))
        if self._config.rollout.max_staleness:
            found["staleness"] = float(min(iteration, self._config.rollout.max_staleness))
        return found

    def _flat_gradient(self) -> Tensor:
        found = (torch.zeros_like(p) if p.grad is None else p.grad for p in self._policy.trainable().values())
        return torch.cat([gradient.detach().cpu().flatten() for gradient in found])

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        weights = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        return weights, {name: moment.clone() for name, moment in optimizer_state(self._optimizer, self._parameters).items()}

    @torch.no_grad()
    def _restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
        self._optimizer.state.clear()
        set_optimizer_state(self._optimizer, self._parameters, state)
