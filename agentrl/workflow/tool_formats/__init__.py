"""Tool formats: each file here describes how a family of models writes its tool calls. See `ToolFormat`.

Parsing is bounded, and linear in the length of any text: `read` is called once for each place where calls may begin. For text
that it cannot parse it raises `Unreadable`. The exception has the index at which parsing continues, which is after all text
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
"""The format of older runs, and of models whose template shows no format."""

AUTO = "auto"
"""The name for the format that the model's chat template writes."""

_REST = re.compile(r"\s*+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of tool calls: how to write and parse them. A call that is written and parsed again is unchanged.

    Args:
        name: the file's name.
        begins: a pattern for the places where calls may begin in a turn, after its thought.
        read: a function (text, index at which calls begin, offered tools) -> (the calls there, the index at which their text
            ends). It raises Unreadable (`call_json`) if any of the calls is wrong; then none is made.
        write: a function (the turn's text without its calls, the calls, the tools) -> the turn as such a model writes it.
        marks: the format is used if a template's source contains all of these texts. They only matter if the template writes no
            calls itself.
        ends: special tokens that end a turn with calls, in addition to the template's own.
        certain: a pattern for text that is certainly a call; None: `begins`.
        json: whether calls are JSON objects. Then a turn that is one such object is a call too (`chat.parsing`).
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
    """Return the content, if any, followed by the calls on the next line."""
    return f"{content}\n{calls}" if content else calls


def skip_mark(text: str, at: int, mark: str) -> int:
    """Return the index after the next mark; the text's length if there is none."""
    place = text.find(mark, at)
    return len(text) if place < 0 else place + len(mark)


def nothing_after(text: str, at: int) -> bool:
    """Return True if only white space follows."""
    return _REST.match(text, at) is not None
