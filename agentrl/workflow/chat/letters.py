"""The conversion of tokens to text as they arrive, in pieces of complete characters.

The text of a token depends on its neighbours, so it is decoded together with the tokens before it. A character that is split
over tokens waits for the last of them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.workflow.chat.rendering import Chat

HALF = "\ufffd"
MAX_WAITING = 32
"""The most tokens that are decoded again at each new token because they may form one character.

A longer sequence of bytes that forms no character is returned piece by piece.
"""

REREAD = 1.25
"""The factor by which a sequence of more than `MAX_WAITING` tokens must grow before it is decoded again.

The total time is then linear.
"""

OPEN = 4
"""The most characters at the end of a text that later bytes may change."""


class Letters:
    """Decodes token ids to text while they are sampled. All pieces together are the turn, without its end tokens."""

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
        """Return the text that is still held back. Call this method after the last token."""
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
