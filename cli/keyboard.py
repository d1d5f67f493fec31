"""What a person types at a terminal, message by message: edited and remembered by readline, of one line or of several.

A line that ends in a backslash goes on in the next one; three quotation marks begin a block that ends with three more.
"""

from collections.abc import Callable
from typing import Any

from agentrl.cli.chat_history import History
from agentrl.workflow.errors import ConfigError

BLOCK = '"""'
MAX_MESSAGE_CHARS = 1_000_000
"""Characters of a message."""


class Keyboard:
    """The terminal that a person types at.

    Args:
        history: what was typed before.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._readline: Any = _find_readline()
        self._last = ""
        for message in history.read() if self._readline else ():
            self._readline.add_history(message)

    def message(self) -> str:
        """The next one; empty where nothing was typed.

        Raises:
            EOFError: there is none (ctrl-D).
            KeyboardInterrupt: it was given up (ctrl-C).
            UnicodeDecodeError: it is no UTF-8.
            ConfigError: it is too long.
        """
        text = read_message(lambda prompt: replace_invalid(input(prompt))).rstrip()
        if text and text != self._last:
            self._last = text
            self._history.add(text)
            if self._readline:
                self._readline.add_history(text)
        return text


def read_message(line: Callable[[str], str]) -> str:
    """A message of one line or several; `line` is given a prompt and gives the next line.

    Raises:
        ConfigError: it is too long.
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
            raise ConfigError(f"A message may have {MAX_MESSAGE_CHARS} characters.", "Say it in less.")
    if block:
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip("\n")


def replace_invalid(line: str) -> str:
    """The line with U+FFFD for what was no UTF-8."""
    return line.encode("utf-8", "replace").decode()


def _find_readline() -> Any:
    """The module, where Python has it."""
    try:
        import readline
    except ImportError:
        return None
    readline.clear_history()
    readline.set_auto_history(False)
    return readline
