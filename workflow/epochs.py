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
    unlink(ends)
    for name, target in _wanted(ends).items():
        entry = Path(ends.output_dir) / name
        if not entry.is_symlink() and not entry.exists():
            beside = entry.with_name(f".{name}.{os.getpid()}")
            beside.unlink(missing_ok=True)
            beside.symlink_to(target)
            beside.replace(entry)


def unlink(ends: Ends) -> None:
    """Removes the links that lead nowhere, or to another checkpoint of the run than they should.

    Raises:
        OSError: the folder does not let go of them.
    """
    wanted = _wanted(ends)
    for entry in () if is_url(ends.output_dir) else Path(ends.output_dir).glob("epoch_*"):
        if not entry.is_symlink() or number_of(entry.name) is None:
            continue
        now = os.readlink(entry)
        other = now.endswith(f".{ends.key}") and now != wanted.get(entry.name)
        if other or not entry.exists():
            entry.unlink(missing_ok=True)


def _wanted(ends: Ends) -> dict[str, str]:
    """Where each link should lead; only to what is there."""
    if is_url(ends.output_dir) or not ends.key:
        return {}
    there = Path(ends.output_dir)
    return {f"epoch_{epoch}": name for epoch, name in ends.names.items() if (there / name).is_dir()}
