"""Offline training: the loop that `supervised` and `preference` share, and the model folder that it makes.

An example is a demonstration, an episode, or a pair of episodes. Its training rows are learned in the same step. The model
folder has the hub's format, with LoRA merged, is written atomically, and records its origin in `training.json`.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.errors import ModelError, Stopped
from agentrl.workflow.models.logprobs import keeps_apart, line_logprobs, token_logprobs
from agentrl.workflow.models.parameters import Parameters, count_parameters
from agentrl.workflow.models.policy import Policy, open_with_weights
from agentrl.workflow.training import packing
from agentrl.workflow.training.merging import merge_weights, write_model
from agentrl.workflow.training.offline_checkpoint import Resumable, catch_interrupt
from agentrl.workflow.training.oom_backoff import OomBackoff
from agentrl.workflow.training.optimizer import LossScale, make_optimizer, take_step
from agentrl.workflow.training.ranks import ALONE, Ranks
from agentrl.workflow.training.reports import Metrics, add_up
from agentrl.workflow.training.row_scorer import seed_dropout
from agentrl.workflow.training.training_rows import Row, collate, row_tokens, rows_of, size
from agentrl.workflow.trajectory import Episode, PolicyRef

T = TypeVar("T")


class ProgressListener(Protocol):
    """A listener that receives the progress of a training."""

    def begins(self, parameters: Parameters, steps: int, done: int) -> None:
        """Receive the size of the training before its first step.

        Args:
            parameters: the number of the model's parameters, and how many of them train.
            steps: the number of all steps.
            done: the number of steps that an interrupted training has already done.
        """

    def step(self, done: int, steps: int, tokens: int, metrics: Metrics) -> None:
        """Receive the progress after each step.

        Args:
            done: the number of steps done.
            steps: the number of all steps.
            tokens: the number of tokens that the step read.
            metrics: the metrics of the step; the first is `loss`.
        """


class _SilentProgress:
    def begins(self, parameters: Parameters, steps: int, done: int) -> None:
        pass

    def step(self, done: int, steps: int, tokens: int, metrics: Metrics) -> None:
        pass


SILENT: ProgressListener = _SilentProgress()


BETAS, WEIGHT_DECAY = (0.9, 0.98), 0.01
"""The betas and the weight decay of the optimizer."""

BATCH_SIZE = 16
"""The default number of examples per step."""

PIECE_TOKENS = 8192
"""The most tokens in one forward and backward pass, padding included. It is lowered if memory runs out; no example is cut."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The length and the learning rate of a training. The rate rises in a short linear warm-up, then falls to 0 on a cosine.

    Args:
        steps: the number of optimizer steps.
        batch_size: the examples per step.
        learning_rate: the highest learning rate.
        seed: decides the initial values of new weights, the demonstrations that a dataset makes, the order of the examples, and
            which examples are held out.
        gradient_accumulation_steps: the least number of pieces that a step's examples are split into. It does not change the
            gradient.
        held_out: the share of the examples that are held out: their loss is measured, and they are not learned.
        optimizer: the name of the optimizer, as in `update.optimizer`.
    """

    steps: int
    batch_size: int
    learning_rate: float
    seed: int = 0
    gradient_accumulation_steps: int = 1
    held_out: float = 0.0
    optimizer: str = "adamw"


def recipe_for(examples: int, passes: int, learning_rate: float, batch_size: int | None = None) -> Recipe:
    """Return a recipe whose steps make `passes` passes over `examples` examples."""
    batch_size = batch_size or BATCH_SIZE
    return Recipe(passes * math.ceil(examples / batch_size), batch_size, learning_rate)


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a training on stored episodes: the model of the run that sampled them, and one of the run's policies.

    Args:
        model: the section `model` of the run's config.
        policy: the weights to start from.
        temperature: the temperature at which the episodes were sampled. The training divides logits by the same temperature. So
            only the choice of episodes changes the policy: training on all samples of a policy would not change the policy on
            average.
        manifest: the run's manifest, with its hashes of tokenizer and template.
    """

    model: ModelConfig
    policy: PolicyRef
    temperature: float = 1.0
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def record(self, stage: str) -> dict[str, Any]:
        """Return the start in the format of `training.json`."""
        return {"stage": stage, **asdict(self.policy), "temperature": self.temperature}


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model that an offline training made.

    Args:
        recipe: the recipe of the training.
        examples: the number of examples that it learned from.
        left_out: the number of examples that were left out, by reason.
        metrics: the metrics of the last step.
    """

    folder: Path
    recipe: Recipe
    examples: int
    left_out: Mapping[str, int]
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Objective(Generic[T]):
    """The objective of an offline training: its rows, weights and loss.

    Args:
        rows: a function that returns an example's rows.
        weight: a function that returns an example's weight. A batch's loss is the sum of its examples' losses, divided by the
            sum of their weights.
        terms: a function that returns sums over examples by name; `loss` is the first and carries the gradient. The first
            argument of the function is the examples. The second has, for each example, a tensor (rows,): for each of the
            example's rows, the sum of the logprobs, in nats.
        temperature: the divisor of the logits.
    """

    rows: Callable[[T], Sequence[Row]]
    weight: Callable[[T], float]
    terms: Callable[[Sequence[T], Sequence[Tensor]], Mapping[str, Tensor]]
    temperature: float = 1.0

    def tokens(self, example: T) -> int:
        """Return the number of tokens of an example."""
        return sum(map(row_tokens, self.rows(example)))


@dataclass(frozen=True, slots=True)
class Learner:
    """A module to train, and the values besides the weights that its model folder needs: the chat format, `lora` or `full`, and
    the context window in tokens. `policy` is set if the module belongs to a policy.
    """

    module: Any
    chat: Chat
    kind: str
    context: int
    policy: Policy | None = None


def make_learner(policy: Policy) -> Learner:
    """Return the learner of a policy's trainable weights."""
    with policy.training() as module:
        return Learner(module, policy.chat, policy.kind, policy.max_context, policy)


