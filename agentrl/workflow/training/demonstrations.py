"""Demonstrations to train on: conversations, or questions with answers. `agentrl sft --dataset FILE.jsonl`

A row of the dataset is either a conversation (`messages` as in chat APIs, and `tools` if tools were offered), or a question
(`question` or `prompt`) with an answer (`answer`, `response`, `completion`, or `chosen`). The model learns all turns of the
assistant. Other columns are ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from agentrl.workflow.config import DatasetConfig
from agentrl.workflow.dataset_rows.json_objects import read_object
from agentrl.workflow.dataset_rows.sources import read_source
from agentrl.workflow.datasets import Dataset, is_rows
from agentrl.workflow.datasets.jsonl import add_problem, malformed_error, only_one_of, plain_text, prefer_mapped, read_messages
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.plugins import find
from agentrl.workflow.trajectory import Message

QUESTIONS = ("question", "prompt")
ANSWERS = ("answer", "response", "completion")
COLUMN_KINDS = ((*QUESTIONS, "messages"), (*ANSWERS, "chosen"))
"""The names of columns of two kinds: for the question, and for the answer. A row has one column of each kind."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to imitate, and the schemas of the tools that were offered in it."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def find_demonstrations(config: DatasetConfig) -> Dataset | list[Demonstration]:
    """Return the demonstrations of rows, or a dataset that is a plug-in. Raise ConfigError if there is no such plug-in. Raise
    DatasetError as `read_demonstrations` does.
    """
    if is_rows(config.name):
        return read_demonstrations(config)
    dataset: Dataset = find("datasets", config.name)
    return dataset


def read_demonstrations(config: DatasetConfig) -> list[Demonstration]:
    """Read the demonstrations of a dataset, at most `config.max_tasks`, in the order of its rows. Raise DatasetError if the
    dataset cannot be read, has no demonstrations, or has malformed rows. The message names these rows.
    """
    demonstrations: list[Demonstration] = []
    problems: list[str] = []
    for row in islice(read_source(config), config.max_tasks):
        try:
            demonstrations.append(_demonstration(prefer_mapped(row.columns(), tuple(config.map), COLUMN_KINDS)))
        except ValueError as error:
            add_problem(problems, f"{row.place}: {error}", config)
    if problems:
        raise malformed_error(config.name, problems, "Correct them.")
    if not demonstrations:
        raise DatasetError(f"{config.name!r} has no demonstrations.", "Write one JSON object per line into it.")
    return demonstrations


def _demonstration(row: Mapping[str, Any]) -> Demonstration:
    if "messages" in row:
        return Demonstration(_messages(row["messages"]), _tools(row.get("tools")))
    if isinstance(row.get("chosen"), list) and "prompt" not in row:
        return Demonstration(_messages(row["chosen"]))
    name = "chosen" if "chosen" in row else only_one_of(ANSWERS, row)
    prompt = row[only_one_of(QUESTIONS, row)]
    if isinstance(prompt, list) and isinstance(row[name], list):
        return Demonstration(_messages([*prompt, *row[name]]))
    question = plain_text(only_one_of(QUESTIONS, row), prompt)
    return Demonstration((Message("user", question), Message("assistant", plain_text(name, row[name]))))


def _messages(value: object) -> tuple[Message, ...]:
    messages = read_messages("messages", value)
    by_assistant = [message.role == "assistant" for message in messages]
    if not any(by_assistant):
        raise ValueError("it has no assistant message")
    if by_assistant[0] or any(first and second for first, second in pairwise(by_assistant)):
        raise ValueError("each assistant message must follow a message of another role")
    last = max(index for index, own in enumerate(by_assistant) if own)
    return messages[: last + 1]


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError("'tools' must be a list of objects")
    functions = (tool.get("function") for tool in value)
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise ValueError("each object in 'tools' must have a 'function' with a 'name'")
    return tuple(value)


def line_of(demonstration: Demonstration) -> bytes:
    """Return the JSON line of a demonstration, in the format that `read_demonstrations` reads. Raise ValueError if
    `read_demonstrations` could not read the line; the message has the reason.
    """
    row: dict[str, Any] = {"messages": [message_row(message) for message in demonstration.messages]}
    if demonstration.tools:
        row["tools"] = [dict(tool) for tool in demonstration.tools]
    line = json.dumps(row, ensure_ascii=False).encode()
    _demonstration(read_object(line))
    return line + b"\n"


def message_row(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object, in the format that `read_demonstrations` reads."""
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        row["name"] = message.name
    if message.thought:
        row["reasoning_content"] = message.thought
    calls = [call for call in message.tool_calls if call.error is None]  # the others' text is in the content
    if calls:
        row["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}} for call in calls
        ]
    return row
