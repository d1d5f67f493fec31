"""`python3 -m bench.gpu CALL|PART ... --out FOLDER`: run the parts one after another, each in a process of its own."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.gpu import machine, part, summary, wheels

MODEL = ("torch", "transformers", "peft", "accelerate", "pydantic", "pydantic-settings", "jinja2")
TESTS = (*MODEL, "pytest", "pytest-timeout", "hypothesis")
STACK = (*MODEL, "celery", "sqlalchemy", "alembic", "typer")


@dataclass(frozen=True)
class PartSpec:
    """A part of a call.

    Args:
        call: 1, 2 or 3.
        module: the module of this package that measures it.
        seconds: time that the parts before it leave for it; it may take what is left over too.
        needs: packages without which it is left out.
    """

    call: int
    module: str
    seconds: float
    needs: Sequence[str]


PARTS = {
    "memory": PartSpec(1, "memory", 150, MODEL),
    "decode": PartSpec(1, "decode", 110, MODEL),
    "logprobs": PartSpec(1, "logprobs", 90, MODEL),
    "faults": PartSpec(1, "faults", 60, MODEL),
    "device_lost": PartSpec(2, "device_lost", 90, STACK),
    "bfloat16": PartSpec(2, "suites", 170, TESTS),
    "float32": PartSpec(2, "suites", 170, TESTS),
    "learn_tiny": PartSpec(3, "learning", 140, STACK),
    "learn_smollm": PartSpec(3, "learning", 280, (*STACK, "gguf")),
}
"""Name -> part, those of a call in the order of their value."""

CALLS = sorted({str(spec.call) for spec in PARTS.values()})
CALL_SECONDS = 480.0
GRACE_SECONDS = 10.0
"""Time that a part gets after its own to write its last row."""


def main() -> int:
    """Parse the arguments, run the parts; return the exit code."""
    args = _parse_arguments()
    if args.inside:
        return _measure(args.names[0], args)
    deadline = time.monotonic() + args.seconds
    names = list(_select_parts(args.names))
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    path = [str(site) for site in wheels.unpack_all(Path(args.files))]
    facts = _ask_machine(path)
    part.write_json(folder / "machine.json", facts)
    print("\n".join(machine.lines(facts)), flush=True)
    ended = []
    for number, name in enumerate(names):
        # Without a GPU all parts are short, and none is cut for those that follow.
        following = names[number + 1 :] if facts["device"] == "cuda" else []
        reserved = sum(PARTS[later].seconds + GRACE_SECONDS for later in following)
        ended.append(_run(name, args, facts, path, deadline - time.monotonic() - GRACE_SECONDS, reserved))
        summary.write(folder)
    print(f"{folder / 'summary.md'} has the tables.")
    return 0 if all(ended) else 1


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python3 -m bench.gpu", description=f"Calls: {', '.join(CALLS)}. Parts: {', '.join(PARTS)}."
    )
    parser.add_argument("names", nargs="+", metavar="CALL|PART")
    parser.add_argument("--out", default="build/gpu", help="folder for PART.json and summary.md")
    parser.add_argument("--files", default="build", help="folder with gpu-1, gpu-2 and gpu-3 of `make gpu-wheels`")
    parser.add_argument("--seconds", type=float, default=CALL_SECONDS, help="time for all parts together")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _select_parts(names: Sequence[str]) -> Iterator[str]:
    for name in (name for word in names for name in word.split(",") if name):
        if name in CALLS:
            yield from (part for part, spec in PARTS.items() if str(spec.call) == name)
        elif name in PARTS:
            yield name
        else:
            sys.exit(f"Unknown part {name!r}. Calls: {', '.join(CALLS)}. Parts: {', '.join(PARTS)}.")


def _ask_machine(path: Sequence[str]) -> dict[str, Any]:
    """Return the machine's facts from a process that has ended, so that no GPU memory stays in use."""
    command = [sys.executable, "-m", "bench.gpu.machine"]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=_environment(path), check=True)
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def _environment(path: Sequence[str]) -> dict[str, str]:
    """Return the environment of a part: modules of this folder first, then of the unpacked wheels."""
    modules = os.pathsep.join(filter(None, [str(Path.cwd()), *path, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": modules, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def _run(name: str, args: argparse.Namespace, facts: dict[str, Any], path: Sequence[str], left: float, reserved: float) -> bool:
    """Run a part; return True if it came to its end and no row failed.

    Args:
        left: seconds of the call that are left.
        reserved: seconds of these that belong to the parts that follow.
    """
    file = Path(args.out) / f"{name}.json"
    file.unlink(missing_ok=True)  # of an earlier call
    missing = [package for package in PARTS[name].needs if not facts["versions"][package]["here"]]
    if missing:
        advice = "Copy the folders that `make gpu-wheels` made to this machine."
        return _leave_out(file, name, f"missing packages: {', '.join(missing)}. {advice}")
    seconds = max(left - reserved, min(left, PARTS[name].seconds))
    if seconds <= 0:
        return _leave_out(file, name, f"no time was left of {args.seconds:g} s")
    command = [sys.executable, "-m", "bench.gpu", name, "--inside"]
    command += ["--out", args.out, "--files", args.files, "--seconds", str(seconds)]
    # On few cores that other programs use too, threads that wait for each other take longer than one.
    threads = {"OMP_NUM_THREADS": "1", "AGENTRL_THREADS": "1"} if facts["device"] == "cpu" else {}
    process = subprocess.Popen(command, env=_environment(path) | threads, start_new_session=True)
    try:
        code = process.wait(seconds + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with suppress(ProcessLookupError):  # and all processes that it started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code is None or code not in (0, 1):
        return _leave_out(file, name, "its time was over" if code is None else f"its process ended with {code}")
    return code == 0


def _leave_out(file: Path, name: str, reason: str) -> bool:
    """Record why the part did not come to its end, beside the rows that it has measured; return False."""
    results = json.loads(file.read_text()) if file.exists() else {"part": name, "rows": [], "missing": []}
    part.write_json(file, {**results, "ended": reason})
    print(f"{name}: not complete: {reason}", flush=True)
    return False


def _measure(name: str, args: argparse.Namespace) -> int:
    facts = json.loads((Path(args.out) / "machine.json").read_text())
    results = part.Part(name, Path(args.out), facts, args.seconds, Path(args.files))
    import_module(f"bench.gpu.{PARTS[name].module}").measure(results)
    results.end()
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
