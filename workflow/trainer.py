"""One update: groups of finished episodes in, better weights out, or unchanged weights and the reason.

An update is cut into minibatches (one optimizer step each) and those into microbatches (one forward and backward each). The
cut into microbatches changes memory and time, never the gradient. What is not finite never reaches the weights: the update
is undone and says why. The order of everything follows from the order of the groups, so an update can be repeated.
"""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from workflow import checkpoint
from workflow.advantages import Credit
from workflow.algorithms import Algorithm
from workflow.batch import Microbatch, Row, by_row, collate, in_lines, microbatches, rows_of, size
from workflow.config import RunConfig
from workflow.errors import InfraError
from workflow.losses import Loss, Normaliser, TokenBatch, importance_weights
from workflow.memory import out_of_memory, spared
from workflow.moments import adamw, moments, set_moments
from workflow.plugins import find
from workflow.policy import Policy
from workflow.scoring import checkpointing, shares_prefixes, token_logprobs
from workflow.trajectory import Group

T = TypeVar("T")

Constants = dict[tuple[int, int], Tensor]
"""Logprobs of the tokens after a row's prefix, without gradient, by `Row.key`."""

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Update:
    """What an update did.

    Args:
        metrics: over the whole update: `loss`, `grad_norm` (before clipping), `tokens` and `rows` that trained, `seconds`;
            means over the tokens that the model read again (those with an advantage; all where kl_coef > 0): `entropy`,
            `ratio`, `clip_fraction`, `kl` (to the reference, where kl_coef > 0), `sampler_difference_mean` and its
            maximum `_max` (|sampler's - trainer's logprob|); with max_sampler_difference the number of episodes that were
            not used for it, `sampler_dropped`. With max_staleness > 0 also `staleness`, in versions, and unless
            importance_cap is null the mean `importance_weight` and, as `importance_truncated`, the share that the cap cut.
        steps: the same per optimizer step.
        advantages: by episode id, of the episodes that were used.
        dropped: why a group was not used, or not all of its finished episodes, by slot.
        skipped: why the weights were left as they were; None where they were updated.
        bad: something was not finite; what is in memory may be spoiled, and the last checkpoint is to be loaded.
    """

    metrics: Metrics = field(default_factory=dict)
    steps: tuple[Metrics, ...] = ()
    advantages: Mapping[int, float] = field(default_factory=dict)
    dropped: Mapping[int, str] = field(default_factory=dict)
    skipped: str | None = None
    bad: bool = False


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """The rows of one optimizer step that teach, counts over all of its rows, credit by episode index, constants if needed."""

    rows: Sequence[Row]
    normaliser: Normaliser
    advantages: Sequence[float]
    proximal: Constants
    reference: Constants


class NotFinite(Exception):
    """A loss or gradient is NaN or infinite; the update is undone."""


