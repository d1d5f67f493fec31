"""jsonl: any file of JSON lines as a dataset. `--dataset FILE.jsonl`

One object per line: `question` (text), `prompt` (text or messages) or `messages`, and `answer` or `reference` (text or number;
`"reference": null` where there is none). All other keys become the task's metadata. The file is UTF-8, with or without a
byte-order mark, with lines ended by LF or CRLF; blank lines are skipped. A task's key is its file's name and line.

Messages are those of OpenAI's API: `{"role", "content"}`, with `tool_calls` and `tool_call_id`, content as text or as parts of
text. The developer's are the system's. The last is the user's or a tool's.

All malformed lines are reported at once, so that a file can be repaired in one go.
"""

import codecs
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from agentrl.workflow.call_json import read_arguments
from agentrl.workflow.datasets import Dataset
from agentrl.workflow.errors import DatasetError
from agentrl.workflow.trajectory import Message, Role, Task, ToolCall

ENV = "math"
MAX_PROMPT_BYTES = 1_000_000
MAX_DIGITS = 4300
"""The most digits of an integer that Python reads from text."""
SHOWN_PROBLEMS = 20
SKIP_HINT = "Correct them, or leave them out with -s dataset.skip_bad_rows=true."
PROMPTS = ("question", "prompt", "messages")
REFERENCES = ("answer", "reference")
ROLES: tuple[Role, ...] = get_args(Role)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # all but \n and \t; lone surrogates too
ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(frozen=True, slots=True)
class Row:
    """One well-formed line. `line` counts from 1."""

    line: int
    messages: tuple[Message, ...]
    reference: str
    metadata: Mapping[str, Any]


def read_tasks(path: Path, split: str = "train", skip_bad_rows: bool = False) -> tuple[list[Task], list[str]]:
    """The file's tasks, and the lines that were left out (`line N: why`).

    Raises:
        DatasetError: another split than `train`; the file cannot be read; a line is malformed and `skip_bad_rows` is off.
    """
    check_split(path, split)
    rows, problems = read_file(path)
    if problems and not skip_bad_rows:
        raise malformed_error(str(path), problems, SKIP_HINT)
    return [Task(f"{path.stem}/{row.line}", row.messages, row.reference, row.metadata) for row in rows], problems


def read_file(path: Path) -> tuple[list[Row], list[str]]:
    """Calls `read_rows` on a file.

    Raises:
        DatasetError: there is no such file, or it cannot be read.
    """
    try:
        with path.open("rb") as lines:
            return read_rows(lines)
    except OSError as error:
        raise DatasetError(f"Cannot read the dataset {str(path)!r}: {error.strerror}.", "Check the path.") from error


def check_split(path: Path, split: str) -> None:
    """Checks that the split asked for is `train`, a file's only one.

    Raises:
        DatasetError: it is another split.
    """
    if split != "train":
        said = f"{str(path)!r} is one split, 'train', and {split!r} was asked."
        raise DatasetError(said, "Pass --split train, or name the other split's file.")


def malformed_error(source: str, problems: list[str], hint: str) -> DatasetError:
    """The error that shows the first problems and counts the others."""
    shown = "".join(f"\n  {problem}" for problem in islice(problems, SHOWN_PROBLEMS))
    more = len(problems) - SHOWN_PROBLEMS
    return DatasetError(
        f"{source!r} has {len(problems)} malformed row{'s' * (len(problems) > 1)}:{shown}"
        + (f"\n  ... and {more} more." if more > 0 else ""),
        hint,
    )


def read_rows(lines: Iterable[bytes]) -> tuple[list[Row], list[str]]:
    """The well-formed rows, and `line N: why` for each malformed line, in the order of the file."""
    rows: list[Row] = []
    problems: list[str] = []
    for number, line in number_lines(lines):
        try:
            rows.append(_row(number, line))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    return rows, problems


