"""Links to the checkpoints that ended an epoch: `runs/NAME/epoch_3`, in the folder of the checkpoints. After a crash, a link
may be missing or out of date, but no link stays broken.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.workflow.settings import is_url

NAME = re.compile(r"epoch_([1-9]\d{0,9})")
_CHECKPOINT = re.compile(r"v\d+\.[\w.-]+")


@dataclass(frozen=True, slots=True)
class EpochEnds:
    """The checkpoints in a run's folder that ended an epoch.

    Args:
        output_dir: the folder; or a URL, which has no links.
        key: the suffix of the names of the run's checkpoints.
        names: the name of the checkpoint by epoch; epochs count from 1.
        newest: whether the run is the youngest of those that have checkpoints in this folder. Only the youngest has links.
    """

    output_dir: str
    key: str
    names: Mapping[int, str]
    newest: bool = True


def epoch_number(name: str) -> int | None:
    """Return the epoch of a link's name; None for any other name."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else None


def link_epochs(ends: EpochEnds) -> None:
    """Update the run's links if it is the youngest run in the folder. Raise OSError if they cannot be written."""
    unlink_epochs(ends)
    if not ends.newest:
        return
    for entry in _links(ends):
        now = os.readlink(entry)
        if _CHECKPOINT.fullmatch(now) and not now.endswith(f".{ends.key}"):
            entry.unlink(missing_ok=True)
    for name, target in _wanted_links(ends).items():
        entry = Path(ends.output_dir) / name
        if not entry.is_symlink() and not entry.exists():
            beside = entry.with_name(f".{name}.{os.getpid()}")
            beside.unlink(missing_ok=True)
            beside.symlink_to(target)
            beside.replace(entry)


def unlink_epochs(ends: EpochEnds) -> None:
    """Remove broken links, and links to a wrong checkpoint of the run. Raise OSError if the links cannot be removed."""
    targets = _wanted_links(ends)
    for entry in _links(ends):
        now = os.readlink(entry)
        other = now.endswith(f".{ends.key}") and now != targets.get(entry.name)
        if other or not entry.exists():
            entry.unlink(missing_ok=True)


def _links(ends: EpochEnds) -> list[Path]:
    """Return all links to epochs in the folder, of whichever run. With a URL there are none."""
    entries = () if is_url(ends.output_dir) else Path(ends.output_dir).glob("epoch_*")
    return [entry for entry in entries if entry.is_symlink() and epoch_number(entry.name) is not None]


def _wanted_links(ends: EpochEnds) -> dict[str, str]:
    if is_url(ends.output_dir) or not ends.key:
        return {}
    there = Path(ends.output_dir)
    return {f"epoch_{epoch}": name for epoch, name in ends.names.items() if (there / name).is_dir()}