class Trainer:
    """Holds what outlives an update: the optimizer, its learning rate, the counters.

    Args:
        policy: its trainable weights are what is updated; its lock is held during an update.
        config: the run's.
    """

    def __init__(self, policy: Policy, config: RunConfig) -> None:
        self._policy = policy
        self._config = config
        self._algorithm: Algorithm = find("algorithms", config.algorithm.name)
        self._credit: Credit = find("credits", self._algorithm.credit)
        self._loss: Loss = find("losses", self._algorithm.loss)
        self._importance_cap = config.algorithm.importance_cap if config.rollout.max_staleness else None
        self._microbatch_tokens = config.update.microbatch_tokens
        self._share = _may_share(policy, config)
        self._fresh()

    def update(self, groups: Sequence[Group], iteration: int) -> Update:
        """Improves the policy on the groups' trainable episodes.

        Raises:
            InfraError: memory does not suffice even for one row at a time.
        """
        started = time.perf_counter()
        kept, dropped = select(groups, self._algorithm.needs_group)
        episodes = [episode for group in kept for episode in group.episodes]
        credit = [value for values in self._credit(kept) for value in values]
        if not episodes:
            return Update(dropped=dropped, skipped="no group has enough finished episodes")
        with self._policy.lock, spared(self._config.lean):
            rows = rows_of(episodes)
            strayed = self._strayed(rows)
            credit = [0.0 if number in strayed else value for number, value in enumerate(credit)]
            advantages = {episode.id: value for episode, value in zip(episodes, credit, strict=True)}
            dropped |= _why_strayed(kept, strayed)
            minibatches = self._minibatches([row for row in rows if row.episode not in strayed], credit)
            if not minibatches:
                reason = "sampler and trainer differ" if strayed else "no advantage differs from 0"
                return Update(advantages=advantages, dropped=dropped, skipped=reason)
            steps, skipped = self._all_or_nothing(minibatches, iteration)
        if skipped:
            return Update(advantages=advantages, dropped=dropped, skipped=skipped, bad=True)
        self.iteration = iteration
        self.updates += 1
        metrics = _overall(steps) | {"seconds": time.perf_counter() - started}
        if self._config.update.max_sampler_difference is not None:
            metrics["sampler_dropped"] = float(len(strayed))
        if self._config.rollout.max_staleness:
            metrics["staleness"] = float(min(iteration, self._config.rollout.max_staleness))
        return Update(metrics, tuple(steps), advantages, dropped)

    def save(self, folder: Path) -> None:
        """Writes all that the next update reads; the writer for `checkpoint.write`."""
        with self._policy.lock:
            self._policy.save_weights(folder / checkpoint.WEIGHTS)
            save_file(moments(self._optimizer, self._parameters), folder / checkpoint.OPTIMIZER)
        state = {"iteration": self.iteration, "updates": self.updates, "learning_rate": self.learning_rate}
        (folder / checkpoint.STATE).write_text(json.dumps(state))

    def load(self, folder: Path | None, fresh: bool = False) -> None:
        """Restores what `save` wrote, bit for bit; None starts afresh from the base, `fresh` from the folder's weights alone.

        Raises:
            CheckpointError: a file is missing, altered or of another model.
        """
        if folder is None:
            self._policy.load_weights(None)
            self._fresh()
            return
        checkpoint.verify(folder, without=(checkpoint.OPTIMIZER,) if fresh else ())
        self._policy.load_weights(folder / checkpoint.WEIGHTS)
        self._fresh()
        if fresh:
            return
        try:
            set_moments(self._optimizer, self._parameters, load_file(folder / checkpoint.OPTIMIZER))
            state = json.loads((folder / checkpoint.STATE).read_text())
            self.iteration = int(state["iteration"])
            self.updates = int(state["updates"])
            self.learning_rate = float(state["learning_rate"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise checkpoint.broken(folder, f"the optimizer's state cannot be read: {error}") from error

    @property
    def learning_rate(self) -> float:
        """The step size of the next optimizer step."""
        return float(self._optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._optimizer.param_groups[0]["lr"] = value

    def _fresh(self) -> None:
        self._parameters = self._policy.trainable()
        self._optimizer = adamw(self._parameters, self._config.update)
        self.iteration = -1
        self.updates = 0

    def _strayed(self, rows: Sequence[Row]) -> set[int]:
        """Episodes whose sampled tokens have, on average, other logprobs here than the sampler recorded."""
        limit = self._config.update.max_sampler_difference
        if limit is None:
            return set()
        apart: dict[int, list[Tensor]] = {}
        ours = self._constants(rows, self._policy.training)
        for row in rows:
            start = row.prefix + 1
            mask = torch.tensor(row.loss_mask[start:], device=self._policy.device)
            difference = ours[row.key] - torch.tensor(row.behavior_logprobs[start:], device=self._policy.device)
            apart.setdefault(row.episode, []).append(difference[mask].abs())
        # What is not a number is left to the guard against it.
        return {episode for episode, found in apart.items() if float(torch.cat(found).mean()) > limit}

    def _minibatches(self, rows: Sequence[Row], credit: Sequence[float]) -> list[_Minibatch]:
        """One per optimizer step; a step that would only coast on its momentum is left out.

        A row without advantage has no gradient, unless there is a KL: it is counted, but the model need not read it.
        """
        step = self._config.update.batch_size or len(credit)
        kl = self._config.algorithm.kl_coef > 0
        parts = [[row for row in rows if start <= row.episode < start + step] for start in range(0, len(credit), step)]
        teaching = [([row for row in part if kl or credit[row.episode]], part) for part in parts]
        teaching = [(some, part) for some, part in teaching if some]
        used = [row for some, _ in teaching for row in some]
        proximal = self._proximal(used, one_step=len(teaching) == 1)
        reference = self._constants(used, self._policy.reference) if kl else {}
        return [_Minibatch(some, _counts(part), credit, proximal, reference) for some, part in teaching]

    def _proximal(self, rows: Sequence[Row], one_step: bool) -> Constants:
        """What the ratio is against; empty for the weights as they are when the step begins.

        Stored episodes were sampled by other weights: there the sampler's own logprobs, which PPO's clip then bounds.
        """
        if self._config.source.given:
            return {row.key: torch.tensor(row.behavior_logprobs[row.prefix + 1 :]) for row in rows}
        noisy = self._importance_cap is not None and self._config.model.lora_dropout > 0  # an importance weight must not be
        return {} if one_step and not noisy else self._constants(rows, self._policy.training)

    def _constants(self, rows: Sequence[Row], module: Callable[[], AbstractContextManager[nn.Module]]) -> Constants:
        """Logprobs of the rows as the module says them before the update, without dropout."""

        def read(pieces: Sequence[Sequence[Row]]) -> Constants:
            found: Constants = {}
            with module() as model, torch.no_grad():
                model.eval()
                for piece in pieces:
                    batch = collate(piece, self._policy.device, self._share)
                    found |= by_row(batch, self._logprobs(model, batch)[0])
            return found

        return self._in_pieces(rows, read)

    def _all_or_nothing(self, minibatches: Sequence[_Minibatch], iteration: int) -> tuple[list[Metrics], str | None]:
        """All optimizer steps, or none and the reason."""
        before = self._snapshot() if len(minibatches) > 1 else None
        steps: list[Metrics] = []
        try:
            for number, minibatch in enumerate(minibatches):
                with _drawing(f"{self._config.seed}|{iteration}|{number}", self._policy.device):
                    steps.append(self._step(minibatch))
        except Exception as error:
            if before is not None:
                self._restore(*before)
            if isinstance(error, NotFinite):
                return [], str(error)
            raise
        finally:
            self._optimizer.zero_grad()
        return steps, None

    def _step(self, minibatch: _Minibatch) -> Metrics:
        sums = self._in_pieces(minibatch.rows, lambda pieces: self._accumulate(minibatch, pieces))
        norm = float(nn.utils.clip_grad_norm_(self._parameters.values(), self._config.update.max_grad_norm))
        if not math.isfinite(sums["loss"]) or not math.isfinite(norm):
            raise NotFinite(f"the loss is {sums['loss']} and the gradient's norm is {norm}")
        self._optimizer.step()
        if not all(bool(parameter.isfinite().all()) for parameter in self._parameters.values()):
            raise NotFinite("the step left weights that are not finite")
        read = _counts(minibatch.rows).tokens
        whole = {"loss", "sampler_difference_max"}
        metrics = {name: value if name in whole else value / read for name, value in sums.items()}
        counts = minibatch.normaliser
        return metrics | {"grad_norm": norm, "tokens": float(counts.tokens), "rows": float(counts.rows)}

    def _accumulate(self, minibatch: _Minibatch, pieces: Sequence[Sequence[Row]]) -> dict[str, float]:
        """Adds up the gradients of the microbatches, and returns sums over trained tokens."""
        self._optimizer.zero_grad()
        sums: dict[str, float] = {}
        with self._policy.training() as model, checkpointing(model, self._config.update.gradient_checkpointing):
            for piece in pieces:
                for name, value in self._backward(model, minibatch, piece).items():
                    sums[name] = max(sums.get(name, 0.0), value) if name.endswith("_max") else sums.get(name, 0.0) + value
        return sums

    def _backward(self, model: nn.Module, minibatch: _Minibatch, piece: Sequence[Row]) -> dict[str, float]:
        batch = collate(piece, self._policy.device, self._share)
        mask = batch.loss_mask[:, 1:]  # (B, T-1)
        logprobs, entropy = self._logprobs(model, batch)
        old = in_lines(batch, minibatch.proximal, logprobs) if minibatch.proximal else logprobs.detach()
        credit = logprobs.new_tensor([[minibatch.advantages[row.episode]] for row in piece]).expand_as(logprobs)
        corrected: dict[str, Tensor] = {}
        if self._importance_cap is not None:
            weights, cut = importance_weights(old, batch.behavior_logprobs[:, 1:], mask, self._importance_cap)
            credit = credit * weights.to(credit.dtype)
            corrected = {"importance_weight": (weights * mask).sum(), "importance_truncated": cut.sum()}
        tokens = TokenBatch(
            logprobs=logprobs,
            old=old,
            advantages=credit,
            mask=mask,
            reference=in_lines(batch, minibatch.reference, logprobs) if minibatch.reference else None,
        )
        terms = self._loss(tokens, self._config.algorithm, minibatch.normaliser)
        terms.loss.backward()  # type: ignore[no-untyped-call]
        ours = logprobs.detach() if self._config.source.given else old
        difference = (batch.behavior_logprobs[:, 1:] - ours).abs() * mask
        sums = {
            "loss": terms.loss.detach(),
            "entropy": (entropy.detach() * mask).sum(),
            "sampler_difference_mean": difference.sum(),
            "sampler_difference_max": difference.max(),
            **corrected,
            **terms.sums,
        }
        return dict(zip(sums, torch.stack([value.double() for value in sums.values()]).tolist(), strict=True))

    def _logprobs(self, model: nn.Module, batch: Microbatch) -> tuple[Tensor, Tensor]:
        temperature = self._config.rollout.temperature
        return token_logprobs(model, batch.input_ids, batch.attention_mask, temperature, batch.loss_mask, batch.prefixes)

    def _in_pieces(self, rows: Sequence[Row], work: Callable[[Sequence[Sequence[Row]]], T]) -> T:
        """Runs `work` on microbatches; where memory runs out, again on smaller ones, which later updates keep."""
        while True:
            fewest = self._config.update.gradient_accumulation_steps
            pieces = microbatches(rows, self._microbatch_tokens, fewest, self._share)
            try:
                return work(pieces)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if all(len(piece) == 1 for piece in pieces):
                    raise InfraError(
                        f"Memory does not suffice for one row of {len(pieces[0][0].input_ids)} tokens.",
                        "Set update.gradient_checkpointing=true or model.load_in_4bit=true, or lower rollout.max_new_tokens.",
                    ) from error
            self._microbatch_tokens = max(size(piece, self._share) for piece in pieces if len(piece) > 1) // 2

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        weights = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        return weights, {name: moment.clone() for name, moment in moments(self._optimizer, self._parameters).items()}

    @torch.no_grad()
    def _restore(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
        self._optimizer.state.clear()
        set_moments(self._optimizer, self._parameters, state)


def select(groups: Sequence[Group], needs_group: bool) -> tuple[list[Group], dict[int, str]]:
    """The groups with their trainable episodes only, and why others are dropped, by slot.

    A group-relative algorithm needs 2 finished episodes in a group, any other 1.
    """
    kept, dropped = [], {}
    for group in groups:
        done = tuple(episode for episode in group.episodes if episode.trainable)
        if len(done) >= (2 if needs_group else 1):
            kept.append(Group(group.task, done, group.slot))
        else:
            dropped[group.slot] = f"{len(done)} of {len(group.episodes)} episodes can train"
    return kept, dropped


def _why_strayed(groups: Sequence[Group], strayed: set[int]) -> dict[int, str]:
    """By slot; the episodes of all groups are counted through."""
    slots = [group.slot for group in groups for _ in group.episodes]
    counts = Counter(slots[number] for number in strayed)
    return {slot: f"{n} of {slots.count(slot)} episodes: sampler and trainer differ" for slot, n in counts.items()}


def _may_share(policy: Policy, config: RunConfig) -> bool:
    """Whether rows that begin alike may have their beginning read once."""
    # Layers that are computed again keep no keys and values; bodies of float64 norm in float32, so that sums' order shows.
    if config.update.gradient_checkpointing or config.model.numerics == "exact":
        return False
    with policy.training() as model:
        return shares_prefixes(model)


def _counts(rows: Sequence[Row]) -> Normaliser:
    tokens = sum(sum(row.loss_mask) for row in rows)
    return Normaliser(tokens, len(rows), max(len(row.input_ids) for row in rows) - 1)


def _overall(steps: Sequence[Metrics]) -> dict[str, float]:
    """The steps' metrics as one: counts are summed, maxima are maxima, all else is weighed by tokens."""
    tokens = sum(step["tokens"] for step in steps)
    combined = {name: sum(step[name] * step["tokens"] for step in steps) / tokens for name in steps[0]}
    return combined | {
        "sampler_difference_max": max(step["sampler_difference_max"] for step in steps),
        "tokens": tokens,
        "rows": sum(step["rows"] for step in steps),
    }


@contextmanager
def _drawing(key: str, device: torch.device) -> Iterator[None]:
    """Dropout inside draws from the key, and nothing outside notices."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
        yield