def number_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) for each line that is not blank; a byte-order mark is removed."""
    for number, raw in enumerate(lines, start=1):
        line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        if line.strip():
            yield number, line


def _row(number: int, line: bytes) -> Row:
    row = read_object(line)
    prompt = only_one_of(PROMPTS, row)
    reference = only_one_of(REFERENCES, row)
    metadata = {key: value for key, value in row.items() if key not in (prompt, reference)}
    _refuse_unstorable(metadata)
    if prompt == "messages" or (prompt == "prompt" and isinstance(row[prompt], list)):
        messages = _messages(prompt, row[prompt])
    else:
        messages = (Message("user", _prompt_text(prompt, row[prompt])),)
    return Row(number, messages, _reference(reference, row[reference]), metadata)


def read_object(line: bytes) -> dict[str, Any]:
    """The JSON object of one line.

    Raises:
        ValueError: the line holds no object, or one that cannot be stored.
    """
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite, parse_int=_whole)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1})") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read (nested too deeply)") from error
    if not isinstance(row, dict):
        raise ValueError(f"must be an object, not {kind_of(row)}")
    return row


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that JSON knows")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits is too large; write it as text")
    return int(text)


def _refuse_unstorable(metadata: Mapping[str, Any]) -> None:
    text = json.dumps(metadata, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair in the metadata") from error
    if ESCAPED_NUL.search(text):
        raise ValueError("a NUL character in the metadata")


def only_one_of(names: tuple[str, ...], row: Mapping[str, Any]) -> str:
    """The one of these keys that the row has.

    Raises:
        ValueError: it has none of them, or several.
    """
    present = [name for name in names if name in row]
    if len(present) != 1:
        found = " and ".join(map(repr, present)) if present else "none"
        raise ValueError(f"must have one of {', '.join(map(repr, names))}; found {found}")
    return present[0]


def _messages(name: str, value: object) -> tuple[Message, ...]:
    messages = read_messages(name, value)
    if not messages:
        raise ValueError(f"{name!r} is an empty list")
    _refuse_large(sum(len(message.content.encode()) + len(repr(message.tool_calls)) for message in messages))
    if messages[-1].role not in ("user", "tool"):
        raise ValueError(f"the last message must be the user's or a tool's, not the {messages[-1].role}'s")
    return messages


def read_messages(name: str, value: object) -> tuple[Message, ...]:
    """Return the messages of a list in OpenAI's form: calls and their results, parts of text, the developer's role too.

    Raises:
        ValueError: it is no such list; the message names the place.
    """
    if not isinstance(value, list):
        raise ValueError(f"{name!r} must be a list, not {kind_of(value)}")
    callers: dict[str, str] = {}
    return tuple(_message(f"{name}[{index}]", item, callers) for index, item in enumerate(value))


def _message(where: str, item: object, callers: dict[str, str]) -> Message:
    """The message; `callers` are the names of the tools that were called, by the ids of the calls so far."""
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
            raise ValueError(f"{where}: no assistant's call stands before this tool's result")
        if calls:
            raise ValueError(f"{where}.tool_calls: only an assistant calls tools")
        caller = callers.get(str(item.get("tool_call_id")), "") if role == "tool" else ""
        return Message(role, text, name=_optional_text(f"{where}.name", item.get("name")) or caller)
    if not isinstance(calls, list):
        raise ValueError(f"{where}.tool_calls must be a list, not {kind_of(calls)}")
    made = tuple(_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls))
    callers |= {str(given.get("id")): call.name for given, call in zip(calls, made, strict=True)}
    thought = next((name for name in ("reasoning", "reasoning_content") if item.get(name)), "reasoning")
    return Message(role, text, _optional_text(f"{where}.{thought}", item.get(thought)), made)


def _joined_parts(where: str, content: object) -> object:
    """The text of a list of parts; anything else as it is."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        raise ValueError(f"{where}: only parts of the type text are taken")
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
        raise ValueError(f"the prompt has {size / 1e6:.1f} MB; at most {MAX_PROMPT_BYTES / 1e6:.0f} MB is taken")


def _reference(name: str, value: object) -> str:
    if name == "reference" and value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{Decimal(repr(value)):f}"
    return plain_text(name, value)


def plain_text(name: str, value: object) -> str:
    """Checks that a value is text, not empty and without control characters, and returns it.

    Raises:
        ValueError: it is not; the message names the value.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name!r} must be text, not {kind_of(value)}")
    if not value.strip():
        raise ValueError(f"{name!r} is empty")
    control = CONTROL.search(value)
    if control:
        raise ValueError(f"control character U+{ord(control.group()):04X} in {name!r} (character {control.start() + 1})")
    return value


def kind_of(value: object) -> str:
    """JSON's name for the type of a value."""
    return {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def _refuse(split: str) -> Iterator[Task]:
    raise DatasetError("jsonl is a format, not a dataset: the file is missing.", "Name it: --dataset FILE.jsonl")


jsonl = Dataset(load=_refuse, env=ENV)
