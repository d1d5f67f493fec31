"""A model's input messages, as an answer shows them."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.workers.page.shown.shown_texts import ShownTexts
from agentrl.workflow.store.row_codecs import SHARED

Row = Mapping[str, Any]
MAX_MESSAGES = 200
"""The most messages of a turn or a task."""
MAX_KEY = 10_000


def new_messages(prompt: Any, results: Sequence[Row]) -> tuple[int, list[tuple[int, Any]]]:
    """Of a step's prompt: how many messages of another line it begins with, and what follows, each with its place.

    A message that is the result of a call of the turn before (`results`: result, result_chars) is left out: it is told there.
    """
    messages = prompt if isinstance(prompt, list) else []
    head = messages[0].get(SHARED, 0) if messages and isinstance(messages[0], Mapping) else 0
    shared = head if isinstance(head, int) else 0
    told = {(call["result"], call["result_chars"]) for call in results if call["result"] is not None}
    new = list(enumerate(messages))[1 if shared else 0 :]
    return shared, [(place, message) for place, message in new if not _is_told(message, told)]


def _is_told(message: Any, told: set[tuple[str, int]]) -> bool:
    if not (isinstance(message, Mapping) and message.get("role") == "tool"):
        return False
    content = str(message.get("content", ""))
    return any(len(content) == chars and content.startswith(result) for result, chars in told)


def shown_message(message: Any, path: str, texts: ShownTexts) -> dict[str, Any]:
    """Return a message of a JSON column."""
    row = message if isinstance(message, Mapping) else {"role": "", "content": str(message)}
    shown: dict[str, Any] = {"role": str(row.get("role", ""))[:100]}
    texts.put(shown, "content", str(row.get("content", "")), path=f"{path}/content")
    if row.get("thought"):
        texts.put(shown, "thought", str(row["thought"]), path=f"{path}/thought")
    if row.get("name"):
        shown["name"] = str(row["name"])[:1000]
    if row.get("tool_calls"):
        texts.put_value(shown, "tool_calls", row["tool_calls"], path=f"{path}/tool_calls")
    return shown


def shown_task(task: Row, texts: ShownTexts) -> dict[str, Any]:
    """Return a task, as `load_task_of` gives it."""
    shown: dict[str, Any] = {"id": task["id"], "key": task["key"][:MAX_KEY]}
    texts.put(shown, "reference", task["reference"], task["reference_chars"], "task/reference")
    messages = task["messages"] if isinstance(task["messages"], list) else []
    shown["messages"] = [
        shown_message(message, f"task/messages/{place}", texts) for place, message in enumerate(messages[:MAX_MESSAGES])
    ]
    shown["messages_left_out"] = len(messages[MAX_MESSAGES:])
    return shown
