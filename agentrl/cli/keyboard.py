"""Messages typed at a terminal, of one line or several, with readline for editing and history.

A line that ends in a backslash goes on in the next one; three quotation marks begin a block that ends with three more.
"""

from collections.abc import Callable
from typing import Any

from agentrl.cli.chat_history import History
from agentrl.workflow.errors import ConfigError

BLOCK = '"""'
MAX_MESSAGE_CHARS = 1_000_000
"""The most characters of a message."""


class Keyboard:
    """A person's terminal.

    Args:
        history: the earlier messages.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._readline: Any = _find_readline()
        self._last = ""
        for message in history.read() if self._readline else ():
            self._readline.add_history(message)

    def message(self) -> str:
        """Read the next message; empty if the line is empty.

        Raises:
            EOFError: the input ended (ctrl-D).
            KeyboardInterrupt: the message was discarded (ctrl-C).
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
    """Read a message of one line or several; `line` takes a prompt and return the next line.

    Raises:
        ConfigError: the message is too long.
    """
    first = line("> ")
    begun = first.lstrip().removeprefix(BLOCK)
    block = begun != first.lstrip()
    lines = [begun if block else first]
    typed = len(first)
    while not lines[-1].rstrip().endswith(BLOCK) if block else lines[-1].endswith("\\"):
        if not block:
            lines[-1] = lines[-1][:-1]
        lines.append(line("... "))
        typed += len(lines[-1]) + 1
        if typed > MAX_MESSAGE_CHARS:
            raise ConfigError(f"The message was not sent: it has more than {MAX_MESSAGE_CHARS} characters.", "Shorten it.")
    if block:
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip("\n")


def replace_invalid(line: str) -> str:
    """Return the line with U+FFFD for bytes that were not UTF-8."""
    return line.encode("utf-8", "replace").decode()


def _find_readline() -> Any:
    """The module readline, if this Python has it."""
    try:
        import readline
    except ImportError:
        return None
    readline.clear_history()
    readline.set_auto_history(False)
    return readline
