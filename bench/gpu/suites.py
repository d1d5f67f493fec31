"""The tests of what computes, on the GPU in one precision: the part is the precision. One process per file.

What a device-side error leaves is no good to the tests after it, so no file shares a process with another; several run at
once where there are cores for it. Without a GPU only the first of the files is run, which is the CPU half.
"""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.gpu.kept import Part

FILES = {
    "policy": "models/test_policy.py",
    "trainer": "training/test_trainer.py",
    "engine": "inference/test_engine.py",
    "checkpoint": "checkpoints/test_sealed_folder.py",
    "sampling": "inference/test_sampling.py",
    "forward": "models/test_fast_forward.py",
    "logprobs": "models/test_logprobs.py",
}
"""By name, below tests/; the first alone without a GPU."""

AT_ONCE = 4
CORES_EACH = 2


def measure(part: Part) -> None:
    """A row for each file, as it ends, and one for each test that failed."""
    files = list(FILES) if part.gpu else list(FILES)[:1]
    at_once = max(1, min(AT_ONCE, (os.cpu_count() or 1) // CORES_EACH))
    with ThreadPoolExecutor(at_once) as pool:
        ran = [(file, pool.submit(_run, file, part)) for file in files]
        for file, future in ran:
            for name, row in _rows(file, *future.result()):
                part.add(name, row)


def _run(file: str, part: Part) -> tuple[list[dict[str, Any]], str]:
    """What pytest said of each test, and how it ended: empty where it was whole."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        device = "cuda" if part.gpu else "cpu"
        asked = {"TEST_DEVICE": device, "TEST_PRECISION": part.name, "TEST_ROWS": str(rows)}
        options = ["--noconftest", "-p", "bench.gpu.watch", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "-q"]
        settings = ["-o", "addopts=", "-o", "filterwarnings=default", "-o", "timeout=100", "--basetemp", f"{folder}/tmp"]
        command = [sys.executable, "-m", "pytest", *options, *settings, f"tests/{FILES[file]}"]
        said, ended = "", ""
        try:
            done = subprocess.run(
                command, env={**os.environ, **asked}, capture_output=True, text=True, check=False, timeout=max(1.0, part.left)
            )
            said = done.stdout + done.stderr
            ended = "" if done.returncode in (0, 1) else f"pytest ended with {done.returncode}: {said[-600:]}"
        except subprocess.TimeoutExpired:
            ended = "its time was over"
        return [json.loads(line) for line in rows.read_text().splitlines()], ended


def _rows(file: str, tests: list[dict[str, Any]], ended: str) -> list[tuple[str, dict[str, Any]]]:
    names = {"passed": "passed", "not_passed": "failed", "skipped": "skipped"}
    count = {name: sum(test["outcome"] == outcome for test in tests) for name, outcome in names.items()}
    row: dict[str, Any] = {**count, "seconds": round(sum(test["seconds"] for test in tests), 1)}
    if broken := ended or ("" if tests else "no test ran"):
        row["failed"] = broken
    wrong = [(test["test"], {"failed": test["why"]}) for test in tests if test["outcome"] == "failed"]
    return [(FILES[file], row), *wrong]
