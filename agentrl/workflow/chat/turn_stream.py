"""A turn's text, streamed in pieces of thought and content while it is sampled. Together, the pieces equal the parser's result
for the complete turn.

Text is held back as long as it may belong to a tool call, to a thought's tag, or to white space that the parser strips. Once a
tool call may have begun, nothing is sent until the turn ends. Then the remaining text and the calls are sent.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from re import IGNORECASE
from typing import Literal

import regex

from agentrl.workflow.chat.parsing import END_THINK, LOOSE_BEGINS, THINK
from agentrl.workflow.chat.stop_strings import overlap
from agentrl.workflow.tool_formats import ToolFormat
from agentrl.workflow.trajectory import Message

RESCAN = 1.25
"""The factor by which held-back text must grow before it is searched for a call again. The total time is then linear."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of the thought or of the content."""

    kind: Literal["thought", "content"]
    text: str


class TurnStream:
    """A reader of a turn's text as it arrives.

    Args:
        tool_format: the format of the turn's calls; None if no tool was offered. All text is then content.
        thinking: whether the prompt ended inside a thought, which the turn continues.
        strict: whether a bare JSON object is text instead of a call.
    """

    def __init__(self, tool_format: ToolFormat | None, thinking: bool = False, strict: bool = False) -> None:
        self._begins = None
        if tool_format is not None:
            loose = f"|{LOOSE_BEGINS}" if tool_format.json and not strict else ""
            self._begins = _with_partial_matches(tool_format.begins.pattern + loose, tool_format.begins.flags)
        self._state: Literal["tag", "start", "thought", "content", "over"] = "tag" if thinking else "start"
        self._waiting = ""
        self._space: list[str] = []
        self._before = ""  # a letter of the content that was sent: patterns for the turn's beginning match nowhere else
        self._look_at = 0.0
        self._thought, self._content = _Stripped(), _Stripped()

    def take(self, text: str) -> Iterator[TextPiece]:
        """Add text, and yield the pieces that can now be sent. White space is held back until other text follows it."""
        self._space.append(text)
        if not text.strip():
            return
        self._waiting += "".join(self._space).replace("\0", "\ufffd")
        self._space.clear()
        if self._state in ("tag", "start"):
            self._begin()
        if self._state == "thought":
            yield from _pieces("thought", self._thought.take(self._take_thought()))
        if self._state == "content":
            yield from _pieces("content", self._content.take(self._take_content()))

    def rest(self, message: Message) -> Iterator[TextPiece]:
        """Yield the rest of the turn after its end. `message` is the parser's result for the complete turn."""
        self._state = "over"
        yield from _pieces("thought", message.thought[self._thought.sent_chars :])
        yield from _pieces("content", message.content[self._content.sent_chars :])

    def _begin(self) -> None:
        """Decide whether the turn begins with a thought. A model may repeat the tag at the end of its prompt."""
        text = self._waiting.lstrip()
        if text.startswith(THINK):
            self._state, self._waiting = "thought", text.removeprefix(THINK)
        elif not THINK.startswith(text):
            self._state = "thought" if self._state == "tag" else "content"

    def _take_thought(self) -> str:
        """Remove and return the text that certainly belongs to the thought."""
        thought, tag, after = self._waiting.partition(END_THINK)
        if tag:
            self._state, self._waiting = "content", after
            return thought
        partial_chars = overlap(thought, END_THINK)
        self._waiting = thought[len(thought) - partial_chars :]
        return thought[: len(thought) - partial_chars]

    def _take_content(self) -> str:
        if len(self._waiting) < self._look_at:
            return ""
        before = len(self._before)
        text = self._before + self._waiting
        match = None if self._begins is None else self._begins.search(text, before, partial=True)
        end = len(self._waiting) if match is None else match.start() - before
        if match is not None and not match.partial:
            self._state = "over"
        sure, self._waiting = self._waiting[:end], self._waiting[end:]
        self._before = self._before or sure[:1]
        self._look_at = len(self._waiting) * RESCAN
        return sure


class _Stripped:
    """A filter that removes the white space around a streamed text. `sent_chars` is the number of characters sent so far."""

    def __init__(self) -> None:
        self.sent_chars = 0
        self._space = ""

    def take(self, text: str) -> str:
        """Add text, and return what can be sent now. White space at the end waits until another character follows it."""
        text = self._space + text
        text = text if self.sent_chars else text.lstrip()
        sure = text.rstrip()
        self._space = text[len(sure) :]
        self.sent_chars += len(sure)
        return sure


def _pieces(kind: Literal["thought", "content"], text: str) -> Iterator[TextPiece]:
    if text:
        yield TextPiece(kind, text)


@cache
def _with_partial_matches(pattern: str, flags: int) -> "regex.Pattern[str]":
    return regex.compile(pattern, regex.IGNORECASE if flags & IGNORECASE else 0)
