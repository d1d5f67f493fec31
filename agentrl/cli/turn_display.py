"""Displays a turn while it is sampled: text as it arrives, thoughts dimmed, and calls when they are complete."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agentrl.workflow.chat.parsing import END_THINK, THINK
from agentrl.workflow.runtime.shown_text import Line, clean
from agentrl.workflow.trajectory import Message

PLAIN, DIM = "", "italic dim"


class Voice:
    """A writer that receives the text of a turn in pieces, and prints the turn's thought and content.

    Args:
        write: prints a text in a style of rich.
        thinks: True if the turn begins inside a thought.
        opens: the marks that begin a call. Calls without a mark are printed as text.
    """

    def __init__(self, write: Callable[[str, str], None], thinks: bool, opens: Sequence[str]) -> None:
        self._write = write
        self._marks = (THINK, END_THINK, *opens)
        self._mark = re.compile("|".join(map(re.escape, self._marks)))
        self._thinks = thinks
        self._calls = False
        self._held = ""
        self._space = ""
        self._shown = ""
        self._thought = ""
        self._wrote = False
        self._begun = thinks

    def take(self, piece: str) -> None:
        """Print the next piece of the turn. If its last characters may be the beginning of a mark, they are printed later."""
        self._held += piece.replace("\0", "\ufffd")
        while not self._calls and (mark := self._mark.search(self._held)):
            self._write_text(self._held[: mark.start()])
            self._held = self._held[mark.end() :]
            self._handle_mark(mark.group())
        if not self._calls:
            held_chars = _unfinished_chars(self._held, self._marks)
            self._write_text(self._held[: len(self._held) - held_chars])
            self._held = self._held[len(self._held) - held_chars :]

    def rest(self, message: Message) -> Iterator[Line]:
        """Yield the lines of the turn that were not printed yet."""
        if not self._calls:
            self._write_text(self._held)
        self._end_line()
        if message.thought and not self._thought:
            yield f"(thinks) {message.thought}", DIM
        left = message.content.removeprefix(self._shown).lstrip("\n")
        if left:
            yield left, PLAIN
        yield from call_lines(message)

    def _write_text(self, text: str) -> None:
        """Print the text without white space at the beginning and end of the turn. The parser removes this white space too."""
        text = self._space + text
        if not (self._thought if self._thinks else self._shown):
            text = text.lstrip()
        visible = text.rstrip()
        self._space = text[len(visible) :]
        if not visible:
            return
        if self._thinks and not self._thought:
            self._write("(thinks) ", DIM)
        self._write(clean(visible), DIM if self._thinks else PLAIN)
        self._wrote = True
        if self._thinks:
            self._thought += visible
        else:
            self._shown += visible

    def _handle_mark(self, mark: str) -> None:
        if mark not in (THINK, END_THINK):
            self._calls = True
        elif mark == THINK and not (self._begun or self._shown):
            self._begun = self._thinks = True
        elif mark == END_THINK and (self._thinks or not self._begun):
            if not self._thinks:  # the template had opened it
                self._thought, self._shown = self._shown, ""
            self._begun, self._thinks, self._space = True, False, ""
            self._end_line()
        else:
            self._write_text(mark)

    def _end_line(self) -> None:
        if self._wrote:
            self._write("\n", PLAIN)
        self._wrote = False


def turn_lines(message: Message) -> Iterator[Line]:
    """Yield the lines of a complete turn."""
    if message.thought:
        yield f"(thinks) {message.thought}", DIM
    if message.content:
        yield message.content, PLAIN
    yield from call_lines(message)


def call_lines(message: Message) -> Iterator[Line]:
    for call in message.tool_calls:
        call_text: Any = call.error if call.error else json.dumps(dict(call.arguments), ensure_ascii=False)
        yield f"  {call.name or '(unreadable call)'} {call_text}", "bold blue"


def _unfinished_chars(text: str, marks: Sequence[str]) -> int:
    """Return the number of characters at the text's end that may begin a mark."""
    longest = max(map(len, marks)) - 1
    return next((size for size in range(min(longest, len(text)), 0, -1) if any(m.startswith(text[-size:]) for m in marks)), 0)
