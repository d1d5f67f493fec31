"""A model's shapes from `config.json` and the headers of `*.safetensors`, without loading a weight, torch or numpy.

The files are untrusted: sizes are limited before anything is parsed, and every header is checked against its file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from agentrl.workflow.errors import ModelError

MAX_CONFIG_BYTES, MAX_TEXT_BYTES = 1 << 24, 1 << 28
"""The largest config of a model that is read, and the largest other text, such as `tokenizer.json`, in bytes."""
MAX_HEADER_BYTES = 100_000_000
"""The largest header, in bytes. This is the limit of the format, https://huggingface.co/docs/safetensors."""
MANY_LAYERS = 1000
"""More layers than any model has. With more, each layer must have a weight in the files."""
MAX_DIMENSIONS, MAX_LENGTH = 16, 2**63
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""The number of bits of a number, by the name that the format has for its type."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of weights, by name."""

_TEXTS = (".json", ".txt", ".jinja", ".model", ".py")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_COPY = "Copy the model again, all files of one version."


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The config and the shapes of a model, from its files.

    Args:
        config: the object in `config.json`.
        shapes: the shape of every weight in the files, by name.
    """

    config: Mapping[str, Any]
    shapes: Shapes


def read_model_files(folder: Path) -> ModelFiles:
    """Read `config.json` and all headers of a model's folder.

    Raises:
        ModelError: a file is missing, cut short or malformed.
    """
    return ModelFiles(read_config(folder), read_shapes(folder))


def read_shapes(folder: Path) -> Shapes:
    """Read the shapes of all weights in a folder.

    Raises:
        ModelError: there are no weights, or a file is missing, cut short or malformed.
    """
    _check_index(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            shapes |= _read_header(file)
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"The files in {str(folder)!r} are not a valid model: {file.name}: {error}.", _COPY) from error
    if not shapes:
        message = f"The folder {str(folder)!r} holds no weights in *.safetensors."
        raise ModelError(message, "Convert the model: save_pretrained(...)")
    return shapes


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read the object in a model's `config.json`.

    Raises:
        ModelError: the file is missing or malformed.
    """
    try:
        with (folder / "config.json").open("rb") as stream:
            config = json.loads(stream.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"The files in {str(folder)!r} are not a valid model: config.json cannot be read.", _COPY) from error
    if not isinstance(config, dict):
        raise ModelError(f"The files in {str(folder)!r} are not a valid model: config.json is not a JSON object.", _COPY)
    return config


def check_files(folder: Path) -> None:
    """Check that a model's weights and texts are regular files, and that no text is too large. A library would read a pipe for
    ever, and a text as a whole.

    Raises:
        ModelError: a file is something else, such as a pipe or a loop of links, or it is too large.
    """
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors" or (file.suffix in _TEXTS and not file.is_dir()):
            limit = MAX_CONFIG_BYTES if file.name.endswith("config.json") else MAX_TEXT_BYTES
            problem = "" if file.is_file() else "is not a regular file"
            if not problem and file.suffix in _TEXTS and file.stat().st_size > limit:
                problem = f"has more than {limit} bytes"
            if problem:
                message = f"The files in {str(folder)!r} are not a valid model: {file.name!r:.200} {problem}."
                raise ModelError(message, _COPY)


def check_layers(folder: Path) -> None:
    """Raise ModelError if `config.json` has more than MANY_LAYERS layers and the folder has fewer weights, because transformers
    would build millions of layers for hours; or if a file cannot be read.
    """
    config, weights = read_config(folder), len(read_shapes(folder))
    for part in (config, config.get("text_config")):
        counts = [part.get(name) for name in _LAYERS] if isinstance(part, dict) else []
        many = next((count for count in counts if isinstance(count, int) and count > max(MANY_LAYERS, weights)), None)
        if many is not None:
            problem = f"its config.json has {many!s:.20} layers, the files only {weights} weights"
            raise ModelError(f"The files in {str(folder)!r} are not a valid model: {problem}.", _COPY)


def _check_index(folder: Path) -> None:
    """Raise ModelError if a file that the folder's index lists is missing."""
    index, present = folder / "model.safetensors.index.json", {file.name for file in folder.glob("*.safetensors")}
    if not index.is_file():
        return
    try:
        with index.open("rb") as stream:
            files = {str(name) for name in json.loads(stream.read(MAX_HEADER_BYTES))["weight_map"].values()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"The files in {str(folder)!r} are not a valid model: {index.name} cannot be read.", _COPY) from error
    missing = sorted(name for name in files if name not in present)
    if missing:
        raise ModelError(f"The folder {str(folder)!r} has no {missing[0]!r:.200}, which its index lists.", _COPY)


def _read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Parse one file's header: 8 bytes with its length, then JSON with the type, shape and offsets of each weight."""
    if not file.is_file():
        raise ValueError("it is not a regular file")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError("the length of its header is wrong")
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    return {name: checked_shape(entry, size - 8 - length) for name, entry in header.items() if name != "__metadata__"}


def checked_shape(entry: Any, data_bytes: int) -> tuple[int, ...]:
    """Return the shape in a header's entry.

    Args:
        entry: the value of a weight's name in the header.
        data_bytes: the bytes of all weights in the file.

    Raises:
        ValueError: the entry is malformed, or does not fit the file.
    """
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]} if dtype in BITS:
            pass
        case _:
            raise ValueError("its header has an invalid entry")
    sizes = len(shape) <= MAX_DIMENSIONS and all(type(length) is int and 0 <= length < MAX_LENGTH for length in shape)
    if not sizes or not 0 <= start <= end <= data_bytes:
        raise ValueError("its header has the position or shape of a weight that the file cannot hold")
    if prod(shape) * BITS[dtype] != (end - start) * 8:
        raise ValueError("a shape in its header does not fit the file")
    return tuple(shape)
