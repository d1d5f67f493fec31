"""A GGUF model file, cut into two pieces for copying, and joined again."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

PIECE, RECORD = "model.gguf.part", "model.json"
CHUNK_BYTES = 2**20


def split(file: Path, folders: Sequence[Path], sizes: Sequence[int]) -> None:
    """Write a piece of the file, and the record of the whole, into each folder.

    Args:
        sizes: bytes of each piece but the last, which gets the rest.
    """
    record = {"name": file.stem, "sha256": _sha256(file), "pieces": len(folders)}
    with file.open("rb") as source:
        for number, folder in enumerate(folders):
            (folder / f"{PIECE}{number}").write_bytes(source.read(sizes[number]) if number < len(sizes) else source.read())
            (folder / RECORD).write_text(json.dumps(record))


def join(files: Path, target: Path) -> Path:
    """Join the pieces in the folders below `files` into `target`; return the file, whose sha256 is that of the original.

    Raises:
        ValueError: a piece is missing, or is not as it was.
    """
    records = sorted(files.glob(f"gpu-[0-9]/{RECORD}"))
    if not records:
        raise ValueError(f"No piece of a model file in {files}/gpu-N: make gpu-wheels gguf=FILE, then copy gpu-2 and gpu-3.")
    record = json.loads(records[-1].read_text())
    target.mkdir(parents=True, exist_ok=True)
    file = target / f"{record['name']}.gguf"
    with file.open("wb") as out:
        for number in range(record["pieces"]):
            piece = next(files.glob(f"gpu-[0-9]/{PIECE}{number}"), None)
            if piece is None:
                raise ValueError(
                    f"Piece {number + 1} of {record['pieces']} of {record['name']} is missing: copy gpu-{number + 2}."
                )
            out.write(piece.read_bytes())
    if (found := _sha256(file)) != record["sha256"]:
        raise ValueError(f"{file} has sha256 {found}, the original {record['sha256']}: make the pieces again.")
    return file


def _sha256(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
