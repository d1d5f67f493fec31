"""Files of the data folder that are written once and atomically: rows and modules."""

import os
from pathlib import Path

from agentrl.workflow.errors import ServiceError


def write_once(file: Path, text: str) -> None:
    """Write the file if it does not exist.

    Raises:
        ServiceError: it cannot be written.
    """
    if file.exists():
        return
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        said = f"Cannot write to the folder {str(file.parent)!r}: {error.strerror or error}."
        raise ServiceError(said, "Pass another store, or set AGENTRL_HOME to a folder of yours.") from error
