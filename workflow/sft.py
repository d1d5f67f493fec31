"""Supervised fine-tuning on a dataset's demonstrations: how the tiny model is made, and how any model gets a start.

A demonstration is laid out token by token as an episode would be (opening, turn, continuation, turn); only the
assistant's turns are learned. The result is a model folder in the hub's format, written beside and renamed, so that
another process never sees half of it.
"""

import math
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workflow.base import pick_device
from workflow.chat import Chat, Schema
from workflow.config import ModelConfig
from workflow.datasets import Dataset
from workflow.envs import Env
from workflow.errors import ConfigError, ConflictError, DatasetError
from workflow.models import TINY
from workflow.plugins import find
from workflow.policy import Policy
from workflow.scoring import token_logprobs
from workflow.tiny import tiny_model, tiny_tokenizer
from workflow.trajectory import Message, Task

Progress = Callable[[int, int, float], None]
"""Called after each step with its number (from 1), how many there are, and the step's mean loss in nats per token."""

Segments = list[tuple[tuple[int, ...], bool]]
"""A conversation as runs of token ids; True where the assistant says them."""

TOKENIZER_SAMPLES = 500
"""So many demonstrations show a tiny tokenizer its texts."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how fast: AdamW, a short linear warm-up, then a cosine down to zero.

    Args:
        steps: optimizer steps.
        batch_size: demonstrations per step.
        learning_rate: at its highest.
        seed: of the weights (where new), the teacher and the order.
    """

    steps: int
    batch_size: int
    learning_rate: float
    seed: int = 0


def default_recipe(model: str, full: bool) -> Recipe:
    """What works: measured for `tiny` on arithmetic, customary for the others."""
    if model == TINY:
        return Recipe(steps=400, batch_size=32, learning_rate=3e-3)
    return Recipe(steps=200, batch_size=16, learning_rate=2e-5 if full else 2e-4)


def sft(
    dataset: Dataset,
    model: str,
    target: Path,
    *,
    recipe: Recipe | None = None,
    config: ModelConfig | None = None,
    device: str = "auto",
    threads: int = 0,
    overwrite: bool = False,
    progress: Progress = lambda step, steps, loss: None,
) -> Path:
    """Fine-tunes a model on a dataset's demonstrations and saves it.

    Args:
        dataset: one with demonstrations.
        model: `tiny` for a new tiny model, else a folder or hub name.
        target: the model folder to make; see `workflow.models.made_name`.
        recipe: unset: `default_recipe`.
        config: LoRA or all weights, for a model that exists.

    Returns:
        The target.

    Raises:
        ConflictError: the target exists, and overwrite is off.
        DatasetError: the dataset has no demonstrations.
        ConfigError: a quantised base, into which no adapter can be merged without loss.
        ModelError: the model cannot be loaded.
    """
    if target.exists() and not overwrite:
        raise ConflictError(f"There is a model in {str(target)!r} already.", "Pass --force to make it anew.")
    if threads:
        torch.set_num_threads(threads)
    learner = _tiny(dataset, recipe, device) if model == TINY else _existing(model, config, recipe, device, threads)
    recipe = learner.recipe
    tasks = list(islice(dataset.load(dataset.sft_split), recipe.steps * recipe.batch_size))
    examples = [_example(segments) for segments in conversations(learner.chat, dataset, tasks, recipe.seed)]
    fitting = [ids_and_mask for ids_and_mask in examples if len(ids_and_mask[0]) <= learner.context]
    if not fitting:
        raise DatasetError(f"No demonstration fits into the model's {learner.context} tokens.")
    train(learner.module, fitting, recipe, progress)
    _save(learner, target)
    return target


@dataclass(frozen=True, slots=True)
class _Learner:
    module: Any
    chat: Chat
    kind: str
    context: int
    recipe: Recipe


def _tiny(dataset: Dataset, recipe: Recipe | None, device: str) -> _Learner:
    recipe = recipe or default_recipe(TINY, full=True)
    tasks = list(islice(dataset.load(dataset.sft_split), TOKENIZER_SAMPLES))
    tokenizer = tiny_tokenizer(conversation_texts(dataset, tasks, recipe.seed))
    module = tiny_model(len(tokenizer), recipe.seed).to(pick_device(device))  # type: ignore[arg-type]
    return _Learner(module, Chat(tokenizer), "full", int(module.config.max_position_embeddings), recipe)


