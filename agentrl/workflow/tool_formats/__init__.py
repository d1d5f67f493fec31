"""Tool formats. Each file of this folder describes how a family of models writes its tool calls. See `ToolFormat`.

Parsing takes time linear in the length of any text, because `read` is called once for each place where calls may begin. If
`read` cannot parse the text, it raises `Unreadable` with the index at which parsing continues. This index is after all text
that `read` has looked at.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.trajectory import ToolCall

Schema = Mapping[str, Any]
"""A tool in the form of chat templates: `{"type": "function", "function": {...}}`."""

HERMES = "hermes"
"""The format of older runs, and of models whose template does not show a format."""

AUTO = "auto"
"""The name that selects the format that the model's chat template writes."""

_REST = re.compile(r"\s*+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of tool calls: how to write and how to parse them. Parsing a written call returns the same call.

    Args:
        name: the file's name.
        begins: a pattern of the places in a turn at which calls may begin. The thought of the turn is not searched.
        read: a function from (text, index at which calls begin, offered tools) to (the calls, the index at which their text
            ends). If one of the calls is wrong, it raises Unreadable (`call_json`) and returns no call.
        write: a function from (the turn's text without its calls, the calls, the tools) to the turn in the form that such a
            model writes.
        marks: texts that identify the format. If a chat template writes no calls itself, and its source contains all marks, it
            has this format.
        ends: special tokens that end a turn with calls, in addition to those of the template.
        certain: a pattern of text that is certainly a call; None: `begins`.
        json: True if calls are JSON objects. Then a turn that is one such object is a call too (`chat.parsing`).
    """

    name: str
    begins: re.Pattern[str]
    read: Callable[[str, int, Sequence[Schema]], tuple[tuple[ToolCall, ...], int]]
    write: Callable[[str, Sequence[ToolCall], Sequence[Schema]], str]
    marks: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    certain: re.Pattern[str] | None = None
    json: bool = False

    @property
    def opens(self) -> tuple[str, ...]:
        """The marks with which a call may begin."""
        return tuple(mark for mark in self.marks if self.begins.match(mark))


def append_calls(content: str, calls: str) -> str:
    """Join the content and the calls of a turn. If there is content, the calls begin on a new line."""
    return f"{content}\n{calls}" if content else calls


def skip_mark(text: str, at: int, mark: str) -> int:
    """Return the index after the next mark, or the length of the text if there is no mark."""
    place = text.find(mark, at)
    return len(text) if place < 0 else place + len(mark)


def nothing_after(text: str, at: int) -> bool:
    """Return True if only white space follows the index `at`."""
    return _REST.match(text, at) is not None
