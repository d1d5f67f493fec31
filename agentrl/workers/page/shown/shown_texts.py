"""Shortens texts and values to a size that a page can show, and records the full length of each. `ShownTexts` limits the total
length of all texts in a response.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.workflow.store.row_codecs import SHARED

SHOWN_CHARS = 20_000
LISTED_CHARS = 2000
MAX_DEPTH = 40
"""The deepest nesting of a value that is returned as JSON. A value that is nested more deeply is returned as text."""


def cut_rows(rows: Iterable[Mapping[str, Any]], max_chars: int = LISTED_CHARS) -> list[Mapping[str, Any]]:
    """Return the rows with long values shortened. `cut` has the full length of each such column, in characters."""
    return [_cut_row(row, max_chars) for row in rows]


def cut_texts(row: Mapping[str, Any], max_chars: int = LISTED_CHARS) -> dict[str, Any]:
    """Return the row with long texts shortened. `cut` has the full lengths in characters, as in `cut_rows`."""
    cut = {name: len(value) for name, value in row.items() if isinstance(value, str) and len(value) > max_chars}
    return {**row, **{name: row[name][:max_chars] for name in cut}, **({"cut": cut} if cut else {})}


def _cut_row(row: Mapping[str, Any], max_chars: int) -> Mapping[str, Any]:
    parts = {name: cut_value(value, max_chars) for name, value in row.items() if isinstance(value, str | dict | list)}
    cut = {name: size for name, (_, size) in parts.items() if size is not None}
    return {**row, **{name: parts[name][0] for name in cut}, "cut": cut} if cut else row


def cut_value(value: Any, max_chars: int = SHOWN_CHARS) -> tuple[Any, int | None]:
    """Return the JSON value and None. If the value is too large, return the beginning of its text and the full length."""
    if isinstance(value, str):
        return value[:max_chars], len(value) if len(value) > max_chars else None
    if not isinstance(value, dict | list):
        return value, None
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):
        return "(not shown: nested too deep, or a number is too long)", 0
    shallow = len(text) <= max_chars and _depth(text) <= MAX_DEPTH
    return (value, None) if shallow else (text[:max_chars], len(text))


def _depth(text: str) -> int:
    deepest = depth = 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        deepest = max(deepest, depth)
    return deepest


ANSWER_CHARS = 2_000_000
LEAST_CHARS = 200
"""The number of characters of each text that are shown even if the response is full."""


class ShownTexts:
    """A writer of texts into a response. In the response, `cut` has the full length of each shortened text, and `of` has the
    path of the full text.
    """

    def __init__(self, max_chars: int = SHOWN_CHARS, max_total_chars: int = ANSWER_CHARS) -> None:
        """Set the limits: the most characters of one text, and of all texts together."""
        self._max_chars, self._left = max_chars, max_total_chars

    def put(self, target: dict[str, Any], name: str, text: str | None, chars: int | None = None, path: str = "") -> None:
        """Write a text to `target[name]`, shortened if necessary; write None as null. If `text` is only the beginning of a
        text, `chars` is the length of the full text. `path` is the address at which `/api/episodes/{id}/text` returns the full
        text.
        """
        if text is None:
            target[name] = None
            return
        whole = max(len(text), chars or 0)
        shortened = text[: self._room()]
        self._left -= len(shortened)
        target[name] = shortened
        if len(shortened) < whole:
            self._mark(target, name, whole, path)

    def put_value(self, target: dict[str, Any], name: str, value: Any, path: str = "") -> None:
        """Write a JSON value to `target[name]`. If the value is too large, write the beginning of its text instead."""
        shortened, chars = cut_value(value, self._room())
        if isinstance(shortened, str):
            self._left -= len(shortened)
        else:
            self._left -= len(str(shortened))
        target[name] = shortened
        if chars is not None:
            self._mark(target, name, chars, path)

    def _room(self) -> int:
        return max(LEAST_CHARS, min(self._max_chars, self._left))

    def _mark(self, target: dict[str, Any], name: str, chars: int, path: str) -> None:
        target.setdefault("cut", {})[name] = chars
        if path:
            target.setdefault("of", {})[name] = path


Row = Mapping[str, Any]
MAX_MESSAGES = 200
"""The most messages of a turn or a task."""
MAX_KEY = 10_000


def new_messages(prompt: Any, results: Sequence[Row]) -> tuple[int, list[tuple[int, Any]]]:
    """Return two values: the number of messages that a step's prompt shares with another chain, and the prompt's other
    messages, each with its position. `prompt` is the messages of the prompt. `results` are the calls of the turn before, with
    `result` and `result_chars`. Messages that repeat such a result are left out.
    """
    messages = prompt if isinstance(prompt, list) else []
    head = messages[0].get(SHARED, 0) if messages and isinstance(messages[0], Mapping) else 0
    shared = head if isinstance(head, int) else 0
    result_keys = {(call["result"], call["result_chars"]) for call in results if call["result"] is not None}
    new = list(enumerate(messages))[1 if shared else 0 :]
    return shared, [(place, message) for place, message in new if not _is_told(message, result_keys)]


def _is_told(message: Any, result_keys: set[tuple[str, int]]) -> bool:
    if not (isinstance(message, Mapping) and message.get("role") == "tool"):
        return False
    content = str(message.get("content", ""))
    return any(len(content) == chars and content.startswith(result) for result, chars in result_keys)


def shown_message(message: Any, path: str, texts: ShownTexts) -> dict[str, Any]:
    """Convert a message from a JSON column to an object of the response, with its texts shortened by `texts`. `path` is the
    address of the message for `/api/episodes/{id}/text`, which returns the full texts.
    """
    row = message if isinstance(message, Mapping) else {"role": "", "content": str(message)}
    document: dict[str, Any] = {"role": str(row.get("role", ""))[:100]}
    texts.put(document, "content", str(row.get("content", "")), path=f"{path}/content")
    if row.get("thought"):
        texts.put(document, "thought", str(row["thought"]), path=f"{path}/thought")
    if row.get("name"):
        document["name"] = str(row["name"])[:1000]
    if row.get("tool_calls"):
        texts.put_value(document, "tool_calls", row["tool_calls"], path=f"{path}/tool_calls")
    return document


def shown_task(task: Row, texts: ShownTexts) -> dict[str, Any]:
    """Convert a task that `load_task_of` has loaded to an object of the response."""
    document: dict[str, Any] = {"id": task["id"], "key": task["key"][:MAX_KEY]}
    texts.put(document, "reference", task["reference"], task["reference_chars"], "task/reference")
    messages = task["messages"] if isinstance(task["messages"], list) else []
    document["messages"] = [
        shown_message(message, f"task/messages/{place}", texts) for place, message in enumerate(messages[:MAX_MESSAGES])
    ]
    document["messages_left_out"] = len(messages[MAX_MESSAGES:])
    return document
