"""Garbage collection of a run's checkpoint folder: it finds and removes folders and optimizer states that no database row
needs.

The disk is read first, then the rows. So, for each folder that was found, the rows already contain the claim of the trainer
that wrote the folder. A folder is removed if no row names it and its trainer can no longer publish it.

An adapter's row is marked as removed before its files are removed. If the process is killed in between, the next collection
removes the files.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.workflow import checkpoints
from agentrl.workflow.checkpoints import OPTIMIZER, object_store
from agentrl.workflow.runtime.faults import faultpoint
from agentrl.workflow.settings import is_url

Kind = Literal["leftovers", "optimizers", "adapters"]
KINDS: tuple[Kind, ...] = ("leftovers", "optimizers", "adapters")


@dataclass(frozen=True, slots=True)
class Folder:
    """One checkpoint folder of a run: its name, its size in bytes, and the bytes of its optimizer state."""

    name: str
    bytes: int
    optimizer: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What the rows of one run say about its checkpoint folders, by name.

    Args:
        referenced: checkpoints of the policies whose weights have not been removed by garbage collection.
        collected: checkpoints whose weights garbage collection has marked as removed; a folder may still exist.
        resumable: checkpoints that an update may start from, so their optimizer state is needed.
        claims: (iteration, fencing token) of the updates that a live trainer can still publish.
    """

    referenced: Collection[str]
    collected: Collection[str]
    resumable: Collection[str]
    claims: Collection[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Waste:
    """A folder that no row needs, or whose optimizer state no row needs. `kind` says which of the two; `bytes` is the size."""

    kind: Kind
    name: str
    bytes: int


def list_folders(output_dir: str, key: str) -> list[Folder]:
    """Return the checkpoints of the run with that key, and unfinished folders next to them; empty if this machine has no such
    folder. `output_dir` is a folder or a URL. Raise ServiceError if the store at the URL does not respond.
    """
    if not key:
        return []
    folders = object_store.sizes(output_dir) if is_url(output_dir) else _disk_sizes(Path(output_dir))
    return [_measure(name, files) for name, files in sorted(folders.items()) if _parse_name(name, key)]


def find_waste(folders: Iterable[Folder], needs: Needs, key: str) -> list[Waste]:
    """Return the folders, and the optimizer states in folders, that can be removed."""
    present = {folder.name for folder in folders}
    sorted_out = (_waste(folder, needs, key, present) for folder in folders)
    return [item for item in sorted_out if item]


def remove(output_dir: str, item: Waste) -> None:
    """Remove an item from the disk or the store if it exists. Raise ServiceError if the store does not respond."""
    path = f"{output_dir.rstrip('/')}/{item.name}"
    if item.kind == "optimizers":
        checkpoints.drop_optimizer(path)
    else:
        checkpoints.remove(path)
    faultpoint("waste.removed")


def _waste(folder: Folder, needs: Needs, key: str, present: Collection[str]) -> Waste | None:
    name, claim = _parse_name(folder.name, key) or ("", (0, 0))
    if folder.name in needs.collected:
        return Waste("adapters", folder.name, folder.bytes)
    if folder.name in needs.referenced:
        spare = folder.optimizer and folder.name not in needs.resumable
        return Waste("optimizers", folder.name, folder.optimizer) if spare else None
    only_copy = name in needs.referenced and name not in present  # a crash between the two renames of `sealed_folder.write`
    # A checkpoint that is made again (`.r`) is made under the token of a later iteration.
    live = claim in needs.claims or (".r" in name and claim[1] in {token for _, token in needs.claims})
    return None if only_copy or live else Waste("leftovers", folder.name, folder.bytes)


def _parse_name(name: str, key: str) -> tuple[str, tuple[int, int]] | None:
    match = re.fullmatch(rf"(v(\d{{5,}})\.[tr](\d+)\.{re.escape(key)})(\.tmp|\.old)?", name)
    return (match[1], (int(match[2]) - 1, int(match[3]))) if match else None


def _measure(name: str, files: Mapping[str, int]) -> Folder:
    return Folder(name, sum(files.values()), files.get(OPTIMIZER, 0))


def _disk_sizes(place: Path) -> dict[str, dict[str, int]]:
    if not place.is_dir():
        return {}
    return {
        folder.name: {file.relative_to(folder).as_posix(): _size(file) for file in folder.rglob("*") if file.is_file()}
        for folder in place.iterdir()
        if folder.is_dir()
    }


def _size(file: Path) -> int:
    """Return the number of bytes that removing the file would free: 0 if another checkpoint has a hard link to it."""
    try:
        stat = file.stat()
        return stat.st_size if stat.st_nlink == 1 else 0
    except FileNotFoundError:  # a trainer is working there
        return 0
