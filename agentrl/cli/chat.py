"""The loop of `agentrl chat`. At a terminal, it has a history, commands and streamed answers. In a pipe, it prints one answer
per line.
"""

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.cli.console import console, say, show_lines
from agentrl.cli.keyboard import Keyboard, replace_invalid
from agentrl.cli.turn_display import Voice
from agentrl.workflow.analysis.transcript import conversation_lines
from agentrl.workflow.errors import AgentRLError, ConfigError, did_you_mean
from agentrl.workflow.runtime.shown_text import one_line

if TYPE_CHECKING:
    from agentrl.cli.conversation import Talk


class Loading:
    """A conversation that the function `make` loads in a thread while the user types. A spinner shows "loading `what`"."""

    def __init__(self, make: "Callable[[], Talk]", what: str) -> None:
        self._what = what
        self._made: Future[Talk] = Future()
        threading.Thread(target=self._run, args=(make,), name="loading", daemon=True).start()

    def talk(self) -> "Talk":
        """Return the conversation. If it is still loading, show a spinner and wait. Raise AgentRLError if loading failed."""
        with nullcontext() if self._made.done() else _spinner(f"loading {self._what}"):
            return self._made.result()

    @property
    def has_failed(self) -> bool:
        return self._made.done() and self._made.exception() is not None

    def close(self) -> None:
        """Close the conversation if it was loaded."""
        if self._made.done() and not self.has_failed:
            self._made.result().close()

    def _run(self, make: "Callable[[], Talk]") -> None:
        try:
            self._made.set_result(make())
        except BaseException as error:  # noqa: BLE001 - `talk` raises it
            self._made.set_exception(error)


def chat_in_pipe(talk: "Talk") -> None:
    """Read one message per line from stdin and print its answer. Stop at an empty line."""
    for line in _read_lines():
        for text in talk.answer(line):
            show_lines([text])
            sys.stdout.flush()


def chat_at_terminal(loading: Loading, greeting: str, home: Path) -> None:
    """Read messages and answer them until Ctrl-D. Ctrl-C stops an answer, or discards the line being typed."""
    keyboard = Keyboard(home / "chat_history")
    say(greeting)
    while True:
        try:
            text = keyboard.message()
            if text:
                _handle_line(loading, text)
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except UnicodeDecodeError:
            say("The line was not sent: it is not UTF-8.")
        except AgentRLError as error:
            if loading.has_failed:
                raise
            say(" ".join(filter(None, (error.message, error.hint))))


def _handle_line(loading: Loading, text: str) -> None:
    name, _, argument = text.partition(" ")
    if name in COMMANDS:
        COMMANDS[name].run(loading, argument.strip())
    elif text.startswith("/") and name[1:].isalpha():
        hint = f"{did_you_mean(name, COMMANDS)} To send it as a message, start with a space."
        raise ConfigError(f"There is no command {one_line(name)!r}.", hint)
    else:
        _answer(loading.talk(), text.strip())


def _answer(talk: "Talk", question: str) -> None:
    """Show the answer while it is sampled. If the answer is stopped or fails, remove the question from the conversation."""
    screen = console()
    try:
        with closing(talk.answer(question, lambda thinks, opens: Voice(_screen_writer(screen), thinks, opens))) as lines:
            for line in lines:
                show_lines([line])
    except BaseException as error:
        talk.take_back()
        if not isinstance(error, KeyboardInterrupt):
            raise
        print()
        say("(stopped; your message was removed)")


def _screen_writer(screen: Any) -> Callable[[str, str], None]:
    from rich.text import Text

    def write(text: str, style: str) -> None:
        screen.print(Text(text, style=style), end="", soft_wrap=True)

    return write


# commands


def _help(loading: Loading, argument: str) -> None:
    lines = [*((f"{name} {command.arguments}".rstrip(), command.effect) for name, command in COMMANDS.items()), *KEYS]
    width = max(len(left) for left, _ in lines)
    show_lines((f"{left.ljust(width)}  {right}", "") for left, right in lines)


def _reset(loading: Loading, argument: str) -> None:
    loading.talk().reset()
    say("The conversation was deleted.")


