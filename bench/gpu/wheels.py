"""Unpack the wheels that were copied to a machine without a network, if it lacks them."""

import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from bench.gpu.machine import installed


def unpack_all(files: Path) -> Iterator[Path]:
    """Unpack the wheels of each `gpu-N` folder; return the folders to put on the module path."""
    for folder in sorted(files.glob("gpu-[0-9]")):
        if site := unpack(folder):
            yield site


def unpack(folder: Path) -> Path | None:
    """Unpack the wheels that this machine lacks, or has in another version; return where, or None if it lacks nothing.

    What is installed stays as it is. A wheel of another Python, or one that was unpacked before, is left alone.
    """
    ours = set(sys_tags())
    site = folder / "unpacked"
    for file in sorted(folder.glob("*.whl")):
        name, version, _, tags = parse_wheel_filename(file.name)
        done = site / f"{file.name}.unpacked"
        if installed(name) == str(version) or not tags & ours or done.exists():
            continue
        with zipfile.ZipFile(file) as wheel:
            for member in wheel.infolist():
                path = Path(wheel.extract(member, site))
                if member.external_attr >> 16 & stat.S_IXUSR and path.is_file():  # a server's binary
                    path.chmod(0o755)
        done.touch()
    return site if site.exists() else None
