"""A GGUF file as a model folder: its weights dequantised, its tokenizer beside them; made once for each file.

transformers reads the file, in a process of its own, because a command that names a model has not loaded torch. What is made
lies in `AGENTRL_HOME/cache/gguf`.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from agentrl.workflow.checkpoints.sealed_folder import RECORD
from agentrl.workflow.errors import ModelError
from agentrl.workflow.settings import settings

SUFFIX = ".gguf"
SERVER_HINT = "Name a folder in the hub's format, or sample the file with a llama.cpp server: --engine llamacpp."


def folder_of_gguf(file: Path) -> Path:
    """Return the model folder of a GGUF file; the first call for a file makes it.

    Raises:
        ModelError: there is no such file, transformers cannot read it, or the disk has no room.
    """
    if not file.is_file():
        raise ModelError(f"There is no file {str(file)!r}.", SERVER_HINT)
    found = file.stat()
    digest = hashlib.sha256(f"{file.resolve()} {found.st_size} {found.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = settings().cache_dir / "gguf" / f"{file.stem}-{digest}"
    if not folder.is_dir():
        _convert(file, folder)
    return folder


def read_gguf_record(folder: Path) -> dict[str, Any]:
    """Return the file and the precision that a folder was made of, or nothing for another folder."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("stage") == "gguf" else {}


def _convert(file: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as scratch:
        made = Path(scratch) / "model"
        command = [sys.executable, "-P", "-m", "agentrl.workflow.models.gguf_files", str(file.resolve()), str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["the process died"])[-1]
            raise ModelError(f"{str(file)!r} is no model that can be loaded: {last.rstrip('.')}.", SERVER_HINT)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another command made it meanwhile
                raise


def dequantise(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file, with its tokenizer, into a new folder.

    Weights of an F32 file stay float32 and those of an F16 file float16; all others become bfloat16.

    Raises:
        ValueError: transformers keeps the weights of this architecture quantised. It raises more for files it cannot read.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kinds = {tensor.tensor_type.name for tensor in GGUFReader(file).tensors if len(tensor.shape) == 2}
    dtype = torch.float32 if kinds == {"F32"} else torch.float16 if kinds == {"F16"} else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    if not all(tensor.is_floating_point() for tensor in model.state_dict().values()):
        raise ValueError(f"transformers cannot dequantise a model of the type {model.config.model_type!r}.")
    model.hf_quantizer = None  # the weights are plain numbers now, and may be saved
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    record = {"stage": "gguf", "file": file.name, "dtype": str(dtype).removeprefix("torch.")}
    (folder / RECORD).write_text(json.dumps(record))


def _main(file: str, folder: str) -> int:
    try:
        dequantise(Path(file), Path(folder))
    except Exception as error:  # noqa: BLE001 - readers of files from anywhere raise anything; the command reports it
        shutil.rmtree(folder, ignore_errors=True)
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}" if str(error) else repr(error), file=sys.stderr)
        return 1
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
