"""One update: groups of finished episodes in, better weights out, or unchanged weights and the reason.

An update is cut into minibatches (one optimizer step each) and those into microbatches (one forward and backward each). The
cut into microbatches changes memory and time, never the gradient. What is not finite never reaches the weights: the update
is undone and says why. The order of everything follows from the order of the groups, so an update can be repeated.
"""

import hashlib
import json
import math
import time
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
from workflow.batch import Microbatch, Row, collate, microbatches, padded, rows_of
from workflow.config import RunConfig
from workflow.errors import CheckpointError, InfraError
from workflow.losses import Loss, Normaliser, TokenBatch
from workflow.plugins import find
from workflow.policy import Policy, token_logprobs
from workflow.slots import out_of_memory
from workflow.trajectory import Episode, Group

BETAS = (0.9, 0.999)
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
T = TypeVar("T")

Constants = dict[tuple[int, int], Tensor]
"""Logprobs (T - 1,) that carry no gradient, by `Row.key`."""

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Update:
    """What an update did.

    Args:
        metrics: over the whole update: `loss`, `grad_norm` (before clipping), `tokens` and `rows` that trained, `seconds`;
            means over the tokens that the model read again (those with an advantage; all where kl_coef > 0): `entropy`,
            `ratio`, `clip_fraction`, `kl` (to the reference, where kl_coef > 0), `sampler_difference_mean` and its
            maximum `_max` (|sampler's - trainer's logprob|).
        steps: the same per optimizer step.
        advantages: by episode id, of the episodes that were used.
        dropped: why a group was not used, by slot.
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
        self._microbatch_tokens = config.update.microbatch_tokens
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
        advantages = {episode.id: value for episode, value in zip(episodes, credit, strict=True)}
        if not episodes:
            return Update(dropped=dropped, skipped="no group has enough finished episodes")
        with self._policy.lock:
            minibatches = self._minibatches(episodes, credit)
            if not minibatches:
                return Update(advantages=advantages, dropped=dropped, skipped="no advantage differs from 0")
            steps, skipped = self._all_or_nothing(minibatches, iteration)
        if skipped:
            return Update(advantages=advantages, dropped=dropped, skipped=skipped, bad=True)
        self.iteration = iteration
        self.updates += 1
        metrics = _overall(steps) | {"seconds": time.perf_counter() - started}
        return Update(metrics, tuple(steps), advantages, dropped)

    def save(self, folder: Path) -> None:
        """Writes all that the next update reads; the writer for `checkpoint.write`."""
        with self._policy.lock:
            self._policy.save_weights(folder / checkpoint.WEIGHTS)
            save_file(self._moments(), folder / checkpoint.OPTIMIZER)
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
            self._set_moments(load_file(folder / checkpoint.OPTIMIZER))
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
        options = self._config.update
        self._parameters = self._policy.trainable()
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=options.learning_rate, betas=BETAS, weight_decay=options.weight_decay
        )
        self.iteration = -1
        self.updates = 0

    def _minibatches(self, episodes: Sequence[Episode], credit: Sequence[float]) -> list[_Minibatch]:
        """One per optimizer step; a step that would only coast on its momentum is left out.

        A row without advantage has no gradient, unless there is a KL: it is counted, but the model need not read it.
        """
        size = self._config.update.batch_size or len(episodes)
        kl = self._config.algorithm.kl_coef > 0
        rows = rows_of(episodes)
        parts = [[row for row in rows if start <= row.episode < start + size] for start in range(0, len(episodes), size)]
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
            return {row.key: torch.tensor(row.behavior_logprobs[1:], device=self._policy.device) for row in rows}
        return {} if one_step else self._constants(rows, self._policy.training)

    def _constants(self, rows: Sequence[Row], module: Callable[[], AbstractContextManager[nn.Module]]) -> Constants:
        """Logprobs of the rows as the module says them before the update, without dropout."""

        def read(pieces: Sequence[Sequence[Row]]) -> Constants:
            found: Constants = {}
            with module() as model, torch.no_grad():
                model.eval()
                for piece in pieces:
                    logprobs, _ = self._logprobs(model, collate(piece, self._policy.device))
                    found |= {row.key: line[: len(row.input_ids) - 1] for row, line in zip(piece, logprobs, strict=True)}
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
        with self._policy.training() as model:
            for piece in pieces:
                for name, value in self._backward(model, minibatch, piece).items():
                    sums[name] = max(sums.get(name, 0.0), value) if name.endswith("_max") else sums.get(name, 0.0) + value
        return sums

    def _backward(self, model: nn.Module, minibatch: _Minibatch, piece: Sequence[Row]) -> dict[str, float]:
        batch = collate(piece, self._policy.device)
        mask = batch.loss_mask[:, 1:]  # (B, T-1)
        logprobs, entropy = self._logprobs(model, batch)
        old = _lines(minibatch.proximal, piece, logprobs) if minibatch.proximal else logprobs.detach()
        tokens = TokenBatch(
            logprobs=logprobs,
            old=old,
            advantages=logprobs.new_tensor([[minibatch.advantages[row.episode]] for row in piece]).expand_as(logprobs),
            mask=mask,
            reference=_lines(minibatch.reference, piece, logprobs) if minibatch.reference else None,
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
            **terms.sums,
        }
        return dict(zip(sums, torch.stack([value.double() for value in sums.values()]).tolist(), strict=True))

    def _logprobs(self, model: nn.Module, batch: Microbatch) -> tuple[Tensor, Tensor]:
        return token_logprobs(model, batch.input_ids, batch.attention_mask, self._config.rollout.temperature)

    def _in_pieces(self, rows: Sequence[Row], work: Callable[[Sequence[Sequence[Row]]], T]) -> T:
        """Runs `work` on microbatches; where memory runs out, again on smaller ones, which later updates keep."""
        while True:
            pieces = microbatches(rows, self._microbatch_tokens, self._config.update.gradient_accumulation_steps)
            try:
                return work(pieces)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if all(len(piece) == 1 for piece in pieces):
                    raise InfraError(
                        f"Memory does not suffice for one row of {len(pieces[0][0].input_ids)} tokens.",
                        "Lower rollout.max_new_tokens or rollout.max_steps, or set model.load_in_4bit=true.",
                    ) from error
            self._microbatch_tokens = max(len(piece) * len(piece[0].input_ids) for piece in pieces) // 2

    def _moments(self) -> dict[str, Tensor]:
        """AdamW's state as named tensors: `<parameter>:<moment>`; empty before the first step."""
        state = self._optimizer.state
        return {
            f"{name}:{moment}": state[parameter][moment].cpu().contiguous()
            for name, parameter in self._parameters.items()
            if parameter in state
            for moment in MOMENTS
        }

    def _set_moments(self, tensors: Mapping[str, Tensor]) -> None:
        expected = {f"{name}:{moment}" for name in self._parameters for moment in MOMENTS}
        if tensors and set(tensors) != expected:
            raise CheckpointError("The optimizer's state in the checkpoint is of another model.")
        for name, parameter in self._parameters.items() if tensors else ():
            step, *moments = (tensors[f"{name}:{moment}"] for moment in MOMENTS)
            # AdamW counts steps on the CPU.
            values = [step.clone(), *(moment.to(parameter.device, copy=True) for moment in moments)]
            self._optimizer.state[parameter] = dict(zip(MOMENTS, values, strict=True))

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        weights = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        return weights, {name: moment.clone() for name, moment in self._moments().items()}

    @torch.no_grad()
    def _restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
        self._optimizer.state.clear()
        self._set_moments(moments)


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


def _lines(constants: Constants, piece: Sequence[Row], like: Tensor) -> Tensor:
    return padded([constants[row.key] for row in piece], like)


@contextmanager
def _drawing(key: str, device: torch.device) -> Iterator[None]:
    """Dropout inside draws from the key, and nothing outside notices."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
        yield
