"""Supervised fine-tuning: of the tiny model, of any model on demonstrations, and of a run's model on its best episodes.

The token ids of a demonstration are laid out like those of an episode (opening, turn, continuation, turn). Only the assistant's
turns are learned. A stored episode is used with its exact token ids, and its sampled tokens are learned. With only the best
episodes this is rejection sampling (RAFT, arXiv 2304.06767; STaR, arXiv 2203.14465).
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from agentrl.workflow.chat.rendering import Chat
from agentrl.workflow.config import ModelConfig
from agentrl.workflow.datasets import Dataset
from agentrl.workflow.envs import Env
from agentrl.workflow.errors import DatasetError, StateError
from agentrl.workflow.models.device_errors import translate_device_lost
from agentrl.workflow.models.devices import pick_device
from agentrl.workflow.models.lookup import TINY, refuse_existing
from agentrl.workflow.models.policy import Policy
from agentrl.workflow.models.tiny import tiny_model, tiny_tokenizer
from agentrl.workflow.plugins import find
from agentrl.workflow.tool_formats import AUTO
from agentrl.workflow.training.demonstrations import Demonstration
from agentrl.workflow.training.offline_checkpoint import open_resumable, rendering_clock
from agentrl.workflow.training.offline_training import (
    SILENT,
    Learner,
    Objective,
    ProgressListener,
    Recipe,
    Start,
    TrainedModel,
    load_learner,
    make_learner,
    recipe_for,
    rows_by_episode,
    save,
    split_examples,
    train,
    training_key,
)
from agentrl.workflow.training.optimizer import check_optimizer
from agentrl.workflow.training.ranks import ALONE, Ranks
from agentrl.workflow.training.training_rows import Row
from agentrl.workflow.trajectory import Episode, Message, Task

Segments = list[tuple[tuple[int, ...], bool]]
"""A conversation as pieces of token ids, each with True if the piece is the assistant's."""

Example = tuple[Row, ...]
"""The rows of one demonstration or episode."""

TOKENIZER_SAMPLES = 500
"""The number of demonstrations from which a tiny tokenizer is trained."""

PASSES = 3
"""The default number of passes over stored episodes."""

UNSOLVED, TOO_LONG, EMPTY = "no demonstration", "longer than the model reads", "nothing sampled"
"""The reasons why a task or an episode is left out."""


def default_recipe(model: str, full: bool) -> Recipe:
    """Return the default recipe of a model.

    For `tiny` it was measured on arithmetic; for other models the values are customary ones. `full` says whether all weights
    train.
    """
    if model == TINY:
        return Recipe(steps=400, batch_size=32, learning_rate=3e-3)
    return Recipe(steps=200, batch_size=16, learning_rate=2e-5 if full else 2e-4)


