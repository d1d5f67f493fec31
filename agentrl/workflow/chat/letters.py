"""Conversion of tokens to text as they arrive, in pieces of complete characters.

A character may be split over several tokens: an incomplete one at the end waits for the rest. Decoders depend on neighbours (a
word's leading space), so that a token is decoded with those before it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.workflow.chat.rendering import Chat

HALF = "\ufffd"
MAX_WAITING = 32
"""Tokens that are read again at each new one, as a character's; a longer run of bytes that make none is told as it grows."""

REREAD = 1.25
"""So much must a longer run have grown: in all, linear time."""

OPEN = 4
"""The most letters at its end that the next bytes may change."""


class Letters:
    """A decoder of token ids as they arrive; the pieces add up to the text of all ids without the final end tokens."""

    def __init__(self, chat: "Chat") -> None:
        self._chat = chat
        self._before: list[int] = []
        self._waiting: list[int] = []
        self._ended: list[int] = []
        self._look_at, self._told = 0.0, 0

    def take(self, token: int) -> str:
        """Return the text that this token completes."""
        if token in self._chat.end_ids:
            self._ended.append(token)
            return ""
        self._waiting += [*self._ended, token]
        self._ended = []
        if len(self._waiting) < self._look_at:
            return ""
        text = self._read()
        if text.endswith(HALF):
            return self._take_certain(text) if len(self._waiting) >= MAX_WAITING else ""
        new = text[self._told :]
        self._before, self._waiting, self._look_at, self._told = self._waiting, [], 0.0, 0
        return new

    def rest(self) -> str:
        """Return the text that still waits, once no token follows."""
        text = self._read()[self._told :]
        self._waiting, self._look_at, self._told = [], 0.0, 0
        return text

    def _take_certain(self, text: str) -> str:
        new = text[self._told : -OPEN]
        self._told += len(new)
        self._look_at = len(self._waiting) * REREAD
        return new

    def _read(self) -> str:
        if not self._waiting:
            return ""
        prefix = self._chat.decode(self._before) if self._before else ""
        return self._chat.decode([*self._before, *self._waiting])[len(prefix) :]
