"""`python3 -m bench.gpu [PART ...] --out FOLDER`: runs the parts, one after another, each in a process of its own."""

import argparse
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.gpu import kept, machine, summary, wheels

PARTS = {"float32": "suites", "bfloat16": "suites", "logprobs": "logprobs", "memory": "memory", "decode": "decode"}
"""Part -> its module here."""

SECONDS = 240.0
GRACE = 10.0
"""Seconds after its time that a part may take to write down what it has."""


def main() -> int:
    """Parses the arguments; the exit code."""
    given = _arguments()
    parts = [part for word in given.parts for part in word.split(",") if part] or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        sys.exit(f"There is no part {unknown[0]!r}; there are: {', '.join(PARTS)}.")
    folder = Path(given.out)
    if given.inside:
        return _inside(parts[0], folder, given.seconds)
    folder.mkdir(parents=True, exist_ok=True)
    site = wheels.unpacked(Path(given.wheels))
    found = _machine(site)
    print("\n".join(machine.lines(found)), flush=True)
    if found["lacking"]:
        print(f"Lacking: {', '.join(found['lacking'])}. Carry them as wheels: make gpu-wheels, then --wheels FOLDER.")
        return 1
    held = [_run(part, folder, found, given, site) for part in parts]
    print(f"{summary.write(folder)} has the tables.")
    return 0 if all(held) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python3 -m bench.gpu", description=f"Parts: {', '.join(PARTS)}; all, where none is named."
    )
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--out", default="build/gpu", help="where PART.json and summary.md go")
    parser.add_argument("--wheels", default="build/gpu-wheels", help="what `make gpu-wheels` made")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a part may take")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _machine(site: Path | None) -> dict[str, Any]:
    asked = subprocess.run([sys.executable, "-m", "bench.gpu.machine"], stdout=subprocess.PIPE, env=_around(site), check=True)
    found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return found


def _around(site: Path | None) -> dict[str, str]:
    """The environment of a part: this folder and what was unpacked come first."""
    path = [str(Path.cwd()), *([str(site)] if site else []), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def _run(part: str, folder: Path, found: dict[str, Any], given: argparse.Namespace, site: Path | None) -> bool:
    """Whether the part came to its end with nothing that failed."""
    kept.keep(folder / "machine.json", found)
    command = [sys.executable, "-m", "bench.gpu", part, "--inside", "--out", str(folder), "--seconds", str(given.seconds)]
    # On few cores that others use too, threads that wait for each other take longer than one.
    alone = {"OMP_NUM_THREADS": "1"} if found["device"] == "cpu" else {}
    process = subprocess.Popen(command, env=_around(site) | alone, start_new_session=True)
    try:
        ended = process.wait(given.seconds + GRACE)
    except subprocess.TimeoutExpired:
        ended = None
    finally:
        with suppress(ProcessLookupError):  # with all that it started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if ended is None or ended not in (0, 1):
        _broke_off(folder / f"{part}.json", part, "its time was over" if ended is None else f"it ended with {ended}")
    return ended == 0


def _broke_off(file: Path, part: str, why: str) -> None:
    known = json.loads(file.read_text()) if file.exists() else {"part": part, "rows": [], "missing": []}
    kept.keep(file, {**known, "ended": why})
    print(f"{part}: broke off: {why}", flush=True)


def _inside(name: str, folder: Path, seconds: float) -> int:
    part = kept.Part(name, folder, json.loads((folder / "machine.json").read_text()), seconds)
    import_module(f"bench.gpu.{PARTS[name]}").measure(part)
    part.end()
    return int(part.failed)


if __name__ == "__main__":
    sys.exit(main())
