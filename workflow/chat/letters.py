"""Tokens into text as they come, in pieces of whole characters.

A character may be split over several tokens: an incomplete one at the end waits for the rest. Decoders depend on neighbours (a
word's leading space), so that a token is decoded with those before it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.workflow.chat.rendering import Chat

HALF = "\ufffd"
LONGEST = 32
"""The most tokens that wait for the rest of a character; then they are shown as they are."""


class Letters:
    """Turns token ids into text as they come; the pieces add up to the text of all ids without the end token."""

    def __init__(self, chat: "Chat") -> None:
        self._chat = chat
        self._before: list[int] = []
        self._waiting: list[int] = []

    def take(self, token: int) -> str:
        """The text that this token completes."""
        if token in self._chat.end_ids:
            return self.rest()
        self._waiting.append(token)
        text = self._read()
        if text.endswith(HALF) and len(self._waiting) < LONGEST:
            return ""
        self._before, self._waiting = self._waiting, []
        return text

    def rest(self) -> str:
        """The text that still waits, once no token follows."""
        text = self._read()
        self._waiting = []
        return text

    def _read(self) -> str:
        if not self._waiting:
            return ""
        known = self._chat.decode(self._before) if self._before else ""
        return self._chat.decode([*self._before, *self._waiting])[len(known) :]
