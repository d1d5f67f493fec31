"""Checkpoints in a folder or at a URL that many hosts reach (`s3://bucket/prefix`, `file:///mnt/shared`).

A path without `://` is a folder of this host and is used as it is. Object stores know no rename: a key is written once and
never again, and the manifest is written last: once it is there, the checkpoint is whole. `file://` is a folder mounted on every
host.

Each host caches remote checkpoints in `AGENTRL_HOME/cache/RUN/CHECKPOINT`. One process fetches while the others wait. A copy is
verified against the manifest and the policy's row before it gets its name, and again when a process first uses it. The `KEEP`
most recently used copies of a run stay.
"""

import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

from agentrl.workflow.checkpoints import object_store, sealed_folder
from agentrl.workflow.checkpoints.sealed_folder import (
    MANIFEST,
    OPTIMIZER,
    FileRecord,
    Writer,
    sha256_file,
    weights_name,
    weights_of,
)
from agentrl.workflow.errors import BrokenCheckpoint, CheckpointError, ConfigError
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.settings import is_url, settings

T = TypeVar("T")

KEEP = 10
"""Copies of one run that a host keeps: those of nine overlapping iterations, and one more for an evaluation."""

Part = Literal["weights", "start", "all"]
"""Part of a checkpoint: `weights` to sample, `start` (all but the optimizer's state) to start a run from, `all` to resume."""

_verified_copies: set[tuple[Path, Part]] = set()
"""Copies whose bytes this process has compared with their manifest."""

_UNFINISHED_SUFFIXES = (".tmp", ".old", ".fetch")
"""Suffixes of a folder's name while it is being made."""


def write(path: str, writer: Writer) -> str:
    """Make the checkpoint at `path`, a folder or a URL, as `checkpoint.write` does.

    Returns:
        The sha256 of its weights.

    Raises:
        CheckpointError: the disk refused the files, or there is no such bucket.
        ConfigError: the store refused them.
        ServiceError: the store did not answer for long. Only a checkpoint without a manifest is lost.
    """
    folder = object_store.mounted_folder(path) if is_url(path) else Path(path)
    if folder is not None:
        return sealed_folder.write(folder, writer)
    copy = copy_of(path)
    with _report_host_trouble(path), hold_lock(copy.parent):  # so that no process evicts it before it is stored
        sha256 = sealed_folder.write(copy, writer)
        _upload(copy, path)
        faultpoint("checkpoint.uploaded")
        _evict(copy.parent)
    return sha256


def read(path: str, sha256: str, part: Part, reader: Callable[[Path], T]) -> T:
    """Call the reader with the `local_part` folder. A copy that was damaged or evicted after its check is fetched once more.

    Raises:
        CheckpointError, ConfigError, ServiceError: as `local_part`; besides, the reader's own errors.
    """
    folder = local_part(path, sha256, part)
    try:
        return reader(folder)
    except CheckpointError:
        if not is_url(path):
            raise
    _verified_copies.discard((folder, part))
    return reader(local_part(path, sha256, part))


def local_part(path: str, sha256: str, part: Part = "weights") -> Path:
    """Return the folder of this host that holds a part of the checkpoint at `path`, a folder or a URL; fetched if need be.

    Args:
        sha256: the hash of the weights in the policy's row.

    Raises:
        BrokenCheckpoint: the checkpoint is missing or incomplete, or its weights are not those of the row.
        ConfigError: this host does not see the folder where the run keeps its checkpoints, or may not read it.
        ServiceError: the store did not answer for long, or this host has no space.
    """
    if not is_url(path):
        return _check_here(Path(path))
    copy = copy_of(path)
    if (copy, part) in _verified_copies and _is_complete(copy, part):
        return copy
    with _report_host_trouble(path), hold_lock(copy.parent):
        if not _is_sound(copy, sha256, part):
            _fetch(path, copy, sha256, part)
        _verified_copies.add((copy, part))
        os.utime(copy)
        _evict(copy.parent)
    return copy


def checkpoint_error(path: str, sha256: str, part: Part = "weights") -> str:
    """Return the fault in a part of a published checkpoint; empty if every byte is as it was written.

    For a URL the store itself is read: a sound copy on this host does not help other hosts.

    Raises:
        ConfigError: this host does not see the folder where the run keeps its checkpoints, or may not read it.
        ServiceError: the store did not answer for long, or this host has no space.
    """
    try:
        with _report_host_trouble(path):
            _verify(path, sha256, part)
    except BrokenCheckpoint as error:
        return error.message.rstrip(".")
    return ""


def drop_optimizer(path: str) -> None:
    """Remove the optimizer's state from a checkpoint that nothing trains on any more; its weights can still be sampled.

    Raises:
        ServiceError: the store did not answer for long.
    """
    sealed_folder.drop_optimizer(copy_of(path) if is_url(path) else Path(path))
    if is_url(path):
        object_store.remove(path, OPTIMIZER)


def remove(path: str) -> None:
    """Remove a checkpoint that was never published.

    Raises:
        ServiceError: the store did not answer for long.
    """
    shutil.rmtree(copy_of(path) if is_url(path) else path, ignore_errors=True)
    if is_url(path):
        object_store.remove(path)


def remove_rivals(path: str) -> None:
    """Remove folders that killed trainers left on this host beside a published checkpoint."""
    folder = object_store.mounted_folder(path) if is_url(path) else Path(path)
    sealed_folder.remove_rivals(folder or copy_of(path))


