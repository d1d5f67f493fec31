"""Tool formats: a file here says how a family of models writes its tool calls. See `ToolFormat`.

Reading is bounded and linear in the text, whatever it is: `read` goes on from where calls may begin, once for each place, and
what it cannot read it raises as `Unreadable` with a place that is no earlier than what it looked at.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.workflow.trajectory import ToolCall

Schema = Mapping[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {...}}`."""

HERMES = "hermes"
"""What runs of before wrote, and a model writes whose template does not tell."""

AUTO = "auto"
"""The format that the chat template of the model writes."""

_REST = re.compile(r"\s*+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes its tool calls, both ways: reading what was written gives the same calls.

    Args:
        name: the file's name.
        begins: where calls may begin in a turn, its thought left out.
        read: the text, where calls begin in it and the tools that were offered -> the calls that stand there and where their
            text ends; raises Unreadable (`call_json`), also where only one of several is wrong: then none is made.
        write: what the turn says beside its calls, the calls, the tools -> the turn as such a model writes it.
        marks: texts that a template in whose source all of them stand was made for; only asked where it writes no calls itself.
        ends: special tokens that end a turn with calls, beside the template's own.
        certain: what is a call without doubt; unset: `begins`.
    """

    name: str
    begins: re.Pattern[str]
    read: Callable[[str, int, Sequence[Schema]], tuple[tuple[ToolCall, ...], int]]
    write: Callable[[str, Sequence[ToolCall], Sequence[Schema]], str]
    marks: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    certain: re.Pattern[str] | None = None

    @property
    def opens(self) -> tuple[str, ...]:
        """The marks that calls begin with."""
        return tuple(mark for mark in self.marks if self.begins.match(mark))


def append_calls(content: str, calls: str) -> str:
    """The calls on a line of their own after what the turn says, if anything."""
    return f"{content}\n{calls}" if content else calls


def skip_mark(text: str, at: int, mark: str) -> int:
    """Where the text goes on after the next such mark; its end where there is none."""
    found = text.find(mark, at)
    return len(text) if found < 0 else found + len(mark)


def nothing_after(text: str, at: int) -> bool:
    """Whether the text ends there, white space aside."""
    return _REST.match(text, at) is not None
