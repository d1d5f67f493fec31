"""The options of `submit`, which are made from the fields of `workflow.config`."""

import inspect
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from agentrl.workflow.config import DESCRIPTIONS, FIELDS, FLAG_OF, FLAGS, RunConfig

PANELS = ("What it trains on", "Learning", "The model", "Your own agent", "Sampling", "The run")
"""The headings of `submit --help`, in their order."""
_DEFAULTS = RunConfig().flat()


def config_option(key: str) -> Any:
    """Return the option of a key of the config."""
    flag, default = FLAG_OF[key], _DEFAULTS[key]
    text = DESCRIPTIONS[key] + ("; repeatable." if get_origin(type_of(key)) is list else "")
    if default not in (None, [], {}) and key != "dataset.name":
        text += f" [{str(default).lower() if isinstance(default, bool) else default}]"
    return typer.Option(*flag.names, metavar=flag.metavar, help=text, show_default=False, rich_help_panel=flag.panel)


def type_of(key: str) -> Any:
    """Return the type of what a person types for a key: a text, a number, a switch, or several texts."""
    kind = FLAG_OF[key].type or FIELDS[key][1].annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is tuple:
        return list[str]
    return str if get_origin(kind) is Literal else kind


def with_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, whose last parameter is `**options`, an option for each key of the config that has one."""
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
