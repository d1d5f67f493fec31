"""Tool formats: each file here describes how a family of models writes its tool calls. See `ToolFormat`.

Reading is bounded and linear in the text, whatever it is: `read` is called once for each place where calls may begin. Text that
it cannot read raises `Unreadable`, with a place to go on from that is behind everything it looked at.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.trajectory import ToolCall

Schema = Mapping[str, Any]
"""A tool in the form that chat templates take: `{"type": "function", "function": {...}}`."""

HERMES = "hermes"
"""The format of older runs, and of models whose template does not show one."""

AUTO = "auto"
"""The name for the format that the model's chat template writes."""

_REST = re.compile(r"\s*+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of tool calls: how to write and read them. Reading a written call returns the same call.

    Args:
        name: the file's name.
        begins: a pattern for the places where calls may begin in a turn, after its thought.
        read: (text, place where calls begin, tools offered) -> (the calls there, where their text ends); raises Unreadable
            (`call_json`), even if only one of several calls is wrong: then none is made.
        write: (the turn's text beside its calls, calls, tools) -> the turn as such a model writes it.
        marks: a template whose source holds all of these texts uses this format; only asked if it writes no calls itself.
        ends: special tokens that end a turn with calls, beside the template's own.
        certain: a pattern for text that is a call without doubt; unset: `begins`.
        json: calls are JSON objects, so a turn that is one such object is a call too (`chat.parsing`).
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
        """The marks that start a call."""
        return tuple(mark for mark in self.marks if self.begins.match(mark))


def append_calls(content: str, calls: str) -> str:
    """Return the content, if any, and the calls on the next line."""
    return f"{content}\n{calls}" if content else calls


def skip_mark(text: str, at: int, mark: str) -> int:
    """Return the index after the next mark; the text's length without one."""
    place = text.find(mark, at)
    return len(text) if place < 0 else place + len(mark)


def nothing_after(text: str, at: int) -> bool:
    """Return whether only white space follows."""
    return _REST.match(text, at) is not None
