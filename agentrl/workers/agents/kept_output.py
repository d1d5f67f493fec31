"""The part of an agent's output that is stored. A long output is reduced to its beginning and its end. The agent's keys are
removed.

No part of a key remains in the text, even if the output is cut within a key.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.workflow.runtime.process_output import output_lines
from agentrl.workflow.runtime.shown_text import clean

HIDDEN = "[the attempt's key]"
HEAD_BYTES, TAIL_BYTES = 2000, 4000
MAX_LINES, MAX_LINE_CHARS = 5, 300
"""The most output lines that an error message quotes, and the most characters of each line."""


def hide_keys(text: str, keys: Sequence[str]) -> str:
    """Return the text with `HIDDEN` in place of each key."""
    for key in keys:
        text = text.replace(key, HIDDEN) if key else text
    return text


@dataclass
class KeptOutput:
    """A collector of output that arrives in pieces.

    Args:
        keys: the secrets to remove.

    Attributes:
        size: the number of bytes received.
    """

    keys: Sequence[str]
    size: int = 0
    _head: bytearray = field(default_factory=bytearray)
    _tail: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        """Add bytes. Bytes in the middle of a long output are discarded."""
        self.size += len(data)
        self._head += data[: HEAD_BYTES + self._margin - len(self._head)]
        self._tail += data
        del self._tail[: -(TAIL_BYTES + self._margin)]

    def text(self) -> str:
        """Return the output. A long output is reduced to its beginning and its end; a line between them says how many bytes are
        left out.
        """
        before_tail = self.size - len(self._tail)
        if before_tail <= len(self._head):
            return self._shown(self._head[:before_tail] + self._tail)
        # A key that the cut split was not replaced. What is left of it is shorter than the margin, which is removed here.
        head = self._shown(self._head)[: -self._margin or None]
        tail = self._shown(self._tail)[self._margin :]
        return f"{head}\n[{self.size - HEAD_BYTES - TAIL_BYTES} bytes left out]\n{tail}"

    @property
    def _margin(self) -> int:
        return max((len(key) for key in self.keys), default=0)

    def _shown(self, data: bytes | bytearray) -> str:
        text = clean(data.decode("utf-8", "replace"))  # first: a colour code may stand inside of a key
        return hide_keys(text, self.keys)


def add_last_lines(error: str, output: str, explains: bool = True) -> str:
    """Return the error message with the last `MAX_LINES` lines of the output in new lines.

    Args:
        error: the message, without a full stop.
        output: the output.
        explains: whether the last line of the output says more about the error, like the message of an exception. It then
            continues the message, and a single line is not repeated. Else the message ends with a full stop.
    """
    lines = [line[:MAX_LINE_CHARS] for line in output_lines(output)[-MAX_LINES:]]
    if not lines:
        return error
    message = f"{error}: {lines[-1]}" if explains else f"{error}."
    return message if explains and len(lines) == 1 else "\n".join([message, "The last lines of its output:", *lines])
