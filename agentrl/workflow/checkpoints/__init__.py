"""Checkpoints, in a folder or at a URL that many hosts reach (`s3://bucket/prefix`, `file:///mnt/shared`).

A checkpoint is one version of a policy: `write` makes it whole or not at all, a row of the database publishes it
(`store/train_commits.py`), `read` opens it on any host. A path without `://` is a folder of this host and is used as it is.
`drop_optimizer` and `remove` delete what no row needs. Other packages import this module, and `checkpoint_gc`, which decides
what is not needed, and `epoch_links`, which names the checkpoints that ended an epoch.
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
    "check_place", "drop_optimizer", "find_fault", "hold_lock", "link_shared", "local_part", "read", "remove", "remove_rivals",
    "repair_folder", "sha256_file", "verify", "weights_of", "write", "write_error",
]  # fmt: skip

T = TypeVar("T")


def write(path: str, writer: Writer, then: str = "`agentrl resume`") -> str:
    """Make the checkpoint at `path`, a folder or a URL, from the files that `writer` writes into a folder.

    Args:
        then: the command to type after a full disk has room again.

    Returns:
        The sha256 of its weights, as in a `PolicyRef`.

    Raises:
        CheckpointError: the disk refused the files, the writer wrote no weights, or there is no such bucket. An older
            checkpoint in the folder stays.
        ConfigError: the store refused them.
        ServiceError: the store did not answer for long. Only a checkpoint without a manifest is lost.
    """
    folder = _folder_of(path)
    return object_store.write(path, writer) if folder is None else sealed_folder.write(folder, writer, then)


def read(path: str, sha256: str, part: Part, reader: Callable[[Path], T]) -> T:
    """Call the reader with the folder of `local_part`, and return its result.

    If the copy was damaged or evicted after its check, it is fetched once more.

    Raises:
        CheckpointError, ConfigError, ServiceError: see `local_part`. The reader's exceptions pass through.
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
    """Return the local folder with a part of the checkpoint at `path`, a folder or a URL. It is fetched if needed.

    Args:
        sha256: the hash of the weights in the policy's row.

    Raises:
        BrokenCheckpoint: the checkpoint is missing or incomplete, or its weights are not those of the row.
        ConfigError: this host cannot access the folder with the run's checkpoints.
        ServiceError: the store did not respond for a long time, or this host's disk is full.
    """
    return object_store.local_copy(path, sha256, part) if is_url(path) else _check_here(Path(path))


def find_fault(path: str, sha256: str, part: Part = "weights") -> str:
    """Return the fault in a part of a published checkpoint; empty if every byte is as it was written.

    For a URL the store itself is read: a sound copy on this host does not help other hosts.

    Raises:
        ConfigError: this host does not see the folder where the run keeps its checkpoints, or may not read it.
        ServiceError: the store did not answer for long, or this host has no space.
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
    """Remove the optimizer's state from a checkpoint that no update starts from any more. Its weights can still be sampled.

    Raises:
        ServiceError: the store did not respond for a long time.
    """
    (_own_folder(path) / OPTIMIZER).unlink(missing_ok=True)
    if is_url(path):
        object_store.remove(path, OPTIMIZER)


def remove(path: str) -> None:
    """Remove a checkpoint and this host's copy of it.

    Raises:
        ServiceError: the store did not respond for a long time.
    """
    shutil.rmtree(_own_folder(path), ignore_errors=True)
    if is_url(path):
        object_store.remove(path)


def remove_rivals(path: str) -> None:
    """Remove folders that killed trainers left on this host next to a published checkpoint."""
    sealed_folder.remove_rivals(_folder_of(path) or _own_folder(path))


def _folder_of(path: str) -> Path | None:
    """The folder that every host reads and writes; None for a URL that is no folder."""
    return object_store.mounted_folder(path) if is_url(path) else Path(path)


def _own_folder(path: str) -> Path:
    """The folder of this host: the checkpoint, or the copy of it."""
    return object_store.copy_of(path) if is_url(path) else Path(path)


def _check_here(folder: Path) -> Path:
    object_store.must_see(folder.parent)
    if not folder.is_dir():
        raise BrokenCheckpoint(f"The checkpoint {str(folder)!r} is missing.", "Restore it, then `agentrl resume`.")
    return folder
