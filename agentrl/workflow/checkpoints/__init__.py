"""Checkpoints, in a folder or at a URL that many hosts can reach (`s3://bucket/prefix`, `file:///mnt/shared`).

A checkpoint is one version of a policy. `write` makes a complete checkpoint or none, and a database row publishes the
checkpoint (`store/train_commits.py`). `read` opens a checkpoint on any host. A path without `://` is a folder of this host and
is used as it is. `drop_optimizer` and `remove` delete parts that no row needs.

Other packages import only this module, `checkpoint_gc` (it decides which checkpoints are no longer needed) and `epoch_links`
(it names the checkpoints that ended an epoch).
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from agentrl.workflow.checkpoints import object_store, sealed_folder
from agentrl.workflow.checkpoints.object_store import check_place, hold_lock
from agentrl.workflow.checkpoints.sealed_folder import (
    ADAPTER,
    MANIFEST,
    MAX_NAME,
    MODEL,
    OPTIMIZER,
    RECORD,
    STATE,
    WEIGHTS,
    Part,
    Writer,
    broken_error,
    link_shared,
    repair_folder,
    sha256_file,
    verify,
    weights_of,
    write_error,
)
from agentrl.workflow.errors import BrokenCheckpoint, CheckpointError
from agentrl.workflow.settings import is_url

__all__ = [
    "ADAPTER", "MANIFEST", "MAX_NAME", "MODEL", "OPTIMIZER", "RECORD", "STATE", "WEIGHTS", "Part", "Writer", "broken_error",
    "check_place", "checked_part", "drop_optimizer", "find_fault", "hold_lock", "link_shared", "local_part", "read", "remove",
    "remove_rivals", "repair_folder", "sha256_file", "verify", "weights_of", "write", "write_error",
]  # fmt: skip

T = TypeVar("T")


def write(path: str, writer: Writer, then: str = "`agentrl resume`") -> str:
    """Make the checkpoint at `path`, a folder or a URL, from the files that `writer` writes into a folder. Raise
    CheckpointError if the disk refused the files, the writer wrote no weights, or the bucket does not exist. An existing
    checkpoint in the folder is unchanged. Raise ConfigError if the store refused the files. Raise ServiceError if the store did
    not respond for a long time. An exception leaves at most an unpublished checkpoint without a manifest at the URL.

    Args:
        then: the command to type after the disk has space again, for the error message.

    Returns:
        The sha256 of the checkpoint's weights, as in a `PolicyRef`.
    """
    folder = _folder_of(path)
    return object_store.write(path, writer) if folder is None else sealed_folder.write(folder, writer, then)


def read(path: str, sha256: str, part: Part, reader: Callable[[Path], T]) -> T:
    """Call the reader with the folder that `local_part` returns, and return the reader's result.

    If the checkpoint is at a URL and the reader finds the local copy damaged or missing, the copy is fetched once more.

    Raises:
        CheckpointError, ConfigError, ServiceError: see `local_part`. The reader's exceptions are not changed.
    """
    folder = local_part(path, sha256, part)
    try:
        return reader(folder)
    except CheckpointError:
        if not is_url(path):
            raise
    object_store.forget_copy(path, part)
    return reader(local_part(path, sha256, part))


def local_part(path: str, sha256: str, part: Part = "weights") -> Path:
    """Return a local folder with a part of the checkpoint at `path`, a folder or a URL. Fetch the part if needed. `sha256` is
    the hash of the weights in the policy's row. Raise BrokenCheckpoint if the checkpoint is missing or incomplete, or its
    weights have another hash. Raise ConfigError if this host cannot access the folder with the run's checkpoints. Raise
    ServiceError if the store did not respond for a long time, or this host's disk is full.
    """
    return object_store.local_copy(path, sha256, part) if is_url(path) else _check_here(Path(path))


def checked_part(path: str, sha256: str, part: Part) -> Path:
    """Return the folder that `local_part` returns, after a comparison of every byte of the part with the manifest. Raises what
    `local_part` raises.
    """
    if is_url(path):
        object_store.forget_copy(path, part)  # so that this call reads the copy
        return object_store.local_copy(path, sha256, part)
    folder = _check_here(Path(path))
    verify(folder, without=(OPTIMIZER,) if part == "start" else (), shared=False)
    return folder


def find_fault(path: str, sha256: str, part: Part = "weights") -> str:
    """Return the fault in a part of a published checkpoint; empty if every byte is as it was written.

    For a URL, the files in the store are read: a correct copy on this host does not help other hosts. Raise ConfigError if this
    host cannot see or read the folder with the run's checkpoints. Raise ServiceError if the store did not respond for a long
    time, or this host's disk is full.
    """
    try:
        with object_store.report_host_trouble(path):
            if is_url(path):
                object_store.verify(path, sha256, part)
            else:
                sealed_folder.verify_part(_check_here(Path(path)), sha256, part)
    except BrokenCheckpoint as error:
        return error.message.rstrip(".")
    return ""


def drop_optimizer(path: str) -> None:
    """Remove the optimizer's state from a checkpoint; it can still be sampled. Raise ServiceError if the store is away."""
    (_own_folder(path) / OPTIMIZER).unlink(missing_ok=True)
    if is_url(path):
        object_store.remove(path, OPTIMIZER)


def remove(path: str) -> None:
    """Remove a checkpoint and this host's copy of it. Raise ServiceError if the store did not respond for a long time."""
    shutil.rmtree(_own_folder(path), ignore_errors=True)
    if is_url(path):
        object_store.remove(path)


def remove_rivals(path: str) -> None:
    """Remove folders that killed trainers left on this host next to a published checkpoint."""
    sealed_folder.remove_rivals(_folder_of(path) or _own_folder(path))


def _folder_of(path: str) -> Path | None:
    """Return the folder at a path or a `file://` URL; None for any other URL."""
    return object_store.mounted_folder(path) if is_url(path) else Path(path)


def _own_folder(path: str) -> Path:
    """Return the folder on this host: the checkpoint itself, or the local copy of a checkpoint at a URL."""
    return object_store.copy_of(path) if is_url(path) else Path(path)


def _check_here(folder: Path) -> Path:
    object_store.must_see(folder.parent)
    if not folder.is_dir():
        raise BrokenCheckpoint(f"The checkpoint {str(folder)!r} is missing.", "Restore it, then `agentrl resume`.")
    return folder
