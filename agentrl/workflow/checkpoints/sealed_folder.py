"""Writing and verifying checkpoint folders. A folder is complete, or it does not exist.

`write` lets a writer fill `<folder>.tmp`, syncs every file, writes `manifest.json` (size and sha256 of each file) last, and
renames the folder. `verify` reads all files and names one that is missing, truncated or changed. Only a database row publishes
a checkpoint. So a folder that no row names was left by a killed process, and may be replaced.

The weights have the file name that PEFT or transformers expect. These libraries need further files, which are the same in all
checkpoints of a run and which no update reads. `link_shared` links such files from one folder to the next, so the disk stores
them once.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from agentrl.workflow.errors import BrokenCheckpoint, CheckpointError
from agentrl.workflow.runtime.faults import faultpoint

NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""The system's error numbers for a full disk."""
RECORD = "training.json"
"""The name of the file that records the origin of a model which agentrl made."""
MANIFEST = "manifest.json"
ADAPTER = "adapter_model.safetensors"
MODEL = "model.safetensors"
WEIGHTS = "weights.safetensors"
"""The name of the weights file in older checkpoints, for LoRA and full weights."""
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MAX_MANIFEST = 1 << 24
"""The largest manifest that is read, in bytes."""
MAX_NAME = 255
"""The longest name of a file or folder, in bytes."""
DEEPEST = 8
"""The most parts (folders and the file) in a file's path within a checkpoint."""
NEAREST = 2
"""The number of newest checkpoints in which `link_shared` looks for an equal file."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file in the manifest: size in bytes, sha256, and whether the run's checkpoints share it."""

    size: int
    sha256: str
    shared: bool = False


Part = Literal["weights", "start", "all"]
"""A part of a checkpoint: `weights` to sample, `start` (all but the optimizer's state) to start a run, `all` to resume a run.
"""

Writer = Callable[[Path], Collection[str] | None]
"""A function that fills a given folder. It returns the names of those files in it that the run's checkpoints share."""


def write(folder: Path, writer: Writer, then: str = "`agentrl resume`") -> str:
    """Write the checkpoint `folder` from the files that `writer` writes. Raise CheckpointError if writing failed, or the writer
    wrote no weights. An existing checkpoint at `folder` is unchanged.

    Args:
        then: the command to type after the disk's problem is solved, for the error message.

    Returns:
        The sha256 of the checkpoint's weights, as in a `PolicyRef`.
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
    except (OSError, SafetensorError) as error:  # safetensors raises its own error for a full disk
        raise write_error(folder, error, then) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return manifest[weights_name(manifest)].sha256


def weights_name(names: Collection[str]) -> str:
    """Return the name of the weights file among a checkpoint's files."""
    return next((name for name in (ADAPTER, MODEL) if name in names), WEIGHTS)


def weights_of(folder: Path) -> Path:
    """Return the path of a checkpoint's weights; it may not exist."""
    return folder / weights_name([name for name in (ADAPTER, MODEL) if (folder / name).is_file()])


