"""A checkpoint is a folder that is whole or absent: written beside, synced, sealed by a manifest, then renamed into place.

`write` lets a writer fill `<folder>.tmp`, syncs every file, writes `manifest.json` (size and sha256 of each file) last and
renames. `verify` reads everything back and names the file that is missing, truncated or altered. Only a database row
publishes a checkpoint, so a folder that no row names is a leftover and may be replaced.

The weights have the name that PEFT or transformers look for. What these need beside them is alike in all checkpoints of a run,
and `link_shared` links it from one folder to the next: the disk holds it once. No update reads it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from agentrl.workflow.checkpoints.object_store import NO_SPACE_ERRNOS
from agentrl.workflow.errors import BrokenCheckpoint, CheckpointError
from agentrl.workflow.runtime.faults import faultpoint

RECORD = "training.json"
"""The file of a model that was made here which says of what and how."""
MANIFEST = "manifest.json"
ADAPTER = "adapter_model.safetensors"
MODEL = "model.safetensors"
WEIGHTS = "weights.safetensors"
"""What the weights of older checkpoints are called, whichever they are."""
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
LARGEST_MANIFEST = 1 << 24
"""Bytes that are read of one."""
LONGEST_NAME = 255
"""Bytes of a file's name, and of a folder's."""
DEEPEST = 8
"""Names in a file's path."""
NEAREST = 2
"""Checkpoints, the newest ones, among which `link_shared` looks for a file."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the manifest says of one file: its size in bytes, the sha256 of its content, and whether it is one of those that the
    run's checkpoints share.
    """

    size: int
    sha256: str
    shared: bool = False


Writer = Callable[[Path], Collection[str] | None]
"""Fills the folder it is given; returns the names of the files in there that the run's checkpoints share."""


def write(folder: Path, writer: Writer, then: str = "`agentrl resume`") -> str:
    """Makes the checkpoint `folder` from what `writer` puts into the folder it is given.

    Args:
        then: what one types where the disk refused, after there is room.

    Returns:
        The sha256 of its weights: what a `PolicyRef` names.

    Raises:
        CheckpointError: the disk refused, or the writer wrote no weights. What stood at `folder` before still stands.
    """
    beside = _sibling(folder, ".tmp")
    try:
        repair_folder(folder)
        beside.mkdir(parents=True)
        shared = writer(beside)
        faultpoint("checkpoint.written")
        manifest = _seal(beside, shared or ())
        faultpoint("checkpoint.sealed")
        _swap(beside, folder)
        faultpoint("checkpoint.renamed")
    except (OSError, SafetensorError) as error:  # safetensors has no OSError for a full disk
        raise write_error(folder, error, then) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return manifest[weights_name(manifest)].sha256


def weights_name(names: Collection[str]) -> str:
    """Which of a checkpoint's files holds its weights."""
    return next((name for name in (ADAPTER, MODEL) if name in names), WEIGHTS)


def weights_of(folder: Path) -> Path:
    """The file of a checkpoint's weights, there or not."""
    return folder / weights_name([name for name in (ADAPTER, MODEL) if (folder / name).is_file()])


def link_shared(folder: Path, files: Mapping[str, bytes]) -> None:
    """Puts files into a checkpoint's folder: as links to those of the newest beside it, where these hold the same bytes."""
    others = sorted(folder.parent.glob(f"*/{MANIFEST}"), reverse=True)[:NEAREST]
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not any(_try_link(other.parent / name, folder / name, content) for other in others):
            (folder / name).write_bytes(content)


def _try_link(file: Path, target: Path, content: bytes) -> bool:
    """Whether the target is now another name of the file, which holds these very bytes."""
    try:
        if file.is_symlink() or file.stat().st_size != len(content) or file.read_bytes() != content:
            return False
        target.hardlink_to(file)
    except OSError:  # it has just been removed, or there are no links on this disk
        return False
    return True


def write_error(folder: Path, error: OSError | SafetensorError, then: str, what: str = "checkpoint") -> CheckpointError:
    """The error of a folder that the disk refused; `then` is what one types after it was mended."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    full = (
        error.errno in NO_SPACE_ERRNOS
        if isinstance(error, OSError)
        else any(os.strerror(code) in reason for code in NO_SPACE_ERRNOS)
    )
    todo = "Free disk space" if full else "Make that folder writable"
    return CheckpointError(f"Cannot write the {what} {str(folder)!r}: {reason}.", f"{todo}, then {then}.")


def drop_optimizer(folder: Path) -> None:
    """Removes the optimizer's state from a checkpoint that nothing trains on any more; its weights can still be sampled."""
    (folder / OPTIMIZER).unlink(missing_ok=True)


