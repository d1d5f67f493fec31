"""`agentrl merge`: writes a stored policy as a plain model folder."""

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.console import Json, say, show, show_json
from agentrl.cli.continued_policy import DEQUANTISED_NOTE
from agentrl.cli.resolve_targets import find_trained_policy


def merge(
    policy: Annotated[
        str, typer.Argument(metavar="RUN[@VERSION]", help="A run's policy, or its checkpoint.", show_default=False)
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder of the new model; it must not exist yet.", show_default=False)
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace a model that agentrl wrote there.")] = False,
    as_json: Json = False,
) -> None:
    """Write a stored policy as an ordinary model folder, with LoRA merged into the base; prints the folder."""
    from agentrl.workflow.errors import ConfigError
    from agentrl.workflow.models.lookup import refuse_existing
    from agentrl.workflow.settings import settings

    config, ref, manifest = find_trained_policy(policy, "agentrl merge")
    target = out.expanduser().absolute()
    refuse_existing(target, force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"Cannot create the folder {str(target.parent)!r}: {error.strerror}.", "Pass another --out."
        ) from error

    from agentrl.workflow.training.merging import merge as make

    where = settings()
    record = make(ref, config.model, manifest, target, where.device, where.threads)
    if record["dequantised"]:
        say(DEQUANTISED_NOTE)
    if as_json:
        show_json({"model": target, "run": config.name, "version": ref.version, "kind": record["kind"]})
    else:
        show(str(target))