def _tools(loading: Loading, argument: str) -> None:
    talk = loading.talk()
    if argument:
        word, _, name = argument.partition(" ")
        name = name.strip()
        if word not in ("on", "off"):
            raise ConfigError(f"{one_line(argument)!r} is not `on` or `off`.", "/tools on, /tools off calculator")
        if name and name not in talk.tools:
            raise ConfigError(f"There is no tool {one_line(name)!r} here.", did_you_mean(name, talk.tools))
        meant = {name} if name else set(talk.tools)
        talk.set_tools_off(talk.off - meant if word == "on" else talk.off | meant)
    if not talk.tools:
        say("This chat has no tools. Start it with --env NAME.")
    width = max(map(len, talk.tools), default=0)
    for name, tool in talk.tools.items():
        description = one_line(tool.schema["function"]["description"], 80)
        show_lines([(f"{'off' if name in talk.off else 'on ':3}  {name.ljust(width)}  {description}", "")])


def _temperature(loading: Loading, argument: str) -> None:
    policy = loading.talk().policy
    if argument:
        policy.limits = policy.within(temperature=_parse_temperature(argument))
    say(f"temperature {policy.limits.temperature:g}")


def _parse_temperature(argument: str) -> float:
    try:
        temperature = float(argument)
    except ValueError:
        temperature = 0.0
    if not 0 < temperature <= 10:
        message = f"{one_line(argument)!r} is not a temperature: a number above 0 and at most 10."
        raise ConfigError(message, "For example: /temperature 0.7")
    return temperature


def _save(loading: Loading, argument: str) -> None:
    if not argument.endswith(".jsonl"):
        raise ConfigError("Conversations are saved to .jsonl files only.", "/save demonstrations.jsonl")
    from agentrl.workflow.training.demonstrations import line_of

    file = Path(argument).expanduser()
    try:
        line = line_of(loading.talk().demonstration())
    except ValueError as error:
        raise ConfigError(f"Cannot save this conversation as a demonstration: {error}.", "Start a new one: /reset") from error
    try:
        _append_line(file, line)
    except OSError as error:
        raise ConfigError(f"Cannot write to {str(file)!r}: {error.strerror}.", "Name another file.") from error
    say(f"Appended to {str(file)!r}; to learn from it: agentrl sft --dataset {file}")


def _append_line(file: Path, line: bytes) -> None:
    """Append the complete line to the file. If this fails, leave the file unchanged and raise OSError."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file")
    with file.open("a+b", buffering=0) as lines:
        before = lines.seek(0, os.SEEK_END)
        if before:
            lines.seek(-1, os.SEEK_END)
            line = line if lines.read(1) == b"\n" else b"\n" + line
        try:
            if lines.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            lines.truncate(before)
            raise


def _replay(loading: Loading, argument: str) -> None:
    show_lines(conversation_lines(loading.talk().steps))


def _exit(loading: Loading, argument: str) -> None:
    raise EOFError


class ChatCommand(NamedTuple):
    """A command of the chat: its function, and its line in /help."""

    run: Callable[[Loading, str], None]
    arguments: str
    effect: str


COMMANDS = {
    "/reset": ChatCommand(_reset, "", "forget the conversation"),
    "/tools": ChatCommand(_tools, "[on|off] [NAME]", "list the tools; switch all of them, or one, on or off"),
    "/temperature": ChatCommand(_temperature, "[X]", "sample at this temperature, above 0 and at most 10"),
    "/save": ChatCommand(_save, "FILE.jsonl", "append the conversation to a file for agentrl sft --dataset FILE.jsonl"),
    "/replay": ChatCommand(_replay, "", "the conversation with its tokens and logprobs"),
    "/help": ChatCommand(_help, "", "this"),
    "/exit": ChatCommand(_exit, "", "quit (Ctrl-D)"),
}
KEYS = (
    ('LINE\\ or """', "continues on the next line; three quotation marks start and end a block of lines"),
    ("ctrl-C", "stop the answer. A line that starts with a space is a message, not a command"),
)


def _read_lines() -> Iterator[str]:
    """Yield the lines of stdin until the first empty line. Raise ConfigError if a line is not UTF-8."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ConfigError("The input is not UTF-8.", "Convert it: iconv -t UTF-8") from error
        if not line.strip():
            return
        yield replace_invalid(line.strip())


@contextmanager
def _spinner(text: str) -> Iterator[None]:
    from rich.text import Text

    with console(stderr=True).status(Text(one_line(text, 100))):
        yield
