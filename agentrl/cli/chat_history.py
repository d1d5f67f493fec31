"""The history of chat messages for readline: a file of bounded size in agentrl's home.

Its first line is a header, each other line a message as a JSON string. A file without the header is never changed.
"""

import json
import os
import stat
import tempfile
from pathlib import Path

from agentrl.cli.console import say
from agentrl.workflow.runtime.shown_text import clean

HEADER = "agentrl chat history 1"
MAX_MESSAGES = 1000
"""The most messages that are remembered."""
MAX_MESSAGE_CHARS = 10_000
"""The most characters of a message; a longer one is not remembered."""
MAX_FILE_BYTES = 1 << 20
"""The largest history file in bytes; a larger file is not ours."""
SHORTENED_BYTES = MAX_FILE_BYTES // 2
"""The size in bytes above which the older half is removed."""


class History:
    """The messages of earlier chats and the file for new ones; keeps nothing if the file is not ours or cannot be opened."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._kept = True

    def read(self) -> list[str]:
        """Return the newest messages, oldest first; if the file is not ours, says so and keeps nothing from then on."""
        try:
            found = self._read_entries()
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            self._give_up(error)
            return []
        return found[-MAX_MESSAGES:]

    def add(self, message: str) -> None:
        """Add a message."""
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
        why = f"cannot be opened: {error.strerror}" if isinstance(error, OSError) else str(error)
        say(f"Input is not saved for the next chat: {str(self._file)!r} {why}.")

    def _read_entries(self) -> list[str]:
        """Reads the file; raises ValueError if it is not ours."""
        place = os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(place, "rb") as file:
            found = os.fstat(place)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
                raise ValueError("is not a chat history of agentrl")
            data = file.read(MAX_FILE_BYTES)
        try:
            lines = data.decode().splitlines()
        except UnicodeDecodeError as error:
            raise ValueError("is not a chat history of agentrl: it is not text") from error
        if data and lines[:1] != [HEADER]:
            raise ValueError("is not a chat history of agentrl")
        return [message for line in lines[1:] if (message := _parse_message(line))]

    def _shorten(self) -> None:
        kept = self._read_entries()
        text = "".join(f"{json.dumps(message)}\n" for message in kept[len(kept) // 2 :][-MAX_MESSAGES:])
        with tempfile.NamedTemporaryFile(dir=self._file.parent, prefix=".history.", delete=False) as beside:
            beside.write(f"{HEADER}\n{text}".encode())
        os.replace(beside.name, self._file)


def _parse_message(line: str) -> str:
    """The message of a line; empty if the line holds none, or one with characters that no keyboard types."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return (
        found if isinstance(found, str) and found.strip() and len(found) <= MAX_MESSAGE_CHARS and clean(found) == found else ""
    )