def _existing(model: str, config: ModelConfig | None, recipe: Recipe | None, device: str, threads: int) -> _Learner:
    config = config or ModelConfig.model_validate({"path": model})
    if config.load_in_4bit or config.load_in_8bit:
        raise ConfigError("sft merges what it learned into the base, which a quantised base cannot take.", "Leave it out.")
    policy = Policy.load(config, model, device, threads)
    recipe = recipe or default_recipe(model, policy.kind == "full")
    with policy.training() as module:
        return _Learner(module, policy.chat, policy.kind, policy.max_context, recipe)


def conversations(chat: Chat, dataset: Dataset, tasks: Sequence[Task], seed: int) -> Iterator[Segments]:
    """Each task's demonstration as the episode it would be.

    Raises:
        DatasetError: the dataset has no demonstrations, or one whose turns a template cannot continue.
    """
    if dataset.demonstrations is None:
        raise DatasetError("This dataset has no demonstrations to learn from.", "Try: agentrl sft --dataset arithmetic")
    env: Env = find("envs", dataset.env)
    schemas = [tool.schema for tool in env.toolset().values()]
    for task, messages in zip(tasks, dataset.demonstrations(tasks, seed), strict=True):
        yield _segments(chat, [*env.reset(task), *messages[len(task.messages) :]], schemas)


def conversation_texts(dataset: Dataset, tasks: Sequence[Task], seed: int) -> list[str]:
    """The texts that a tokenizer of that dataset meets, cut where one speaker's tokens end and the other's begin."""
    plain = Chat(tiny_tokenizer([]))
    return [plain.decode(ids) for segments in conversations(plain, dataset, tasks, seed) for ids, _ in segments]


def _segments(chat: Chat, messages: Sequence[Message], schemas: Sequence[Schema]) -> Segments:
    segments: Segments = []
    heard: list[Message] = []
    for message in messages:
        if message.role != "assistant":
            heard.append(message)
            continue
        ids, reason = chat.continuation(heard, schemas) if segments else (chat.opening(heard, schemas), "")
        if ids is None:
            raise DatasetError(f"A demonstration cannot be one row of tokens: {reason}.")
        segments += [(ids, False), (chat.turn(message), True)]
        heard = []
    return segments


Example = tuple[list[int], list[bool]]
"""Token ids, and which of them are learned."""


def _example(segments: Segments) -> Example:
    ids = [token for run, _ in segments for token in run]
    mask = [spoken for run, spoken in segments for _ in run]
    return ids, mask


def train(module: nn.Module, examples: Sequence[Example], recipe: Recipe, progress: Progress) -> None:
    """Trains the module's trainable parameters in place on the masked tokens of the examples."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    device = parameters[0].device
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.01)
    order = batches(len(examples), recipe.batch_size, recipe.seed)
    module.train()
    for step, rows in enumerate(islice(order, recipe.steps)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * schedule(step, recipe.steps)
        loss = masked_loss(module, *padded([examples[row] for row in rows], device))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress(step + 1, recipe.steps, loss.item())
    module.eval()


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate: up over the first twentieth, then a half cosine."""
    return min(1.0, (step + 1) * 20 / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))


def batches(rows: int, size: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of row numbers: every row once, in a new order each time round."""
    rng = random.Random(f"sft order {seed}")
    while True:
        order = rng.sample(range(rows), rows)
        yield from (order[i : i + size] for i in range(0, rows, size))


def padded(examples: Sequence[Example], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, attention mask and learned mask, each (B, T), padded on the right."""
    width = max(len(ids) for ids, _ in examples)
    ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in examples])
    present = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row, _ in examples])
    learned = torch.tensor([mask + [False] * (width - len(mask)) for _, mask in examples])
    return ids.to(device), present.to(device), learned.to(device)


def masked_loss(module: nn.Module, ids: Tensor, present: Tensor, learned: Tensor) -> Tensor:
    """Mean cross entropy over the learned tokens, in nats; all inputs (B, T)."""
    logprobs, _ = token_logprobs(module, ids, present, wanted=learned)
    return -logprobs.sum() / learned[:, 1:].sum()


def _save(learner: _Learner, target: Path) -> None:
    beside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    module = learner.module.merge_and_unload() if learner.kind == "lora" else learner.module
    module.save_pretrained(beside)
    learner.chat.tokenizer.save_pretrained(beside)
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)
