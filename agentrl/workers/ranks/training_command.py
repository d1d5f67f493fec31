"""The command `training` of a rank: the function `sft`, `sft_on_episodes` or `dpo`, with its arguments as JSON and tensors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agentrl.workers.ranks.rank_messages import RankCommand, decode_groups, encode_groups
from agentrl.workflow.config import DatasetConfig, ModelConfig
from agentrl.workflow.errors import Stopped
from agentrl.workflow.models.parameters import Parameters
from agentrl.workflow.training.demonstrations import find_demonstrations
from agentrl.workflow.training.offline_training import SILENT, Recipe, Start, TrainedModel
from agentrl.workflow.training.preference import dpo
from agentrl.workflow.training.ranks import Ranks
from agentrl.workflow.training.reports import Metrics
from agentrl.workflow.training.supervised import sft, sft_on_episodes
from agentrl.workflow.trajectory import Group, PolicyRef, Task

FUNCTIONS: Mapping[str, Callable[..., TrainedModel]] = {one.__name__: one for one in (sft, sft_on_episodes, dpo)}
Send = Callable[[Mapping[str, Any]], None]


def _as_start(values: Mapping[str, Any]) -> Start:
    return Start(**{**values, "model": ModelConfig(**values["model"]), "policy": PolicyRef(**values["policy"])})


DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "target": Path,
    "recipe": lambda values: Recipe(**values),
    "config": lambda values: ModelConfig(**values),
    "start": _as_start,
}
"""For each argument that is not a JSON value: a function that makes it of its JSON value."""


def encode_training(training: "partial[TrainedModel]") -> RankCommand:
    """Return the command of a training. `decode_training` is the inverse.

    Args:
        training: one of `FUNCTIONS` with one positional argument, the examples, and any keyword arguments. The examples of
            `sft` are the section `dataset` of a config.
    """
    (examples,) = training.args
    arguments = {"function": training.func.__name__, "options": _plain(training.keywords)}
    if isinstance(examples, DatasetConfig):
        return RankCommand("training", {**arguments, "dataset": _plain(examples)})
    parts = examples if training.func is dpo else [examples]
    groups, tensors = encode_groups([Group(Task("", (), ""), tuple(episodes)) for episodes in parts])
    return RankCommand("training", {**arguments, "groups": groups}, tensors)


def decode_training(command: RankCommand) -> "partial[TrainedModel]":
    """Rebuild the training from the result of `encode_training`, with the demonstrations of its dataset."""
    values = command.arguments
    function, options = FUNCTIONS[values["function"]], dict(values["options"])
    options |= {name: decode(options[name]) for name, decode in DECODERS.items() if options.get(name) is not None}
    if "dataset" in values:
        return partial(function, find_demonstrations(DatasetConfig(**values["dataset"])), **options)
    parts = [group.episodes for group in decode_groups(values["groups"], command.tensors)]
    return partial(function, parts if function is dpo else parts[0], **options)


def run_training(command: RankCommand, ranks: Ranks, device: str, threads: int, send: Send) -> dict[str, Any]:
    """Run a training in this rank. Return the `TrainedModel` as JSON, or the message of `Stopped`. Rank 0 sends progress."""
    progress = SentProgress(send) if ranks.rank == 0 else SILENT
    try:
        model = decode_training(command)(device=device, threads=threads, ranks=ranks, progress=progress)
    except Stopped as stopped:
        return {"stopped": str(stopped)}
    return {"model": _plain(model)}


def decode_result(result: Mapping[str, Any]) -> TrainedModel:
    """Return the model from the result of `run_training`. Raise Stopped if the training was stopped by Ctrl-C."""
    if "stopped" in result:
        raise Stopped(result["stopped"])
    model = result["model"]
    return TrainedModel(**{**model, "folder": Path(model["folder"]), "recipe": Recipe(**model["recipe"])})


class SentProgress:
    """A listener that sends the progress of a training to the command, as JSON."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def begins(self, parameters: Parameters, steps: int, done: int) -> None:
        self._send({"progress": {"parameters": _plain(parameters), "steps": steps, "done": done}})

    def step(self, done: int, steps: int, tokens: int, metrics: Metrics) -> None:
        self._send({"progress": {"done": done, "steps": steps, "tokens": tokens, "metrics": dict(metrics)}})


def _plain(value: Any) -> Any:
    """Return the value as JSON values: a copy that contains no paths, dataclasses and sections of a config."""
    return json.loads(json.dumps(value, default=_parts))


def _parts(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return {one.name: getattr(value, one.name) for one in fields(value)}
