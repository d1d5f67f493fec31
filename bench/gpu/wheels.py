"""Wheels for a machine without a network: fetched here within a limit of size, unpacked there where they are lacking.

`python -m bench.gpu.wheels --limit 55 --target 3.12` fetches; `make gpu-wheels` says so for you.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from bench.gpu.machine import installed, pinned

LIBRARY = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "pydantic-settings", "python-dotenv")
BOTH = ("typing-extensions", "jinja2", "markupsafe", "packaging")
TESTS = ("pytest", "pluggy", "iniconfig", "pytest-timeout", "hypothesis", "sortedcontainers")
WANTED = (*LIBRARY, *BOTH, *TESTS, "bitsandbytes", "pygments")
"""In the order of need; torch, transformers, peft and accelerate are the machine's own."""

PLATFORMS = (28, 27, 24, 17, 12, 5)
"""glibc 2.N: pip takes a wheel of exactly those that are named."""

MIB = 2**20


def fetch(folder: Path, limit: float, python: str) -> int:
    """Downloads what fits into so many MiB, and says what did not; the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    taken, lost = 0.0, []
    for name in WANTED:
        file = _downloaded(folder, f"{name}=={pinned()[name]}", python)
        size = file.stat().st_size / MIB if file else 0.0
        if file and taken + size <= limit:
            taken += size
            continue
        lost.append(f"{name} ({f'{size:.1f} MiB' if file else 'no such wheel'})")
        if file:
            file.unlink()
    count = len(list(folder.glob("*.whl")))
    print(f"{folder}: {count} wheels, {taken:.1f} of {limit:g} MiB, for Python {python} on x86-64 Linux.")
    print(f"Not in it: {', '.join(lost)}." if lost else "Nothing is left out.")
    print(f"Bring this folder there, with {folder}, and run in it: python3 -m bench.gpu --wheels {folder} --out OUT [PART ...]")
    return 0


def _downloaded(folder: Path, wanted: str, python: str) -> Path | None:
    """The wheel; None where there is none."""
    before = set(folder.glob("*.whl"))
    names = [f"manylinux_2_{number}_x86_64" for number in PLATFORMS] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    platforms = [word for name in names for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    asked = subprocess.run([*command, "--python-version", python, *platforms, "-d", str(folder), wanted], check=False)
    came = set(folder.glob("*.whl")) - before
    return came.pop() if came and not asked.returncode else None


def unpacked(folder: Path) -> Path | None:
    """Where those wheels lie unpacked that this machine lacks, or has in another version; None where it lacks nothing.

    Neither changes what is installed.
    """
    lacking = [file for file in sorted(folder.glob("*.whl")) if installed(file.name.split("-")[0]) != file.name.split("-")[1]]
    if not lacking:
        return None
    site = folder / "unpacked"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    for file in lacking:  # one by one: a wheel of another Python does not keep the others away
        if not any(site.glob(f"{'-'.join(file.name.split('-')[:2])}.dist-info")):
            subprocess.run([*command, "--upgrade", "--target", str(site), str(file)], check=False)
    return site


def main() -> int:
    """Parses the arguments of `make gpu-wheels`."""
    parser = argparse.ArgumentParser("python -m bench.gpu.wheels")
    parser.add_argument("--folder", default="build/gpu-wheels")
    parser.add_argument("--limit", type=float, default=55, help="MiB")
    parser.add_argument("--target", default="3.12", help="Python of the machine")
    given = parser.parse_args()
    return fetch(Path(given.folder), given.limit, given.target)


if __name__ == "__main__":
    sys.exit(main())
