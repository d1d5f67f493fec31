"""The application with all commands. It prints an error as one sentence with the next command to type, and returns an exit
code.
"""

import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from agentrl.cli.commands import Commands, with_hyphens
from agentrl.cli.console import say
from agentrl.workflow.errors import AgentRLError, ConfigError

app = typer.Typer(
    name="agentrl",
    cls=Commands,
    help="Reinforcement learning for language-model agents that call tools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 128, "token_normalize_func": with_hyphens},
)


def _version(print_version: bool) -> None:
    if print_version:
        from agentrl import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def start(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Reinforcement learning for language-model agents that call tools."""
    from pydantic import ValidationError

    from agentrl.workflow.settings import settings

    try:
        settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = f"AGENTRL_{'_'.join(map(str, first['loc'])).upper()}"
        raise ConfigError(
            f"{name} is invalid: {first['msg']} (its value: {first['input']!r:.80}).", "Correct the variable, or unset it."
        ) from error


def run(args: Sequence[str]) -> int:
    """Run one command line and return its exit code. Raise BrokenPipeError if the reader of the output closed the pipe."""
    debug = "--debug" in args
    try:
        code = app([arg for arg in args if arg != "--debug"], prog_name="agentrl", standalone_mode=False)
    except typer.Abort:
        return 130
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer turns it into an exit
            raise error.__context__ from None
        raise
    except TyperException as error:
        _say_usage(error.format_message(), args[0] if args else "")
        return 2
    except AgentRLError as error:
        if debug:
            traceback.print_exc()
        say(f"agentrl: {error.message}")
        if error.hint:
            say(f"  {error.hint}")
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the last resort: one sentence, or the traceback with --debug
        if debug:
            traceback.print_exc()
        say(f"agentrl: unexpected {type(error).__name__}: {' '.join(str(error).split())[:500]}")
        say("  Run it again with --debug for the traceback.")
        return 1
    return code if isinstance(code, int) else 0


def _say_usage(message: str, command: str) -> None:
    if message.startswith("Usage:"):  # without a command, typer's message is the help
        say(message)
    else:
        say(f"agentrl: {message}")
        say(f"  agentrl {'' if message.startswith('No such command') else command + ' '}--help")