def load_learner(start: Start, device: str, threads: int) -> Learner:
    """Load the model that learns. Raise ModelError if the model cannot be loaded, CheckpointError if its weights differ from
    the recorded ones.
    """
    return make_learner(open_with_weights(start.policy, start.model, start.manifest, device, threads))


def rows_by_episode(episodes: Sequence[Episode]) -> list[tuple[Row, ...]]:
    """Return the training rows of each episode.

    Only the tokens that the episode sampled itself train, not those of a fork's parent. An episode without such tokens has no
    rows.
    """
    by_episode: list[list[Row]] = [[] for _ in episodes]
    for row in rows_of(episodes):
        by_episode[row.episode].append(row)
    return [tuple(rows) for rows in by_episode]


def training_key(learner: Learner, recipe: Recipe, source: Mapping[str, Any], examples: Iterable[Sequence[Row]]) -> str:
    """Return a hash of all that a training depends on: the model, the recipe and every token, but no path.

    Args:
        learner: the model that learns.
        source: the record of the origin that `training.json` gets.
        examples: the rows of each example, the held-out ones included.
    """
    policy = learner.policy
    model = policy.config.model_dump(mode="json", exclude={"path"}) if policy else {}
    origin = {**source, "base": policy.base_hash if policy else source["base"], "recipe": asdict(recipe), "model": model}
    digest = hashlib.sha256(json.dumps(origin, sort_keys=True).encode())
    for rows in examples:
        digest.update(repr([(row.input_ids, row.loss_mask, row.behavior_logprobs) for row in rows]).encode())
    return digest.hexdigest()


def split_examples(examples: Sequence[T], share: float, seed: int) -> tuple[list[T], list[T]]:
    """Split the examples into those to learn and those to hold out.

    The second list has the given `share` of the examples. If `share` is above 0, each list has at least one example. If `share`
    is 0, the second list is empty.
    """
    if not share:
        return list(examples), []
    count = min(max(1, round(share * len(examples))), len(examples) - 1)
    held = set(random.Random(f"held out {seed}").sample(range(len(examples)), max(0, count)))
    return [one for i, one in enumerate(examples) if i not in held], [one for i, one in enumerate(examples) if i in held]


