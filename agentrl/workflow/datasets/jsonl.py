"""jsonl: rows of a file, a folder or the hub as tasks: `--dataset FILE.jsonl`, FILE.parquet, FILE.csv, FOLDER, OWNER/NAME.

A row has `question` (text), `prompt` (text or messages) or `messages`, and `answer` or `reference` (text or number;
`"reference": null` if there is none). Of several right answers, the first is the reference, and the others become the
metadata's `aliases`. All other columns become the task's metadata. A task's key is its file's name and line.

Rows of verl and TRL: if a row has no answer, the reference is `reward_model.ground_truth`, else `completion`, else the last
message of `chosen`. If a row has no prompt, the prompt is the common beginning of `chosen` and `rejected`.

Messages have OpenAI's format. A developer message becomes a system message. The last message must come from the user or a tool.
All malformed rows are reported together.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, get_args

from agentrl.workflow.call_json import read_arguments
from agentrl.workflow.config import DatasetConfig
from agentrl.workflow.dataset_rows import formats
from agentrl.workflow.dataset_rows.formats import SourceRow
from agentrl.workflow.dataset_rows.json_objects import kind_of
from agentrl.workflow.datasets import Dataset
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.trajectory import Message, Role, Task, ToolCall

ENV = "math"
MAX_PROMPT_BYTES = 1_000_000
MAX_PROBLEMS = 1000
"""The maximum number of malformed rows before reading stops."""
SHOWN_PROBLEMS = 20
SKIP_HINT = "Correct them, or leave them out with -s dataset.skip_bad_rows=true."
PROMPTS = ("question", "prompt", "messages")
REFERENCES = ("answer", "reference")
OTHER_NAMES = {
    PROMPTS: ("problem", "input", "instruction", "query", "task", "text"),
    REFERENCES: ("solution", "output", "response", "completion", "target", "label", "ground_truth", "expected", "final_answer"),
}
"""Common other names of these columns. Error messages suggest them; they are never read without `--map`."""
ROLES: tuple[Role, ...] = get_args(Role)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # all but \n and \t; lone surrogates too
ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A well-formed row. `line` is the number of its line, counted from 1."""

    line: int
    messages: tuple[Message, ...]
    reference: str
    metadata: Mapping[str, Any]


def read_tasks(rows: Iterable[SourceRow], config: DatasetConfig, problems: list[str]) -> Iterator[Task]:
    """Yield the tasks of the rows; add `PLACE: why` to `problems` for each malformed row. Raise DatasetError if more than
    MAX_PROBLEMS rows are malformed, and `config.skip_bad_rows` is off.
    """
    mapped = tuple(config.map)
    for source in rows:
        try:
            row = _row(source.number, source.columns(), mapped)
        except ValueError as error:
            add_problem(problems, f"{source.place}: {error}", config)
            continue
        yield Task(f"{source.label}/{row.line}", row.messages, row.reference, row.metadata)


def add_problem(problems: list[str], problem: str, config: DatasetConfig) -> None:
    """Add the problem of a malformed row to the list. Raise DatasetError if the list then has more than `MAX_PROBLEMS`
    problems, and `config.skip_bad_rows` is off.
    """
    problems.append(problem)
    if len(problems) > MAX_PROBLEMS and not config.skip_bad_rows:
        raise malformed_error(config.name, problems, SKIP_HINT)


def read_file(path: Path) -> tuple[list[TaskRow], list[str]]:
    """Return the well-formed rows of a JSON lines file, and `line N: why` for each malformed row. Raise DatasetError if the
    file cannot be read.
    """
    return read_values(formats.read_rows(path))


def malformed_error(source: str, problems: list[str], hint: str) -> DatasetError:
    """Return the error that lists the first problems and the number of the remaining ones."""
    lines = "".join(f"\n  {problem}" for problem in islice(problems, SHOWN_PROBLEMS))
    more = len(problems) - SHOWN_PROBLEMS
    if "found none among" in problems[0]:
        hint = f"Map the columns: --map question=COLUMN,answer=COLUMN. {hint}"
    return DatasetError(
        f"{source!r} has {len(problems)} malformed row{'s' * (len(problems) > 1)}:{lines}"
        + (f"\n  ... and {more} more." if more > 0 else ""),
        hint,
    )


def read_rows(lines: Iterable[bytes]) -> tuple[list[TaskRow], list[str]]:
    """Return the well-formed rows of lines of JSON, and `line N: why` for each malformed line."""
    return read_values(formats.parse_json_lines(lines))


def read_values(sources: Iterable[SourceRow]) -> tuple[list[TaskRow], list[str]]:
    """Return the well-formed rows, and `line N: why` for each malformed row."""
    rows: list[TaskRow] = []
    problems: list[str] = []
    for source in sources:
        try:
            rows.append(_row(source.number, source.columns()))
        except ValueError as error:
            problems.append(f"{source.place}: {error}")
    return rows, problems


