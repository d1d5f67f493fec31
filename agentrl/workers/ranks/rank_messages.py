"""The messages between a train worker and its ranks, over a socket. Nothing is pickled.

A command to a rank is a line of JSON, and then tensors in the format of safetensors. A rank replies with lines of JSON.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, BinaryIO

import torch
from safetensors.torch import load, save
from torch import Tensor

from agentrl.workflow import errors
from agentrl.workflow.errors import AgentRLError, DeviceLost, RankLost
from agentrl.workflow.training.reports import Update
from agentrl.workflow.trajectory import Episode, Group, Message, Step, Task

NO_MESSAGE = Message("assistant", "")
TOKENS = ("prompt_ids", "sampled_ids", "behavior_logprobs")
"""The fields of an episode's step that are sent as tensors, with one value per token."""

STEP_FIELDS = tuple(one.name for one in fields(Step) if one.name not in (*TOKENS, "prompt", "message", "results"))
"""The other fields of an episode's step that are sent. Texts are not sent, because an update does not read them."""

EPISODE_FIELDS = (*("sample", "status", "stop_reason", "reward", "id", "parent_id", "fork_step", "inherited", "tainted"),)
"""The fields of an episode that are sent, besides its steps."""


@dataclass(frozen=True, slots=True)
class RankCommand:
    """A command to all ranks: its name, its arguments, and tensors."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the command as bytes."""
        body = save(dict(self.tensors))
        return json.dumps({"name": self.name, "arguments": self.arguments, "bytes": len(body)}).encode() + b"\n" + body


def read_command(source: BinaryIO) -> RankCommand | None:
    """Read the next command; None if the worker has closed the socket."""
    line = source.readline()
    if not line.endswith(b"\n"):
        return None
    header = json.loads(line)
    body = source.read(header["bytes"])
    return RankCommand(header["name"], header["arguments"], load(body)) if len(body) == header["bytes"] else None


def encode_groups(groups: Sequence[Group]) -> tuple[list[Any], dict[str, Tensor]]:
    """Return the groups as JSON values and tensors, without texts such as messages. `decode_groups` is the inverse."""
    steps = [step for group in groups for episode in group.episodes for step in episode.steps]
    tensors = {
        "prompt_ids": torch.tensor([token for step in steps for token in step.prompt_ids], dtype=torch.int64),
        "sampled_ids": torch.tensor([token for step in steps for token in step.sampled_ids], dtype=torch.int64),
        "behavior_logprobs": torch.tensor([value for step in steps for value in step.behavior_logprobs], dtype=torch.float64),
    }
    return [[group.task.key, group.slot, [_encode_episode(one) for one in group.episodes]] for group in groups], tensors


def _encode_episode(episode: Episode) -> list[Any]:
    steps = [
        [[len(getattr(step, name)) for name in TOKENS], {name: getattr(step, name) for name in STEP_FIELDS}]
        for step in episode.steps
    ]
    return [{name: getattr(episode, name) for name in EPISODE_FIELDS}, steps]


def decode_groups(encoded: Sequence[Any], tensors: Mapping[str, Tensor]) -> list[Group]:
    """Rebuild the groups from the result of `encode_groups`. All of their texts are empty."""
    tokens = {name: iter(tensors[name].tolist()) for name in TOKENS}

    def episode(task: Task, values: Mapping[str, Any], steps: Iterable[Any]) -> Episode:
        return Episode(task, steps=tuple(step(*one) for one in steps), **values)

    def step(lengths: Sequence[int], values: Mapping[str, Any]) -> Step:
        some: dict[str, Any] = {name: _take(tokens[name], length) for name, length in zip(TOKENS, lengths, strict=True)}
        some |= {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return Step(prompt=(), message=NO_MESSAGE, **some)

    groups = []
    for key, slot, episodes in encoded:
        task = Task(key, (), "")
        groups.append(Group(task, tuple(episode(task, *one) for one in episodes), slot))
    return groups


def _take(values: Iterator[Any], count: int) -> tuple[Any, ...]:
    return tuple(next(values) for _ in range(count))


def encode_update(update: Update) -> dict[str, Any]:
    """Return an update as JSON values. `decode_update` is the inverse."""
    values = {one.name: getattr(update, one.name) for one in fields(Update)}
    pairs = {name: list(values[name].items()) for name in ("advantages", "dropped")}  # JSON has no numbers as keys
    return values | pairs


def decode_update(values: Mapping[str, Any]) -> Update:
    """Rebuild the update from the result of `encode_update`."""
    pairs = {name: dict(map(tuple, values[name])) for name in ("advantages", "dropped")}
    return Update(**{**values, **pairs, "steps": tuple(values["steps"])})


class ErrorOfRank(Exception):
    """An error of the rank with the number `rank`, which another rank reports too. `values` is the result of `encode_error`."""

    def __init__(self, rank: int, values: Mapping[str, str]) -> None:
        super().__init__(values["message"])
        self.values = {**values, "rank": rank}


def encode_error(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON values. `decode_error` is the inverse, but errors of classes that are not agentrl's change their
    class.
    """
    if isinstance(error, ErrorOfRank):
        return error.values
    if isinstance(error, AgentRLError) and not isinstance(error, DeviceLost):
        return {"class": type(error).__name__, "message": error.message, "hint": error.hint}
    return {"class": "", "message": f"{type(error).__name__}: {error}", "hint": ""}


def decode_error(values: Mapping[str, Any], rank: int, host: str = "") -> AgentRLError:
    """Return the error that a rank reported. The error becomes a RankLost if its class is not one of agentrl's, or if the
    rank lost its device.

    A lost device ends only the rank's process. The worker's own device still works. `host` is the name of the rank's host, if
    that is another host.
    """
    kind = getattr(errors, values["class"], RankLost) if values["class"] else RankLost
    message = values["message"] if values["class"] else f"Rank {rank} failed: {values['message']}"
    error: AgentRLError = kind(f"On {host}: {message}" if host else message, values["hint"])
    return error
