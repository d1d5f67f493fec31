"""Reads messages of one or more lines from a terminal, and stores them in a history file.

The first line of the history file is a header, and each other line is a message as a JSON string. A file without the header is
never changed.
"""

import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.cli.console import say
from agentrl.workflow.errors import ConfigError
from agentrl.workflow.runtime.shown_text import clean

BLOCK = '"""'
MAX_MESSAGE_CHARS = 1_000_000
HEADER = "agentrl chat history 1"
MAX_MESSAGES = 1000
"""The most messages that are stored. Older messages are dropped."""
MAX_REMEMBERED_CHARS = 10_000
"""The most characters of a message that is stored. Longer messages are not stored."""
MAX_FILE_BYTES = 1 << 20
"""The size, in bytes, above which a file cannot be a history file of agentrl. At half this size, the older half of the file is
removed.
"""


class Keyboard:
    """The terminal at which a user types messages. `history` is the file of earlier messages."""

    def __init__(self, history: Path) -> None:
        self._history = TypedLines(history)
        self._readline: Any = _find_readline()
        self._last = ""
        for message in self._history.read() if self._readline else ():
            self._readline.add_history(message)

    def message(self) -> str:
        """Read the next message; return an empty text if the line is empty.

        Raises:
            EOFError: the input ended (Ctrl-D).
            KeyboardInterrupt: the user discarded the message (Ctrl-C).
            UnicodeDecodeError: the message is not UTF-8.
            ConfigError: the message is too long.
        """
        text = read_message(lambda prompt: replace_invalid(input(prompt))).rstrip()
        if text and text != self._last:
            self._last = text
            self._history.add(text)
            if self._readline:
                self._readline.add_history(text)
        return text


def read_message(line: Callable[[str], str]) -> str:
    """Read a message of one or more lines by calls of `line(prompt)`. Raise ConfigError if the message is too long."""
    first = line("> ")
    is_block = first.lstrip().startswith(BLOCK)
    lines = [first.lstrip().removeprefix(BLOCK) if is_block else first]
    chars = len(first)
    while not lines[-1].rstrip().endswith(BLOCK) if is_block else lines[-1].endswith("\\"):
        if not is_block:
            lines[-1] = lines[-1][:-1]
        lines.append(line("... "))
        chars += len(lines[-1]) + 1
        if chars > MAX_MESSAGE_CHARS:
            raise ConfigError(f"The message was not sent: it has more than {MAX_MESSAGE_CHARS} characters.", "Shorten it.")
    if is_block:
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip("\n")


def replace_invalid(line: str) -> str:
    """Replace bytes of the line that are not UTF-8 by the replacement character."""
    return line.encode("utf-8", "replace").decode()


def _find_readline() -> Any:
    try:
        import readline
    except ImportError:
        return None
    readline.clear_history()
    readline.set_auto_history(False)
    return readline


class TypedLines:
    """The history file: messages of earlier chats. A file that agentrl did not write is never changed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_usable = True

    def read(self) -> list[str]:
        """Return the newest messages, oldest first. If agentrl did not write the file, warn and store nothing."""
        try:
            return self._entries()[-MAX_MESSAGES:]
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._give_up(error)
        return []

    def add(self, message: str) -> None:
        """Append a message to the file, unless it is too long or the file cannot be used."""
        if not self._is_usable or len(message) > MAX_REMEMBERED_CHARS:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with open(self._file, "ab", buffering=0, opener=_open_private) as file:
                size = file.tell()
                file.write(("" if size else f"{HEADER}\n").encode() + f"{json.dumps(message)}\n".encode())
            if size > MAX_FILE_BYTES // 2:
                self._shorten()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: OSError | ValueError) -> None:
        self._is_usable = False
        why = f"cannot be opened: {error.strerror}" if isinstance(error, OSError) else str(error)
        say(f"Input is not saved for the next chat: {str(self._file)!r} {why}.")

    def _entries(self) -> list[str]:
        with open(self._file, "rb", opener=_open_private) as file:
            status = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(status.st_mode) and status.st_size <= MAX_FILE_BYTES
            data = file.read(MAX_FILE_BYTES) if is_ours else b""
        try:
            lines = data.decode().splitlines()
        except UnicodeDecodeError as error:
            raise ValueError("is not a chat history of agentrl: it is not text") from error
        if not is_ours or (data and lines[0] != HEADER):
            raise ValueError("is not a chat history of agentrl")
        return [message for line in lines[1:] if (message := _message_of(line))]

    def _shorten(self) -> None:
        entries = self._entries()
        text = "".join(f"{json.dumps(message)}\n" for message in entries[len(entries) // 2 :][-MAX_MESSAGES:])
        with tempfile.NamedTemporaryFile(dir=self._file.parent, prefix=".history.", delete=False) as temporary:
            temporary.write(f"{HEADER}\n{text}".encode())
        os.replace(temporary.name, self._file)


def _open_private(path: str, flags: int) -> int:
    """Open a file that only its owner can read. Links are not followed, and opening a pipe does not block."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _message_of(line: str) -> str:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    is_text = isinstance(message, str) and bool(message.strip()) and len(message) <= MAX_REMEMBERED_CHARS
    return message if is_text and clean(message) == message else ""