def link_shared(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a checkpoint's folder. Equal files of the newest checkpoints become hard links."""
    others = sorted(folder.parent.glob(f"*/{MANIFEST}"), reverse=True)[:NEAREST]
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not any(_try_link(other.parent / name, folder / name, content) for other in others):
            (folder / name).write_bytes(content)


def _try_link(file: Path, target: Path, content: bytes) -> bool:
    """Make the target a hard link to the file, if the file has this content. Return True if the link was made."""
    try:
        if file.is_symlink() or file.stat().st_size != len(content) or file.read_bytes() != content:
            return False
        target.hardlink_to(file)
    except OSError:  # it has just been removed, or there are no links on this disk
        return False
    return True


def write_error(folder: Path, error: OSError | SafetensorError, then: str, what: str = "checkpoint") -> CheckpointError:
    """Return the exception for a folder that could not be written. `then` is the command to type afterwards."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    full = (
        error.errno in NO_SPACE_ERRNOS
        if isinstance(error, OSError)
        else any(os.strerror(code) in reason for code in NO_SPACE_ERRNOS)
    )
    todo = "Free disk space" if full else "Make that folder writable"
    return CheckpointError(f"Cannot write the {what} {str(folder)!r}: {reason}.", f"{todo}, then {then}.")


def remove_rivals(folder: Path) -> None:
    """Remove the folders that killed trainers left next to the published folder `vVERSION.tTOKEN.KEY`.

    They are unfinished, or have the same version and another token.
    """
    version, _, key = folder.name.split(".")
    for rival in folder.parent.glob(f"{version}.t*.{key}*"):
        if rival != folder:
            shutil.rmtree(rival, ignore_errors=True)  # a trainer that is still alive may write there


def verify(folder: Path, without: Collection[str] = (), shared: bool = True) -> Mapping[str, FileRecord]:
    """Verify that every file, except those in `without`, is unchanged. Return the manifest. `shared` says whether to verify
    also the files that the run's checkpoints share. No update reads these files. Raise BrokenCheckpoint if a file is missing,
    truncated or changed; the message names the first one.
    """
    manifest = read_manifest(folder)
    for name, record in manifest.items():
        spared = name in without or (record.shared and not shared)
        fault = "" if spared else file_error(folder / name, record)
        if fault:
            raise broken_error(folder, f"{name} {fault}")
    return manifest


def verify_part(folder: Path, sha256: str, part: Part) -> None:
    """Verify a published part: every byte, and its weights' sha256. Raise BrokenCheckpoint with the first wrong file."""
    weights = weights_of(folder)
    if not weights.is_file():
        raise broken_error(folder, "its weights are missing")
    if sha256_file(weights) != sha256:
        raise broken_error(folder, f"{weights.name} has another sha256 than the record")
    if part != "weights":
        verify(folder, without=(OPTIMIZER,) if part == "start" else (), shared=False)


def part_of(manifest: Mapping[str, FileRecord], part: Part) -> list[str]:
    """Return the names of the files in a part of a checkpoint. Files that only other programs read are left out."""
    if part == "weights":
        return [weights_name(manifest)]
    return [name for name, record in manifest.items() if not record.shared and (part == "all" or name != OPTIMIZER)]


def has_part(folder: Path, part: Part) -> bool:
    """Return True if all files of a part exist. Their content is not read."""
    try:
        manifest = read_manifest(folder)
    except BrokenCheckpoint:
        return False
    return all((folder / name).is_file() for name in part_of(manifest, part))


def is_sound(folder: Path, sha256: str, part: Part) -> bool:
    """Return True if all files of a part are unchanged, and the weights have the given sha256."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:  # not there yet, or cut off by a power failure
        return False
    names = part_of(manifest, part)
    return weights_sha256(manifest) == sha256 and not any(file_error(folder / name, manifest[name]) for name in names)


def weights_sha256(manifest: Mapping[str, FileRecord]) -> str:
    """Return the sha256 of the weights; empty if the manifest lists no weights."""
    record = manifest.get(weights_name(manifest))
    return record.sha256 if record else ""


def file_error(file: Path, record: FileRecord) -> str:
    """Return what is wrong with a file; empty if it matches its record."""
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    if size != record.size:
        return f"has {size} bytes instead of {record.size}"
    return "" if sha256_file(file) == record.sha256 else "was altered: its sha256 differs from the manifest"


def _sibling(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)


def repair_folder(folder: Path) -> None:
    """Repair the checkpoint after a process was killed in `write`."""
    old = _sibling(folder, ".old")
    if old.exists() and not folder.exists():
        # The process died between the two renames of `_swap`: `old` is the checkpoint that was there before.
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
    """Return the manifest of a checkpoint: each file's record by name. If the folder is a copy, `called` is the name of the
    original checkpoint, for error messages. Raise BrokenCheckpoint if the manifest is missing or cannot be read.
    """
    if not (folder / MANIFEST).is_file():  # opening a pipe would block
        raise broken_error(called or folder, f"{MANIFEST} is missing")
    try:
        with (folder / MANIFEST).open("rb") as seal:
            tree = json.loads(seal.read(MAX_MANIFEST))
        manifest = {str(name): _record(entry) for name, entry in tree["files"].items()}
    except FileNotFoundError as error:
        raise broken_error(called or folder, f"{MANIFEST} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise broken_error(called or folder, f"{MANIFEST} cannot be read") from error
    if outside := [name for name in manifest if not _is_inside(name)]:
        raise broken_error(called or folder, f"its manifest has an invalid file name, {outside[0]!r:.100}")
    return manifest


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    fits = name.isprintable() and len(parts) <= DEEPEST and all(0 < len(part.encode()) <= MAX_NAME for part in parts)
    return fits and not {".", ".."}.intersection(parts)


def _entry(record: FileRecord) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if name != "shared" or value}


def _record(entry: Mapping[str, Any]) -> FileRecord:
    size, sha256, shared = entry["size"], entry["sha256"], entry.get("shared", False)
    if type(size) is not int or type(sha256) is not str or type(shared) is not bool:
        raise TypeError("size or hash is missing")
    return FileRecord(size, sha256, shared)


def broken_error(where: Path | str, damage: str) -> BrokenCheckpoint:
    """Return the exception for the checkpoint at `where`. `damage` says what is wrong with its files."""
    return BrokenCheckpoint(
        f"The checkpoint {str(where)!r} is damaged: {damage}.",
        "Put the files back. An unfinished run rebuilds its newest checkpoint by itself.",
    )


def sha256_file(file: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
