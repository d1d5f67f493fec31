"""What a model's files say of it is what transformers loads; files that are malformed are refused before they are believed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agentrl.workflow.errors import ModelError
from agentrl.workflow.models.headers import BITS, MAX_HEADER_BYTES, read_model_files, read_shapes
from tests.models.test_parameters import llama
from tests.support.small_models import tiny_random


def write(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    """Write `model.safetensors` with that header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + data)


def entry(shape: list[Any], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}


@pytest.mark.parametrize("tied", [True, False])
def test_headers_have_the_shapes_that_are_loaded(tmp_path: Path, tied: bool) -> None:
    folder = llama(tmp_path, tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert dict(read_shapes(folder)) == {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert read_model_files(folder).config["hidden_size"] == model.config.hidden_size


def test_headers_of_every_type_that_torch_writes_are_read(tmp_path: Path) -> None:
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
    types += [torch.float8_e4m3fn, torch.float8_e5m2]
    save_file({str(dtype): torch.zeros(2, 3, dtype=dtype) for dtype in types}, tmp_path / "model.safetensors")
    assert set(read_shapes(tmp_path).values()) == {(2, 3)}
    assert len(read_shapes(tmp_path)) == len(types)
    assert BITS["F4"] == 4


BROKEN: dict[str, Callable[[Path], None]] = {
    "no header": lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
    "a length beyond the file": lambda folder: write(folder, {}, length=1 << 40),
    "a length beyond the limit": lambda folder: write(folder, {}, length=MAX_HEADER_BYTES + 1),
    "no JSON": lambda folder: write(folder, b"{{"),
    "no object": lambda folder: write(folder, []),
    "an entry that is no object": lambda folder: write(folder, {"a": 1}),
    "an unknown type": lambda folder: write(folder, entry([1], 0, 4, "F99"), bytes(4)),
    "a negative length": lambda folder: write(folder, entry([-1], 0, 4), bytes(4)),
    "a length that is no integer": lambda folder: write(folder, entry([1.0], 0, 4), bytes(4)),
    "a shape that does not fit its bytes": lambda folder: write(folder, entry([2], 0, 4), bytes(4)),
    "a length of thousands of digits": lambda folder: write(folder, entry([0, 10**4000], 0, 0)),
    "more dimensions than any weight has": lambda folder: write(folder, entry([1] * 1000, 0, 4), bytes(4)),
    "a folder in place of a file": lambda folder: (folder / "x.safetensors").mkdir(),
    "a name too long for a file": lambda folder: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "x" * 300}})
    ),
    "bytes beyond the file": lambda folder: write(folder, entry([2], 0, 8), bytes(4)),
    "bytes that end before they begin": lambda folder: write(folder, entry([0], 4, 0), bytes(4)),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "an index that names a missing file": lambda folder: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "elsewhere.safetensors"}})
    ),
    "an index that is no object": lambda folder: (folder / "model.safetensors.index.json").write_text("[1]"),
    "a config that is no object": lambda folder: (folder / "config.json").write_text("[]"),
    "a config that is nested too deep": lambda folder: (folder / "config.json").write_text("[" * 100_000),
    "no config": lambda folder: (folder / "config.json").unlink(),
}


@pytest.mark.parametrize("breaking", BROKEN)
def test_headers_that_are_malformed_are_one_sentence(tmp_path: Path, breaking: str) -> None:
    folder = tiny_random(tmp_path / "model")
    BROKEN[breaking](folder)
    with pytest.raises(ModelError) as refused:
        read_model_files(folder)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600
