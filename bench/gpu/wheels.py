"""Unpack the wheels that were carried to a machine without a network, if it lacks them."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.gpu.machine import installed


def unpack_all(carried: Path) -> Iterator[Path]:
    """Unpack the wheels of each carried folder; return the folders to put on the module path."""
    for folder in sorted(carried.glob("gpu-[0-9]")):
        if site := unpack(folder):
            yield site


def unpack(folder: Path) -> Path | None:
    """Unpack the wheels that this machine lacks, or has in another version; return where, or None if it lacks nothing.

    What is installed stays as it is, and a wheel that was unpacked before is not unpacked again.
    """
    lacking = [file for file in sorted(folder.glob("*.whl")) if installed(file.name.split("-")[0]) != file.name.split("-")[1]]
    if not lacking:
        return None
    site = folder / "unpacked"
    new = [file for file in lacking if not any(site.glob(f"{'-'.join(file.name.split('-')[:2])}.dist-info"))]
    if new and _install(site, new):  # at once if all fit this Python, else those that do
        for file in new:
            _install(site, [file])
    return site


def _install(site: Path, files: Sequence[Path]) -> int:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    return subprocess.run([*command, "--upgrade", "--target", str(site), *map(str, files)], check=False).returncode
