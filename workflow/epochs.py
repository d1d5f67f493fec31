"""Links to the checkpoints that ended an epoch: `runs/NAME/epoch_3`, beside the checkpoints themselves.

They are made anew from the rows: when such a checkpoint is published, when one is asked for, and before `agentrl gc` removes
what one leads to. So a death in between leaves one out, or an older one, and none that leads nowhere for good.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workflow.settings import is_url

NAME = re.compile(r"epoch_([1-9]\d{0,9})")


@dataclass(frozen=True, slots=True)
class Ends:
    """The checkpoints in a run's folder (or URL, which has no links) that ended an epoch.

    Args:
        key: what the names of the run's checkpoints end with.
        names: of the checkpoints, by the epoch's number from 1.
    """

    output_dir: str
    key: str
    names: Mapping[int, str]


def number_of(name: str) -> int | None:
    """The epoch that a link of that name stands for; None of any other name."""
    found = NAME.fullmatch(name)
    return int(found[1]) if found else None


def link(ends: Ends) -> None:
    """Makes the links in the run's folder what they should be; leaves those of another run, and all else, as they are.

    Raises:
        OSError: the folder takes none.
    """
    place = Path(ends.output_dir)
    if is_url(ends.output_dir) or not ends.key or not place.is_dir():
        return
    there = {name: place / name for name in ends.names.values() if (place / name).is_dir()}
    wanted = {f"epoch_{epoch}": name for epoch, name in ends.names.items() if name in there}
    for entry in place.glob("epoch_*"):
        stale = entry.is_symlink() and number_of(entry.name) is not None and entry.name not in wanted
        if stale and (os.readlink(entry).endswith(f".{ends.key}") or not entry.exists()):
            entry.unlink(missing_ok=True)
    for name, target in wanted.items():
        _point(place / name, target, ends.key)


def _point(entry: Path, target: str, key: str) -> None:
    if entry.is_symlink():
        now = os.readlink(entry)
        if now == target or (entry.exists() and not now.endswith(f".{key}")):
            return
    elif entry.exists():  # somebody's own
        return
    beside = entry.with_name(f".{entry.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    beside.replace(entry)
