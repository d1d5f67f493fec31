"""Options that several commands have, and those of `submit`, which are made from the fields of `workflow.config`."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from agentrl.workflow.config import DESCRIPTIONS, FIELDS, FLAG_OF, FLAGS, RunConfig

MAX_INTEGER = 2**63 - 1
"""The largest number of a row."""
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


RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name or number of the run.", show_default=False)]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A YAML file of the run.", show_default=False)
]
Assignments = Annotated[
    list[str] | None, typer.Option("-s", "--set", metavar="KEY=VALUE", help="Any key of the config.", show_default=False)
]
AgentName = Annotated[str | None, config_option("agent.name")]
AgentNetwork = Annotated[str | None, config_option("agent.network")]
AgentUnsafe = Annotated[bool | None, config_option("agent.unsafe")]
AgentSandbox = Annotated[bool | None, config_option("agent.sandbox")]
PolicyName = Annotated[
    str,
    typer.Option(
        *("--policy", "--model", "--model-path"),
        metavar="RUN[@VERSION|@best|@epochN]|PATH|MODEL",
        help="A run's policy (newest version), a checkpoint or a model.",
    ),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", help="Sample from the K likeliest tokens [the run's].", show_default=False)
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", help="Sample from the likeliest tokens up to this total probability [the run's].", show_default=False
    ),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Minimum probability, as a share of the likeliest token's [the run's].", show_default=False),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Text that ends a turn; repeatable [the run's].", show_default=False)
]
ToolFormatName = Annotated[
    str | None,
    typer.Option("--tool-format", help="Tool call format [the run's, else the template's].", show_default=False),
]
TemplateFile = Annotated[
    str | None,
    typer.Option("--chat-template", metavar="FILE", help="Jinja file to use as the chat template.", show_default=False),
]


def chat_values(tool_format: str | None, chat_template: str | None) -> dict[str, Any]:
    """Return the chosen chat options, as keys of the config."""
    given = {"model.tool_format": tool_format, "model.chat_template": chat_template}
    return {key: value for key, value in given.items() if value is not None}
