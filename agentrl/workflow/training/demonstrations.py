"""Files of JSON lines to imitate: whole conversations, or questions with answers. `agentrl sft --dataset FILE.jsonl`

One object per line: `messages`, a list as chat APIs take it (`role`, `content`, an assistant's `tool_calls`, a tool's `name`,
`reasoning_content`), with the `tools` that were offered, if any; or `question` or `prompt`, and `answer`, `response` or
`completion`. What an assistant says is learned, each of its turns. UTF-8; whatever else a line holds is passed over.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentrl.workflow.datasets.jsonl import malformed_error, number_lines, only_one_of, plain_text, read_messages, read_object
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.trajectory import Message

QUESTIONS = ("question", "prompt")
ANSWERS = ("answer", "response", "completion")
MOST_BYTES = 4_000_000
"""The most bytes of one line: a conversation that any model could read is shorter."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation to imitate, and the schemas of the tools that were offered in it."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def read_demonstrations(path: Path, most: int | None = None) -> list[Demonstration]:
    """The file's demonstrations, in its order.

    Args:
        most: only the first N.

    Raises:
        DatasetError: the file cannot be read, holds none, or has malformed lines, which are named.
    """
    found: list[Demonstration] = []
    problems: list[str] = []
    try:
        with path.open("rb") as lines:
            for number, line in number_lines(lines):
                if most is not None and len(found) + len(problems) == most:
                    break
                try:
                    found.append(_demonstration(line))
                except ValueError as error:
                    problems.append(f"line {number}: {error}")
    except OSError as error:
        raise DatasetError(f"Cannot read the dataset {str(path)!r}: {error.strerror}.", "Check the path.") from error
    if problems:
        raise malformed_error(str(path), problems, "Correct them.")
    if not found:
        raise DatasetError(f"{str(path)!r} holds no demonstration.", "Write one JSON object per line into it.")
    return found


def _demonstration(line: bytes) -> Demonstration:
    if len(line) > MOST_BYTES:
        raise ValueError(f"{len(line) / 1e6:.1f} MB; at most {MOST_BYTES / 1e6:.0f} MB is taken")
    row = read_object(line)
    if "messages" in row:
        return Demonstration(_messages(row["messages"]), _tools(row.get("tools")))
    question, answer = (plain_text(name, row[name]) for name in (only_one_of(QUESTIONS, row), only_one_of(ANSWERS, row)))
    return Demonstration((Message("user", question), Message("assistant", answer)))


def _messages(value: object) -> tuple[Message, ...]:
    messages = read_messages("messages", value)
    said = [message.role == "assistant" for message in messages]
    if not any(said):
        raise ValueError("no message is the assistant's")
    if said[0] or any(first and second for first, second in pairwise(said)):
        raise ValueError("an assistant's message answers none that stands before it")
    last = max(index for index, own in enumerate(said) if own)
    return messages[: last + 1]


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError("'tools' must be a list of objects")
    named = (tool.get("function") for tool in value)
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in named):
        raise ValueError("'tools': each must hold a 'function' with a 'name'")
    return tuple(value)


def line_of(shown: Demonstration) -> bytes:
    """The line of a file that holds the demonstration, as `read_demonstrations` reads it.

    Raises:
        ValueError: it could not be read again, and why.
    """
    row: dict[str, Any] = {"messages": [message_row(message) for message in shown.messages]}
    if shown.tools:
        row["tools"] = [dict(tool) for tool in shown.tools]
    line = json.dumps(row, ensure_ascii=False).encode()
    _demonstration(line)
    return line + b"\n"


def message_row(message: Message) -> dict[str, Any]:
    """A message as such a line has it."""
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
