"""A checkpoint is a folder that is whole or absent: written beside, synced, sealed by a manifest, then renamed into place.

`write` lets a writer fill `<folder>.tmp`, syncs every file, writes `manifest.json` (size and sha256 of each file) last and
renames. `verify` reads everything back and names the file that is missing, truncated or altered. Only a database row
publishes a checkpoint, so a folder that no row names is a leftover and may be replaced.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from workflow.errors import CheckpointError
from workflow.models import sha256_file

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the manifest says of one file: its size in bytes and the sha256 of its content."""

    size: int
    sha256: str


def write(folder: Path, writer: Callable[[Path], None]) -> str:
    """Makes the checkpoint `folder` from what `writer` puts into the folder it is given.

    Returns:
        The sha256 of its `weights.safetensors`: what a `PolicyRef` names.

    Raises:
        CheckpointError: the disk refused, or the writer wrote no weights. What stood at `folder` before still stands.
    """
    beside = _beside(folder, ".tmp")
    try:
        _remove_leftovers(folder)
        beside.mkdir(parents=True)
        writer(beside)
        manifest = _seal(beside)
        _swap(beside, folder)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write the checkpoint {str(folder)!r}: {error.strerror or error}.",
            "Free disk space, then `agentrl resume`.",
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return manifest[WEIGHTS].sha256


def drop_optimizer(folder: Path) -> None:
    """Removes the optimizer's state from a checkpoint that nothing trains on any more; its weights can still be sampled."""
    (folder / OPTIMIZER).unlink(missing_ok=True)


def verify(folder: Path) -> Mapping[str, FileRecord]:
    """The manifest of a checkpoint whose every file is as it was written.

    Raises:
        CheckpointError: naming the first file that is missing, truncated or altered.
    """
    manifest = _read_manifest(folder)
    for name, record in manifest.items():
        path = folder / name
        if not path.is_file():
            raise _broken(folder, f"{name} is missing")
        size = path.stat().st_size
        if size != record.size:
            raise _broken(folder, f"{name} has {size} bytes where {record.size} were written")
        if sha256_file(path) != record.sha256:
            raise _broken(folder, f"{name} was altered: its sha256 is not the manifest's")
    return manifest


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)


def _remove_leftovers(folder: Path) -> None:
    old = _beside(folder, ".old")
    if old.exists() and not folder.exists():
        # The process died between the two renames of `_swap`: what stood there is the older one.
        old.rename(folder)
    for leftover in (old, _beside(folder, ".tmp")):
        if leftover.exists():
            shutil.rmtree(leftover)


def _seal(folder: Path) -> Mapping[str, FileRecord]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {path.relative_to(folder).as_posix(): FileRecord(path.stat().st_size, sha256_file(path)) for path in files}
    if WEIGHTS not in manifest:
        raise CheckpointError(f"The checkpoint {str(folder)!r} was written without {WEIGHTS}.")
    _sync(files)
    seal = folder / MANIFEST
    seal.write_text(json.dumps({"files": {name: asdict(record) for name, record in manifest.items()}}, indent=1))
    _sync([seal, *(path for path in folder.rglob("*") if path.is_dir()), folder])
    return manifest


def _swap(beside: Path, folder: Path) -> None:
    old = _beside(folder, ".old")
    if folder.exists():
        folder.rename(old)
    beside.rename(folder)
    _sync([folder.parent])
    if old.exists():
        shutil.rmtree(old)


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read_manifest(folder: Path) -> Mapping[str, FileRecord]:
    try:
        tree = json.loads((folder / MANIFEST).read_bytes())
        return {name: FileRecord(int(entry["size"]), str(entry["sha256"])) for name, entry in tree["files"].items()}
    except FileNotFoundError as error:
        raise _broken(folder, f"{MANIFEST} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(folder, f"{MANIFEST} cannot be read") from error


def _broken(folder: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {str(folder)!r} is not whole: {found}.", "Restore the folder, or `agentrl resume` from an earlier one."
    )