def _row(number: int, row: dict[str, Any], mapped: tuple[str, ...] = ()) -> TaskRow:
    row = prefer_mapped(row, mapped, (PROMPTS, REFERENCES)) if mapped else row
    prompt = "chosen" if _has_implicit_prompt(row) else only_one_of(PROMPTS, row)
    reference, answer = _find_reference(row)
    metadata = {key: value for key, value in row.items() if key not in (prompt, reference)}
    _refuse_unstorable(metadata)
    if prompt == "chosen":
        messages = _messages(prompt, _shared_beginning(row["chosen"], row["rejected"]))
    elif prompt == "messages" or (prompt == "prompt" and isinstance(row[prompt], list)):
        messages = _messages(prompt, row[prompt])
    else:
        messages = (Message("user", _prompt_text(prompt, row[prompt])),)
    if isinstance(answer, list):
        answer, metadata = _first_answer(reference, answer, metadata)
    return TaskRow(number, messages, _reference(reference, answer), metadata)


def prefer_mapped(row: dict[str, Any], mapped: Sequence[str], kinds: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the row without the columns that compete with a mapped column.

    Args:
        mapped: the fields to which a column was mapped.
        kinds: for each kind of field, all of its names. If one name is mapped, the columns with the other names are removed.
    """
    for names in kinds:
        if any(name in mapped for name in names):
            row = {key: value for key, value in row.items() if key not in names or key in mapped}
    return row


def _has_implicit_prompt(row: Mapping[str, Any]) -> bool:
    """Return True if the row is a pair of whole conversations, whose common beginning is the prompt (TRL)."""
    pair = isinstance(row.get("chosen"), list) and isinstance(row.get("rejected"), list)
    return pair and not any(name in row for name in PROMPTS)


def _shared_beginning(chosen: list[Any], rejected: list[Any]) -> list[Any]:
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(chosen[:-1], rejected[:-1], strict=False))
    return [message for message, _ in shared]


def _find_reference(row: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name of the column with the reference, and the reference. This column is not metadata."""
    if not any(name in row for name in REFERENCES):
        judged = row.get("reward_model")
        if isinstance(judged, dict) and "ground_truth" in judged:
            return "reward_model.ground_truth", judged["ground_truth"]
        for name in ("completion", "chosen"):
            if name in row:
                return name, answer_text(name, row[name])
    name = only_one_of(REFERENCES, row)
    return name, row[name]


def answer_text(name: str, value: object) -> object:
    """Return the text of a completion. For a list of messages, this is the text of the last message; another value is returned
    unchanged. Raise ValueError if the list does not end with an assistant's message.
    """
    if not isinstance(value, list):
        return value
    messages = read_messages(name, value)
    if not messages or messages[-1].role != "assistant":
        raise ValueError(f"{name!r} must end with an assistant's message")
    return messages[-1].content


def _first_answer(name: str, answers: list[Any], metadata: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the first of several right answers, and the metadata with the others as `aliases`."""
    if not answers:
        raise ValueError(f"{name!r} is an empty list")
    if len(answers) > 1 and "aliases" in metadata:
        raise ValueError(f"{name!r} is a list, so the row may not have 'aliases' as well")
    others = [_reference(f"{name}[{number}]", answer) for number, answer in enumerate(answers[1:], start=1)]
    return answers[0], {**metadata, "aliases": others} if others else dict(metadata)


def _refuse_unstorable(metadata: Mapping[str, Any]) -> None:
    if not metadata:
        return
    try:
        text = _encode(metadata)
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("an unpaired surrogate in the metadata") from error
    except TypeError as error:
        raise ValueError(f"the metadata cannot be written as JSON ({error})") from error
    except ValueError as error:
        infinite = next((name for name, value in metadata.items() if "nfinity" in json.dumps(value)), "")
        raise ValueError(f"an infinite number in {infinite!r:.80}") from error
    if "\\u0000" in text and ESCAPED_NUL.search(text):
        raise ValueError("a NUL character in the metadata")


def only_one_of(names: tuple[str, ...], row: Mapping[str, Any]) -> str:
    """Return the one column of these names that the row has. Raise ValueError if the row has no such column, or several."""
    present = [name for name in names if name in row]
    if len(present) != 1:
        columns = ", ".join(f"{name!r:.40}" for name in islice(row, 8))
        near = _near_column(names, row)
        meant = f" (--map {names[0]}={near}?)" if near else ""
        text = " and ".join(map(repr, present)) if present else f"none among {columns or 'no columns'}{meant}"
        raise ValueError(f"must have one of {', '.join(map(repr, names))}; found {text}")
    return present[0]


def _near_column(names: tuple[str, ...], row: Mapping[str, Any]) -> str:
    """Return the column that the user probably meant by one of these names; empty if no column is similar."""
    misspelt = (column for name in names for column in get_close_matches(name, row, 1, 0.75))
    return next(misspelt, "") or next((column for column in row if column.lower() in OTHER_NAMES.get(names, ())), "")


def _messages(name: str, value: object) -> tuple[Message, ...]:
    messages = read_messages(name, value)
    if not messages:
        raise ValueError(f"{name!r} is an empty list")
    _refuse_large(sum(len(message.content.encode()) + len(repr(message.tool_calls)) for message in messages))
    if messages[-1].role not in ("user", "tool"):
        raise ValueError(f"the last message must be the user's or a tool's, not the {messages[-1].role}'s")
    return messages


def read_messages(name: str, value: object) -> tuple[Message, ...]:
    """Parse a list of messages in OpenAI's format, which may have tool calls and results, parts of text, and the developer
    role. Raise ValueError if the value is not such a list; the message names the place.
    """
    if not isinstance(value, list):
        raise ValueError(f"{name!r} must be a list, not {kind_of(value)}")
    callers: dict[str, str] = {}
    return tuple(_message(f"{name}[{index}]", item, callers) for index, item in enumerate(value))


def _message(where: str, item: object, callers: dict[str, str]) -> Message:
    if not isinstance(item, dict):
        raise ValueError(f"{where} must be an object, not {kind_of(item)}")
    role = "system" if item.get("role") == "developer" else item.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}.role must be one of {', '.join(ROLES)}")
    calls = item.get("tool_calls") or []
    content = _joined_parts(f"{where}.content", item.get("content"))
    silent = content in (None, "") and (bool(calls) or role == "tool")  # a call needs no word, and a tool may have none
    text = "" if silent else plain_text(f"{where}.content", content)
    if role != "assistant":
        if role == "tool" and not callers:
            raise ValueError(f"{where}: this tool result has no earlier call of an assistant")
        if calls:
            raise ValueError(f"{where}.tool_calls: only an assistant calls tools")
        caller = callers.get(str(item.get("tool_call_id")), "") if role == "tool" else ""
        return Message(role, text, name=_optional_text(f"{where}.name", item.get("name")) or caller)
    if not isinstance(calls, list):
        raise ValueError(f"{where}.tool_calls must be a list, not {kind_of(calls)}")
    tool_calls = tuple(_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls))
    callers |= {str(call_item.get("id")): call.name for call_item, call in zip(calls, tool_calls, strict=True)}
    thought = next((name for name in ("reasoning", "reasoning_content") if item.get(name)), "reasoning")
    return Message(role, text, _optional_text(f"{where}.{thought}", item.get(thought)), tool_calls)


def _joined_parts(where: str, content: object) -> object:
    """Join a list of text parts to one text. Another value is returned unchanged."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        raise ValueError(f"{where}: only parts of type text are accepted")
    return "".join(part["text"] for part in content)


def _optional_text(where: str, value: object) -> str:
    return "" if value in (None, "") else plain_text(where, value)


def _call(where: str, value: object) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"{where} must hold a 'function' with a 'name' and 'arguments'")
    call = read_arguments(plain_text(f"{where}.function.name", function.get("name")), function.get("arguments") or {})
    if call.error:
        raise ValueError(f"{where}: {call.error}")
    return call


def _prompt_text(name: str, value: object) -> str:
    text = plain_text(name, value)
    _refuse_large(len(text.encode()))
    return text


def _refuse_large(size: int) -> None:
    if size > MAX_PROMPT_BYTES:
        raise ValueError(f"the prompt has {size / 1e6:.1f} MB; at most {MAX_PROMPT_BYTES / 1e6:.0f} MB are accepted")


def _reference(name: str, value: object) -> str:
    if name == "reference" and value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{Decimal(repr(value)):f}"
    return plain_text(name, value)


def plain_text(name: str, value: object) -> str:
    """Return a value as text with LF line ends. Raise ValueError if it is not text, empty, or has control characters."""
    if not isinstance(value, str):
        raise ValueError(f"{name!r} must be text, not {kind_of(value)}")
    if not value.strip():
        raise ValueError(f"{name!r} is empty")
    value = value.replace("\r\n", "\n")
    control = CONTROL.search(value)
    if control:
        raise ValueError(f"control character U+{ord(control.group()):04X} in {name!r} (character {control.start() + 1})")
    return value


def _refuse(split: str) -> Iterator[Task]:
    raise DatasetError("jsonl is a format, not a dataset: the file is missing.", "Pass it: --dataset FILE.jsonl")


jsonl = Dataset(load=_refuse, env=ENV)