@translate_device_lost()
def sft(
    dataset: Dataset | Sequence[Demonstration],
    model: str,
    target: Path,
    *,
    recipe: Recipe | None = None,
    epochs: int | None = None,
    max_tasks: int | None = None,
    config: ModelConfig | None = None,
    start: Start | None = None,
    device: str = "auto",
    threads: int = 0,
    overwrite: bool = False,
    save_every: int | None = None,
    progress: ProgressListener = SILENT,
    ranks: Ranks = ALONE,
) -> TrainedModel:
    """Fine-tune a model on a dataset's demonstrations and save it.

    Args:
        dataset: a dataset that has demonstrations, or a list of demonstrations.
        model: `tiny` for a new tiny model, otherwise a folder or hub name.
        target: the model folder to make; see `models.lookup.sft_model_name`.
        recipe: None: `default_recipe`.
        epochs: the number of passes over the demonstrations; it replaces the recipe's number of steps.
        max_tasks: the number of tasks to use, from the first one on.
        config: for an existing model: LoRA or all weights, quantised or not.
        start: a run's policy to start from; `model` is then the policy's base.
        overwrite: whether an existing target is replaced.
        save_every: the number of steps from one checkpoint to the next. A killed training continues from the last checkpoint.
        ranks: the ranks that train together. All of them call this function with the same arguments, except the device.

    Raises:
        ConflictError: `overwrite` is False, and the target exists or another training of it was interrupted.
        DatasetError: the dataset has no demonstrations, none that fits the model, or other ones in other ranks.
        ConfigError: the recipe's optimizer does not work here.
        ModelError: the model cannot be loaded, its chat template cannot render such conversations, or the loss is not finite.
        CheckpointError: the policy's weights differ from the recorded ones, or a checkpoint cannot be written.
    """
    refuse_existing(target, overwrite)
    if threads:
        torch.set_num_threads(threads)
    if recipe is not None:
        check_optimizer(recipe.optimizer, pick_device(device))
    if start is not None:
        learner = load_learner(start, device, threads)
    else:
        learner = (
            _make_tiny(dataset, recipe, device, config) if model == TINY else _load_existing(model, config, device, threads)
        )
    clock = rendering_clock(target, overwrite, ranks)
    learner = replace(learner, chat=learner.chat.at(clock))
    recipe = recipe or default_recipe(model, learner.kind == "full")
    limit = None if epochs else recipe.steps * recipe.batch_size
    samples = list(demonstrations(dataset, limit if max_tasks is None else max_tasks, recipe.seed))
    roles = {message.role for one in samples if one for message in one.messages}
    learner.chat.check(system="system" in roles, tools="tool" in roles)
    segment_lists = [segments_of(learner.chat, one) if one else None for one in samples]
    examples = [(row_of(segments),) for segments in segment_lists if segments is not None]
    fitting = [example for example in examples if len(example[0].input_ids) <= learner.context]
    left_out = Counter({UNSOLVED: len(segment_lists) - len(examples), TOO_LONG: len(examples) - len(fitting)})
    if not fitting:
        problem = f"None of {len(segment_lists)} tasks has a demonstration that fits into {learner.context} tokens."
        raise DatasetError(problem, "Shorten them, or take a model that reads more.")
    learned, held_out = split_examples(fitting, recipe.held_out, recipe.seed)
    if epochs:
        recipe = replace(recipe, steps=epochs * math.ceil(len(learned) / recipe.batch_size))
    source = start.record("sft") if start else {"stage": "sft", "base": model}
    source |= {"env": dataset.env} if isinstance(dataset, Dataset) else {}
    key = training_key(learner, recipe, source, [*learned, *held_out])
    with open_resumable(target, key, save_every, overwrite, clock, ranks) as resumable:
        metrics = train(learner.module, learned, recipe, likelihood_objective(), progress, held_out, resumable, ranks)
        return save(learner, TrainedModel(target, recipe, len(learned), +left_out, metrics), source, ranks)


@translate_device_lost()
def sft_on_episodes(
    episodes: Sequence[Episode],
    start: Start,
    target: Path,
    *,
    recipe: Recipe | None = None,
    device: str = "auto",
    threads: int = 0,
    overwrite: bool = False,
    save_every: int | None = None,
    progress: ProgressListener = SILENT,
    ranks: Ranks = ALONE,
) -> TrainedModel:
    """Fine-tune a run's model on the sampled tokens of these episodes, and save the model.

    Args:
        episodes: the selected episodes (`stats.best_episodes.select_best`), of one base and temperature.
        start: the model and the weights that learn.
        target: the model folder to make.
        recipe: None: `PASSES` passes over the episodes at a learning rate of 1e-4.
        overwrite: whether an existing target is replaced.
        save_every: the number of steps from one checkpoint to the next; see `offline_checkpoint.Resumable`.
        ranks: see `sft`.

    Raises:
        ConflictError: the target exists, and `overwrite` is False.
        StateError: no episode sampled a token itself.
        ModelError, CheckpointError: see `training.offline_training.load_learner` and `train`.
    """
    refuse_existing(target, overwrite)
    rows = rows_by_episode(episodes)
    examples_by_id = [(episode.id, example) for episode, example in zip(episodes, rows, strict=True) if example]
    if not examples_by_id:
        raise StateError(
            f"None of {len(episodes)} episodes has tokens that the policy sampled: there is nothing to learn from.",
            "agentrl episodes RUN",
        )
    recipe = recipe or recipe_for(len(examples_by_id), PASSES, 1e-4)
    check_optimizer(recipe.optimizer, pick_device(device))
    learner = load_learner(start, device, threads)
    examples = [example for _, example in examples_by_id]
    source = start.record("sft") | {"episodes": [number for number, _ in examples_by_id]}
    key, objective = training_key(learner, recipe, source, examples), likelihood_objective(start.temperature)
    with open_resumable(target, key, save_every, overwrite, ranks=ranks) as resumable:
        metrics = train(learner.module, examples, recipe, objective, progress, resumable=resumable, ranks=ranks)
        trained_model = TrainedModel(
            target, recipe, len(examples_by_id), +Counter({EMPTY: len(episodes) - len(examples_by_id)}), metrics
        )
        return save(learner, trained_model, source, ranks)


