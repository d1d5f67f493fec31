"""`make gpu-wheels`: the three folders that a machine with a GPU and no network needs, one for each call.

The first has the wheels of the library and its tests, the second those of the stack, and the last two the pieces of a model
file. Which wheels follows from what pyproject.toml declares, and from what those packages require in turn, as far as the
machine does not bring it itself.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from bench.gpu import model_file
from bench.gpu.machine import pinned

MIB = 2**20
FOLDER = "build"

MACHINE = frozenset({"torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "huggingface-hub", "numpy"})
"""Packages that the machine has in versions that fit each other; those that only they require come with them."""
UNUSED = frozenset({"datasets", "psycopg"})
"""Dependencies of ours that no part imports."""

TESTS = ("pydantic", "pydantic-settings", "jinja2", "pytest", "pytest-timeout", "hypothesis", "bitsandbytes")
"""What the parts of call 1, and the tests, need."""
MODEL_FILE = ("gguf",)

GLIBC = (28, 27, 24, 17, 12, 5)
"""Minor versions of glibc 2: pip takes wheels of exactly the platforms that are named."""


def main() -> None:
    """Parse the arguments, fill the folders, and print what to copy and what to run for each call."""
    parser = argparse.ArgumentParser("python -m bench.gpu.prepare")
    parser.add_argument("--target", default="3.12", help="version of the machine's Python")
    parser.add_argument("--limit", type=float, default=64, help="MiB of a call: its folder and the tracked files")
    parser.add_argument("--gguf", type=Path, help="model file that call 3 trains")
    args = parser.parse_args()
    prepare(Path(FOLDER), args.target, int(args.limit * MIB), args.gguf)


def prepare(files: Path, python: str, limit: int, gguf: Path | None) -> None:
    """Fill `gpu-1`, `gpu-2` and `gpu-3` below the folder.

    Raises:
        SystemExit: there is no such model file, or it does not fit.
    """
    if gguf is not None and not gguf.is_file():
        raise SystemExit(f"There is no file {gguf}. Name a GGUF file: make gpu-wheels gguf=FILE.")
    folders = [files / f"gpu-{call}" for call in (1, 2, 3)]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    room = limit - _tracked_bytes()
    tests = resolve(TESTS, python)
    stack = [name for name in resolve(stack_requirements(), python) if name not in tests]
    left_out = download(folders[0], tests, python, room) + download(folders[1], stack, python, room)
    if gguf is not None:
        half = (gguf.stat().st_size - _size(folders[1])) // 2  # so that both folders have the same size
        if half + _size(folders[1]) > room:
            fits = (2 * room - _size(folders[1])) / MIB
            size = f"{gguf} has {gguf.stat().st_size / MIB:.0f} MiB"
            raise SystemExit(f"{size}; at most {fits:.0f} MiB fit into gpu-2 and gpu-3: use a smaller file.")
        model_file.split(gguf, folders[1:], [half])
    print(f"For Python {python} on x86-64 Linux; the tracked files take {_tracked_bytes() / MIB:.1f} MiB of each call.")
    for call, folder in enumerate(folders, start=1):
        command = f"python{python} -m bench.gpu {call} --out OUT"
        print(f"Call {call}: copy {folder} ({_size(folder) / MIB:.1f} MiB), run: {command}")
    print(f"Left out: {', '.join(left_out)}." if left_out else "Nothing is left out.")
    if gguf is None:
        print("No model file: call 3 trains quickstart's model alone. Add one: make gpu-wheels gguf=FILE.")


def stack_requirements() -> list[str]:
    """Return the dependencies that pyproject.toml declares, and what reads a model file."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *MODEL_FILE]


def resolve(requirements: Sequence[str], python: str) -> list[str]:
    """Return the names of the packages to download, each before those that it requires.

    Args:
        requirements: as in pyproject.toml; their markers are evaluated for x86-64 Linux.
        python: version of the machine's Python: `3.12`.
    """
    extras: dict[str, set[str]] = {}
    waiting = [(Requirement(text), frozenset[str]()) for text in requirements]
    while waiting:
        wanted, by = waiting.pop(0)
        name = re.sub("[-_.]+", "-", wanted.name).lower()
        if name in MACHINE | UNUSED or not _applies(wanted, by, python):
            continue
        if name in extras and wanted.extras <= extras[name]:
            continue
        extras.setdefault(name, {""}).update(wanted.extras)
        waiting += [(Requirement(text), frozenset(extras[name])) for text in _requires(name)]
    return list(extras)


def _applies(wanted: Requirement, extras: frozenset[str], python: str) -> bool:
    target = {
        "python_version": python, "python_full_version": f"{python}.99", "implementation_name": "cpython",
        "platform_python_implementation": "CPython", "sys_platform": "linux", "platform_system": "Linux",
        "platform_machine": "x86_64", "os_name": "posix",
    }  # fmt: skip
    return wanted.marker is None or any(wanted.marker.evaluate({**target, "extra": extra}) for extra in extras or {""})


def _requires(name: str) -> Sequence[str]:
    try:
        return metadata.requires(name) or ()
    except metadata.PackageNotFoundError:  # of another Python only
        return ()


def download(folder: Path, names: Sequence[str], python: str, limit: int) -> list[str]:
    """Download the wheels into the folder while they fit; return a line for each one that is left out.

    Args:
        limit: bytes of all of them together.
    """
    left_out = []
    for name in names:
        file = _download_one(folder, f"{name}=={pinned().get(name, 'unknown')}", python)
        if file is None:
            left_out.append(f"{name} (no such wheel)")
        elif _size(folder) > limit:
            left_out.append(f"{name} ({file.stat().st_size / 2**20:.1f} MiB)")
            file.unlink()
    return left_out


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _download_one(folder: Path, requirement: str, python: str) -> Path | None:
    before = set(folder.glob("*.whl"))
    names = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    platforms = [word for name in names for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", python, *platforms, "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, check=False)
    new = set(folder.glob("*.whl")) - before
    return new.pop() if new and not done.returncode else None


def _tracked_bytes() -> int:
    listed = subprocess.run(["git", "ls-files", "-z"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return sum(Path(name).lstat().st_size for name in listed.split("\0") if name and Path(name).exists())


if __name__ == "__main__":
    main()
