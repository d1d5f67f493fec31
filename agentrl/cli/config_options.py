"""The options of `submit`, generated from the fields of `workflow.config`."""

import inspect
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from agentrl.workflow.config import DESCRIPTIONS, FIELDS, FLAG_OF, FLAGS, RunConfig

PANELS = ("What it trains on", "Learning", "The model", "Your own agent", "Sampling", "The run")
"""The headings of `submit --help`, in order."""
_DEFAULTS = RunConfig().flat()


def config_option(key: str) -> Any:
    """Return the Typer option of a config key."""
    flag, default = FLAG_OF[key], _DEFAULTS[key]
    text = DESCRIPTIONS[key] + ("; repeatable." if get_origin(type_of(key)) is list else "")
    if default not in (None, [], {}) and key != "dataset.name":
        text += f" [{str(default).lower() if isinstance(default, bool) else default}]"
    return typer.Option(*flag.names, metavar=flag.metavar, help=text, show_default=False, rich_help_panel=flag.panel)


def type_of(key: str) -> Any:
    """Return the type that a config key has on the command line: a text, a number, a switch, or a list of texts."""
    kind = FLAG_OF[key].type or FIELDS[key][1].annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is tuple:
        return list[str]
    return str if get_origin(kind) is Literal else kind


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option to the command for each config key that has a flag. The command's last parameter is `**options`."""
    keys = sorted(FLAGS.items(), key=lambda item: (PANELS.index(FLAG_OF[item[1]].panel or ""), "." not in item[1]))
    options = [
        inspect.Parameter(
            keyword, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[type_of(key) | None, config_option(key)]
        )
        for keyword, key in keys
    ]
    context, *own, _ = inspect.signature(command).parameters.values()
    command.__signature__ = inspect.Signature([context, *options, *own])  # type: ignore[attr-defined]
    return command


AgentName = Annotated[str | None, config_option("agent.name")]
AgentNetwork = Annotated[str | None, config_option("agent.network")]
AgentUnsafe = Annotated[bool | None, config_option("agent.unsafe")]
AgentSandbox = Annotated[bool | None, config_option("agent.sandbox")]
