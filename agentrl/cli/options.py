"""Options that several commands share. This module imports little, so its import is fast. `config_options` has the options that
are generated from the config.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

MAX_INTEGER = 2**63 - 1
"""The largest id of a row."""
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name or number of the run.", show_default=False)]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A YAML file of the run.", show_default=False)
]
Assignments = Annotated[
    list[str] | None, typer.Option("-s", "--set", metavar="KEY=VALUE", help="Any key of the config.", show_default=False)
]
RowsMap = Annotated[str | None, typer.Option(help="Columns to read: question=A,answer=B.C", show_default=False)]
RowsFilter = Annotated[str | None, typer.Option(help="SQL condition on the columns of rows to keep.", show_default=False)]
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
    """Return the given chat options as config keys."""
    values = {"model.tool_format": tool_format, "model.chat_template": chat_template}
    return {key: value for key, value in values.items() if value is not None}