def remove_rivals(folder: Path) -> None:
    """Removes what killed trainers left beside the published `vVERSION.tTOKEN.KEY`: the same of another token, or its half."""
    version, _, key = folder.name.split(".")
    for rival in folder.parent.glob(f"{version}.t*.{key}*"):
        if rival != folder:
            shutil.rmtree(rival, ignore_errors=True)  # a trainer that is not dead yet may still write there


def verify(folder: Path, without: Collection[str] = (), shared: bool = True) -> Mapping[str, FileRecord]:
    """The manifest of a checkpoint whose every file, but those `without` which one can do, is as it was written.

    Args:
        shared: look at what the run's checkpoints share too, which no update reads.

    Raises:
        BrokenCheckpoint: naming the first file that is missing, truncated or altered.
    """
    manifest = read_manifest(folder)
    for name, record in manifest.items():
        spared = name in without or (record.shared and not shared)
        fault = "" if spared else fault_of(folder / name, record)
        if fault:
            raise broken_error(folder, f"{name} {fault}")
    return manifest


def fault_of(file: Path, record: FileRecord) -> str:
    """What is wrong with a file; empty if it is as it was written."""
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    if size != record.size:
        return f"has {size} bytes where {record.size} were written"
    return "" if sha256_file(file) == record.sha256 else "was altered: its sha256 is not the manifest's"


def _sibling(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)


def repair_folder(folder: Path) -> None:
    """Puts right what a process that died in `write` left of the checkpoint."""
    old = _sibling(folder, ".old")
    if old.exists() and not folder.exists():
        # The process died between the two renames of `_swap`: what stood there is the older one.
        old.rename(folder)
    for leftover in (old, _sibling(folder, ".tmp")):
        if leftover.exists():
            shutil.rmtree(leftover)


def _seal(folder: Path, shared: Collection[str]) -> Mapping[str, FileRecord]:
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    manifest = {name: FileRecord(path.stat().st_size, sha256_file(path), name in shared) for name, path in files.items()}
    if weights_name(manifest) not in manifest:
        raise CheckpointError(f"The checkpoint {str(folder)!r} was written without weights.")
    _sync(files.values())
    seal = folder / MANIFEST
    seal.write_text(json.dumps({"files": {name: _entry(record) for name, record in manifest.items()}}, indent=1))
    _sync([seal, *(path for path in folder.rglob("*") if path.is_dir()), folder])
    return manifest


def _swap(beside: Path, folder: Path) -> None:
    old = _sibling(folder, ".old")
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


def read_manifest(folder: Path, called: str = "") -> Mapping[str, FileRecord]:
    """What a checkpoint's manifest says of its files, by name.

    Args:
        called: what an error calls the checkpoint, where the folder holds a copy of it.

    Raises:
        BrokenCheckpoint: there is no manifest, or it cannot be read.
    """
    if not (folder / MANIFEST).is_file():  # a pipe would be waited for
        raise broken_error(called or folder, f"{MANIFEST} is missing")
    try:
        with (folder / MANIFEST).open("rb") as seal:
            tree = json.loads(seal.read(LARGEST_MANIFEST))
        manifest = {str(name): _record(entry) for name, entry in tree["files"].items()}
    except FileNotFoundError as error:
        raise broken_error(called or folder, f"{MANIFEST} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise broken_error(called or folder, f"{MANIFEST} cannot be read") from error
    if outside := [name for name in manifest if not _is_inside(name)]:
        raise broken_error(called or folder, f"its manifest names {outside[0]!r:.100}")
    return manifest


def _is_inside(name: str) -> bool:
    """Whether that can be a file of the folder, and none anywhere else."""
    parts = name.split("/")
    fits = name.isprintable() and len(parts) <= DEEPEST and all(0 < len(part.encode()) <= LONGEST_NAME for part in parts)
    return fits and not {".", ".."}.intersection(parts)


def _entry(record: FileRecord) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if name != "shared" or value}


def _record(entry: Mapping[str, Any]) -> FileRecord:
    size, sha256, shared = entry["size"], entry["sha256"], entry.get("shared", False)
    if type(size) is not int or type(sha256) is not str or type(shared) is not bool:
        raise TypeError("no size and hash")
    return FileRecord(size, sha256, shared)


def broken_error(where: Path | str, found: str) -> BrokenCheckpoint:
    """The error of a checkpoint, in a folder or at a URL, that is not as it was written."""
    return BrokenCheckpoint(
        f"The checkpoint {str(where)!r} is not whole: {found}.",
        "Put the files back; a run that is not over makes its newest checkpoint again by itself.",
    )


def sha256_file(file: Path) -> str:
    """sha256 of a file's bytes, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
