"""A program that converts a GGUF file to a model folder: `python -m agentrl.workflow.models.dequantise FILE FOLDER`.

The module `gguf_files` runs it.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.workflow.checkpoints import RECORD


class _Reader(GGUFReader):
    """The reader of GGUF files. It refuses a file that ends early, because the library reads a list beyond the end for ever."""

    def _get(self, offset: Any, dtype: Any, count: Any = 1, **options: Any) -> Any:  # type: ignore[override]
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError("the file ends early")
        return super()._get(offset, dtype, count, **options)


def dequantise(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file, with its tokenizer, into a new folder.

    The weights of an F32 file stay float32, and those of an F16 file stay float16. All others become bfloat16.

    Raises:
        ValueError: transformers does not dequantise the weights of this architecture. For files that it cannot read,
            transformers raises other exceptions.
    """
    kinds = {tensor.tensor_type.name for tensor in _Reader(file).tensors if len(tensor.shape) == 2}
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