def sizes(url: str) -> dict[str, dict[str, int]]:
    """Checkpoint -> path in it -> bytes, for every file under a run's URL.

    Raises:
        ServiceError: the store did not answer for long.
    """
    found: dict[str, dict[str, int]] = {}
    for path, size in object_store.sizes(url).items():
        name, _, file = path.partition("/")
        found.setdefault(name, {})[file] = size
    return found


def copy_of(url: str) -> Path:
    """Return the folder for this host's copy of the checkpoint at that URL."""
    parent, _, name = url.rstrip("/").rpartition("/")
    run = f"{parent.rpartition('/')[2]}-{hashlib.sha256(parent.encode()).hexdigest()[:8]}"
    return settings().cache_dir / run / name


def _verify(path: str, sha256: str, part: Part) -> None:
    """Verifies every byte of a part of the published checkpoint."""
    if is_url(path):
        with tempfile.TemporaryDirectory() as scratch:
            _fetch(path, Path(scratch) / "checkpoint", sha256, part)
        return
    folder = _check_here(Path(path))
    weights = weights_of(folder)
    if not weights.is_file():
        raise sealed_folder.broken_error(path, "its weights are missing")
    if sha256_file(weights) != sha256:
        raise sealed_folder.broken_error(path, f"{weights.name} has another sha256 than the record")
    if part != "weights":
        sealed_folder.verify(folder, without=(OPTIMIZER,) if part == "start" else (), shared=False)


def _check_here(folder: Path) -> Path:
    _must_see(folder.parent)
    if not folder.is_dir():
        raise BrokenCheckpoint(f"The checkpoint {str(folder)!r} is missing.", "Restore it, then `agentrl resume`.")
    return folder


def _must_see(place: Path) -> None:
    if not place.is_dir():  # the whole place is missing, so no checkpoint in it is broken
        raise ConfigError(
            f"This host ({socket.gethostname()}) cannot access {str(place)!r}, the run's folder for checkpoints.",
            "Mount it here, or submit with AGENTRL_CHECKPOINTS=s3://BUCKET/PREFIX.",
        )


@contextmanager
def _report_host_trouble(path: str) -> Iterator[None]:
    """Turns errors of this host into errors that do not blame the checkpoint."""
    try:
        yield
    except OSError as error:
        raise object_store.host_trouble(path, error) or error from error


def _upload(folder: Path, url: str) -> None:
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    try:
        for name in sorted(names, key=lambda name: (name == MANIFEST, name)):
            object_store.put(url, name, folder / name)
    except FileNotFoundError as error:
        said = f"Cannot write the checkpoint {url!r}: {error}."
        raise CheckpointError(said, "Check that the bucket exists, then type `agentrl resume`.") from error


def _fetch(url: str, copy: Path, sha256: str, part: Part) -> None:
    """Fetches the files that `copy` lacks or that are broken in it."""
    folder = object_store.mounted_folder(url)
    if folder is not None:
        _must_see(folder.parent)
    beside = copy.with_name(f"{copy.name}.fetch")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        _get(url, MANIFEST, beside)
        manifest = sealed_folder.read_manifest(beside, url)
        if _sha256(manifest) != sha256:
            raise sealed_folder.broken_error(url, f"its weights differ from the record ({sha256[:12]})")
        for name in _names(manifest, part):
            if sealed_folder.file_error(copy / name, manifest[name]):
                _get(url, name, beside)
                fault = sealed_folder.file_error(beside / name, manifest[name])
                if fault:
                    raise sealed_folder.broken_error(url, f"{name} {fault}")
        _move(beside, copy)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _get(url: str, name: str, folder: Path) -> None:
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        object_store.get(url, name, target)
    except FileNotFoundError as error:
        raise sealed_folder.broken_error(url, f"{name} is missing") from error


def _move(beside: Path, copy: Path) -> None:
    for file in [file for file in beside.rglob("*") if file.is_file()]:
        target = copy / file.relative_to(beside)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)


def _sha256(manifest: Mapping[str, FileRecord]) -> str:
    """sha256 of the weights; empty if there are none."""
    record = manifest.get(weights_name(manifest))
    return record.sha256 if record else ""


def _names(manifest: Mapping[str, FileRecord], part: Part) -> list[str]:
    """Names of the files to fetch, without those that only other programs read."""
    if part == "weights":
        return [weights_name(manifest)]
    return [name for name, record in manifest.items() if not record.shared and (part == "all" or name != OPTIMIZER)]


def _is_complete(copy: Path, part: Part) -> bool:
    """Whether all files are there by name (another process may have evicted them); marks the copy as just used."""
    try:
        manifest = sealed_folder.read_manifest(copy)
        os.utime(copy)
    except (BrokenCheckpoint, FileNotFoundError):
        return False
    return all((copy / name).is_file() for name in _names(manifest, part))


def _is_sound(copy: Path, sha256: str, part: Part) -> bool:
    """Whether all files are there, bit for bit."""
    try:
        manifest = sealed_folder.read_manifest(copy)
    except CheckpointError:  # not here yet, or cut off by a power failure
        return False
    if _sha256(manifest) != sha256:
        return False
    return not any(sealed_folder.file_error(copy / name, manifest[name]) for name in _names(manifest, part))


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: one thread of one process of this host at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _evict(folder: Path) -> None:
    used: dict[Path, int] = {}
    for entry in [entry for entry in folder.iterdir() if entry.is_dir() and entry.suffix not in _UNFINISHED_SUFFIXES]:
        with suppress(FileNotFoundError):  # another process removed it meanwhile
            used[entry] = entry.stat().st_mtime_ns
    for old in sorted(used, key=used.__getitem__)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
