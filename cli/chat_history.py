"""What was typed in chats before: a file of agentrl's home that readline remembers from, of bounded size.

Its first line says whose it is, each other one is a message as a JSON string. Another's file is left as it is.
"""

import json
import os
import stat
import tempfile
from pathlib import Path

from agentrl.cli.output import clean, say

HEADER = "agentrl chat history 1"
MAX_MESSAGES = 1000
"""Messages that are remembered."""
MAX_MESSAGE_CHARS = 10_000
"""Characters of one; a longer one is not remembered."""
MAX_FILE_BYTES = 1 << 20
"""Bytes of a file that may be ours."""
SHORTENED_BYTES = MAX_FILE_BYTES // 2
"""Bytes from which on its older half goes."""


class History:
    """The messages of earlier chats, and a place for new ones; without one where the file is another's or cannot be had."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._kept = True

    def read(self) -> list[str]:
        """The newest messages, oldest first; where the file is not ours that is said, and nothing is kept."""
        try:
            found = self._read_entries()
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            self._give_up(error)
            return []
        return found[-MAX_MESSAGES:]

    def add(self, message: str) -> None:
        """Remembers one more."""
        if not self._kept or len(message) > MAX_MESSAGE_CHARS:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            place = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                size = os.fstat(place).st_size
                head = "" if size else f"{HEADER}\n"
                os.write(place, f"{head}{json.dumps(message)}\n".encode())
            finally:
                os.close(place)
            if size > SHORTENED_BYTES:
                self._shorten()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: OSError | ValueError) -> None:
        self._kept = False
        why = f"cannot be had: {error.strerror}" if isinstance(error, OSError) else str(error)
        say(f"What is typed here is not remembered: {str(self._file)!r} {why}.")

    def _read_entries(self) -> list[str]:
        """Raises ValueError where the file is not ours."""
        place = os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(place, "rb") as file:
            found = os.fstat(place)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
                raise ValueError("is no history of agentrl's chat")
            data = file.read(MAX_FILE_BYTES)
        try:
            lines = data.decode().splitlines()
        except UnicodeDecodeError as error:
            raise ValueError("is no history of agentrl's chat: it is no text") from error
        if data and lines[:1] != [HEADER]:
            raise ValueError("is no history of agentrl's chat")
        return [message for line in lines[1:] if (message := _parse_message(line))]

    def _shorten(self) -> None:
        kept = self._read_entries()
        text = "".join(f"{json.dumps(message)}\n" for message in kept[len(kept) // 2 :][-MAX_MESSAGES:])
        with tempfile.NamedTemporaryFile(dir=self._file.parent, prefix=".history.", delete=False) as beside:
            beside.write(f"{HEADER}\n{text}".encode())
        os.replace(beside.name, self._file)


def _parse_message(line: str) -> str:
    """The message of a line; empty where it holds none, or what no keyboard types."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return (
        found if isinstance(found, str) and found.strip() and len(found) <= MAX_MESSAGE_CHARS and clean(found) == found else ""
    )
