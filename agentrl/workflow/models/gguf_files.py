"""The conversion of a GGUF file to a model folder with dequantised weights and a tokenizer. Each file is converted once.

A separate process runs transformers to read the file, because a command that names a model has not loaded torch. The folders
are in `AGENTRL_HOME/cache/gguf`.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from agentrl.workflow.checkpoints import RECORD
from agentrl.workflow.errors import ModelError
from agentrl.workflow.runtime.process_output import last_line
from agentrl.workflow.settings import settings

SUFFIX = ".gguf"
SERVER_HINT = "Pass a folder in the hub's format, or sample the file with a llama.cpp server: --engine llamacpp."


def folder_of_gguf(file: Path) -> Path:
    """Return the model folder of a GGUF file. The first call for a file makes it.

    Raises:
        ModelError: the file does not exist, transformers cannot read it, or the disk has no room.
    """
    if not file.is_file():
        raise ModelError(f"There is no file {str(file)!r}.", SERVER_HINT)
    status = file.stat()
    digest = hashlib.sha256(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = settings().cache_dir / "gguf" / f"{file.stem}-{digest}"
    if not folder.is_dir():
        _convert(file, folder)
    return folder


def read_gguf_record(folder: Path) -> dict[str, Any]:
    """Return the record of the GGUF file and the precision that a folder was made from; empty if it was not made from a GGUF
    file.
    """
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("stage") == "gguf" else {}


def _convert(file: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
        output = Path(scratch) / "model"
        command = [sys.executable, "-P", "-m", "agentrl.workflow.models.dequantise", str(file.resolve()), str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = last_line(done.stderr, "the process died")
            raise ModelError(f"{str(file)!r} cannot be loaded: {last.rstrip('.')}.", SERVER_HINT)
        try:
            output.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another command made it meanwhile
                raise