def likelihood_objective(temperature: float = 1.0) -> Objective[Example]:
    """Return the objective of supervised training: the mean cross entropy over a batch's learned tokens, in nats per token."""
    return Objective(
        rows=lambda example: example,
        weight=lambda example: sum(sum(row.loss_mask) for row in example),
        terms=_negative_sum,
        temperature=temperature,
    )


def _negative_sum(examples: Sequence[Example], logprobs: Sequence[Tensor]) -> dict[str, Tensor]:
    return {"loss": -torch.cat(list(logprobs)).sum()}


def _make_tiny(
    dataset: Dataset | Sequence[Demonstration], recipe: Recipe | None, device: str, config: ModelConfig | None
) -> Learner:
    seed = recipe.seed if recipe else 0
    tokenizer = tiny_tokenizer(texts_of(demonstrations(dataset, TOKENIZER_SAMPLES, seed)))
    module = tiny_model(len(tokenizer), seed).to(pick_device(device))  # type: ignore[arg-type]
    if config is not None and config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    return Learner(
        module, Chat(tokenizer, (config and config.tool_format) or AUTO), "full", int(module.config.max_position_embeddings)
    )


def _load_existing(model: str, config: ModelConfig | None, device: str, threads: int) -> Learner:
    config = config or ModelConfig(path=model)
    return make_learner(Policy.load(config, model, device, threads))


def demonstrations(dataset: Dataset | Sequence[Demonstration], limit: int | None, seed: int) -> Iterator[Demonstration | None]:
    """Yield one item for each of the first `limit` tasks: a demonstration, or None if the task has no demonstration.

    A demonstration has the form of an episode of the dataset's env. Raise DatasetError if the dataset defines none.
    """
    if isinstance(dataset, Dataset):
        return _demonstrate_in_env(dataset, list(islice(dataset.load(dataset.sft_split), limit)), seed)
    return iter(dataset[:limit])


def _demonstrate_in_env(dataset: Dataset, tasks: Sequence[Task], seed: int) -> Iterator[Demonstration | None]:
    if dataset.demonstrations is None:
        raise DatasetError("This dataset has no demonstrations to learn from.", "Try: agentrl sft --dataset arithmetic")
    env: Env = find("envs", dataset.env)
    schemas = tuple(tool.schema for tool in env.toolset().values())
    for task, messages in zip(tasks, dataset.demonstrations(tasks, seed), strict=True):
        if messages is None:
            yield None
        else:
            yield Demonstration((*env.reset(task), *messages[len(task.messages) :]), schemas)


def texts_of(samples: Iterable[Demonstration | None]) -> list[str]:
    """Return the texts that a new tokenizer is trained on: the demonstrations, split where the role changes."""
    plain = Chat(tiny_tokenizer([]))
    return [plain.decode(ids) for one in samples if one for ids, _ in segments_of(plain, one)]


def segments_of(chat: Chat, demonstration: Demonstration) -> Segments:
    """Return the demonstration's ids, laid out like an episode's. Raise DatasetError if the chat template cannot continue one
    of its turns token for token.
    """
    segments: Segments = []
    pending: list[Message] = []
    for message in demonstration.messages:
        if message.role != "assistant":
            pending.append(message)
            continue
        if segments:
            ids, reason = chat.continuation(pending, demonstration.tools, segments[-1][0])
        else:
            ids, reason = chat.opening(pending, demonstration.tools), ""
        if ids is None:
            raise DatasetError(f"This demonstration cannot be written as one sequence of tokens: {reason}.")
        segments += [(ids, False), (chat.turn(message, demonstration.tools), True)]
        pending = []
    return segments


def row_of(segments: Segments) -> Row:
    """Return the demonstration as a training row; only the assistant's tokens train."""
    ids = tuple(token for run, _ in segments for token in run)
    mask = tuple(spoken for run, spoken in segments for _ in run)
    return Row(0, 0, ids, mask, mask, (0.0,) * len(ids))