def train(
    module: nn.Module,
    examples: Sequence[T],
    recipe: Recipe,
    objective: Objective[T],
    progress: ProgressListener = SILENT,
    held_out: Sequence[T] = (),
    resumable: Resumable | None = None,
    ranks: Ranks = ALONE,
) -> Metrics:
    """Train the module's trainable parameters in place. Return the metrics of the last step.

    Args:
        held_out: examples whose loss is measured about ten times during the training and at its end, as the metric `held_out`.
        resumable: the checkpoint to continue from and to write; None: the training cannot be continued.
        ranks: the ranks that train together. All of them call this function with the same arguments. Only rank 0 writes.

    Raises:
        ModelError: the loss or the gradient is no longer finite.
        CheckpointError: a checkpoint cannot be read or written.
        InfraError: memory does not suffice for one example, or for the optimizer's moments.
        DeviceLost: the GPU failed. The last checkpoint is unchanged.
        RankLost: the ranks have different weights.
        Stopped: Ctrl-C was pressed. With `resumable`, a checkpoint has been written.
    """
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    device = next(module.parameters()).device
    optimizer = make_optimizer(recipe.optimizer, parameters, recipe.learning_rate, BETAS, WEIGHT_DECAY)
    loss_scale = LossScale(module)
    with ranks.using_files():
        done = resumable.load(parameters, optimizer, loss_scale) if resumable else 0
    writer = resumable if ranks.rank == 0 else None
    ranks.compare_weights(parameters.values())
    order = batches(len(examples), recipe.batch_size, recipe.seed)
    backoff = backoff_over_rows(objective.rows, at_least=recipe.gradient_accumulation_steps, apart=keeps_apart(module))
    metrics: Metrics = {}
    module.train()
    with catch_interrupt() as stop:
        progress.begins(count_parameters(module), recipe.steps, done)
        for step, numbers in islice(enumerate(order), done, recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * schedule(step, recipe.steps)
            batch = [examples[number] for number in numbers]
            repeats = True
            while repeats:
                with seed_dropout(ranks.dropout_key(f"{recipe.seed}|{step}"), device):
                    metrics = accumulate(module, batch, objective, backoff, loss_scale.factor, ranks)
                loss_scale.unscale(parameters.values())
                norm = float(nn.utils.clip_grad_norm_(parameters.values(), 1.0))
                repeats = loss_scale.must_repeat(metrics["loss"], norm)
            if not math.isfinite(metrics["loss"]) or not math.isfinite(norm):
                if writer:
                    writer.drop()
                ranks.gather(None)  # a rank that raises ends all others
                message = (
                    f"In step {step + 1} the loss is {metrics['loss']:g} and the gradient's norm {norm:g}; nothing was written."
                )
                raise ModelError(message, "Pass a lower --learning-rate.")
            take_step(optimizer, parameters)
            ranks.compare_weights(parameters.values())  # before a checkpoint is written, so each can be continued
            if held_out and (step + 1 == recipe.steps or (step + 1) % max(1, recipe.steps // 10) == 0):
                metrics = {**metrics, "held_out": measure(module, held_out, objective, backoff, ranks)}
            stopped = any(ranks.gather(stop())) and step + 1 < recipe.steps
            if writer:
                with ranks.using_files():
                    writer.save_if_due(step + 1, recipe.steps, parameters, optimizer, loss_scale, now=stopped)
            progress.step(step + 1, recipe.steps, sum(map(objective.tokens, batch)), metrics)
            if stopped:
                goes_on = "the same command goes on there" if resumable else "nothing was written"
                raise Stopped(f"Stopped after step {step + 1} of {recipe.steps}; {goes_on}.")
    module.eval()
    return metrics


def accumulate(
    module: nn.Module,
    batch: Sequence[T],
    objective: Objective[T],
    backoff: OomBackoff[T],
    factor: float = 1.0,
    ranks: Ranks = ALONE,
) -> Metrics:
    """Compute the gradient of a batch's loss times `factor`, and return the batch's metrics.

    The gradient does not depend on how the batch is split into pieces, or on how its examples are dealt to ranks.
    """
    whole = sum(map(objective.weight, batch))
    for attempt in backoff.attempts(ranks.deal(batch, objective.tokens)):
        module.zero_grad(set_to_none=True)
        with attempt as pieces:
            metrics = add_up(_backward(module, piece, objective, whole, factor, ranks) for piece in pieces)
    ranks.add_gradients(parameter for parameter in module.parameters() if parameter.requires_grad)
    return ranks.add_sums(metrics)


def _backward(
    module: nn.Module, examples: Sequence[T], objective: Objective[T], whole: float, factor: float, ranks: Ranks
) -> Metrics:
    ranks.report_progress()
    terms = objective.terms(examples, row_logprob_sums(module, examples, objective))
    shares = {name: value / whole for name, value in terms.items()}
    (shares["loss"] * factor).backward()  # type: ignore[no-untyped-call]
    return {name: value.item() for name, value in shares.items()}


@torch.no_grad()
def measure(
    module: nn.Module, examples: Sequence[T], objective: Objective[T], backoff: OomBackoff[T], ranks: Ranks = ALONE
) -> float:
    """Return the loss of these examples, without learning from them."""
    module.eval()
    for attempt in backoff.attempts(ranks.deal(examples, objective.tokens)):
        loss = 0.0
        with attempt as pieces:
            for some in pieces:
                ranks.report_progress()
                loss += float(objective.terms(some, row_logprob_sums(module, some, objective))["loss"])
    module.train()
    return ranks.add_sums({"loss": loss})["loss"] / sum(map(objective.weight, examples))


def row_logprob_sums(module: nn.Module, examples: Sequence[T], objective: Objective[T]) -> list[Tensor]:
    """Return one tensor (rows,) per example: for each row, the sum of the logprobs of its tokens that train, in nats."""
    counts = [len(objective.rows(example)) for example in examples]
    rows = [row for example in examples for row in objective.rows(example)]
    return list(torch.split(_sum_logprobs(module, rows, objective.temperature), counts))


def _sum_logprobs(module: nn.Module, rows: Sequence[Row], temperature: float) -> Tensor:
    """Return a tensor (rows,): for each row, the sum of the logprobs of the tokens that train, in nats."""
    device = next(module.parameters()).device
    several = packing.pack_rows(rows, device) if keeps_apart(module) else None
    if several is not None:
        return several.sums(line_logprobs(module, several.input_ids, several.positions, several.score_mask, temperature))
    batch = collate(rows, device)
    return token_logprobs(module, batch.input_ids, batch.attention_mask, temperature, batch.loss_mask)[0].sum(1)


def backoff_over_rows(
    rows: Callable[[T], Sequence[Row]], tokens: int = PIECE_TOKENS, at_least: int = 1, apart: bool = False
) -> OomBackoff[T]:
    """Return an `OomBackoff` that splits examples into pieces that fit into memory.

    If all examples fit together, they stay one piece. Otherwise, examples of similar length are put together.

    Args:
        rows: a function that returns an example's rows.
        tokens: the most tokens of a piece, padding included.
        at_least: the least number of pieces; with fewer examples, each example is a piece.
        apart: whether several training rows may be packed into one tensor row (`training.packing`).
    """

    def extent(piece: Sequence[T]) -> int:
        return (packing.packed_size if apart else size)([row for example in piece for row in rows(example)])

    def cut(examples: Sequence[T], tokens: int) -> list[list[T]]:
        if not examples:
            return []
        max_examples = max(1, len(examples) // at_least)
        if extent(examples) <= tokens and len(examples) <= max_examples:
            return [list(examples)]
        pieces: list[list[T]] = []
        for example in sorted(examples, key=lambda one: -max(len(row.input_ids) for row in rows(one))):
            if not pieces or len(pieces[-1]) == max_examples or extent([*pieces[-1], example]) > tokens:
                pieces.append([])
            pieces[-1].append(example)
        return pieces

    return OomBackoff(tokens, cut, extent, "example", "Take a smaller model, or a device with more memory.")


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate at a step, from 0 to 1.

    It is a half cosine that falls to 0, times a linear rise over the first twentieth of the steps.
    """
    return min(1.0, (step + 1) * 20 / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))


def batches(rows: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of numbers from 0 to `rows` - 1, without end. Each pass has every number once, in a new order that the seed
    decides.
    """
    rng = random.Random(f"sft order {seed}")
    while True:
        order = rng.sample(range(rows), rows)
        yield from (order[i : i + size] for i in range(0, rows, size))


def save(learner: Learner, trained_model: TrainedModel, source: Mapping[str, Any], ranks: Ranks = ALONE) -> TrainedModel:
    """Write the model folder atomically, with the record of its origin. Raise CheckpointError if writing failed.

    Only rank 0 writes. The argument `trained_model` is returned.
    """
    if ranks.rank:
        return trained_model
    details = {
        "tool_format": learner.chat.manner.tool_format.name,
        "examples": trained_model.examples,
        "left_out": dict(trained_model.left_out),
        "metrics": dict(trained_model.metrics),
    }
    source = {**source, "recipe": asdict(trained_model.recipe), **details}
    with ranks.using_files():
        module = merge_weights(learner.policy) if learner.policy else learner.module
        write_model(trained_model.folder, module, learner.chat.tokenizer, source)
    return trained_model
