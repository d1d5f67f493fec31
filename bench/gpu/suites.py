"""The tests of what computes, on the GPU in one precision: the name of the part. One process per file.

A device-side error spoils what runs after it in the same process, so no two files share one; several run at once if there are
cores for it. Without a GPU only the last and smallest file runs, to try what runs them.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.gpu.part import Part

FILES = (
    "models/test_policy.py",
    "training/test_trainer.py",
    "inference/test_engine.py",
    "inference/test_decode_graphs.py",
    "models/test_fast_forward.py",
    "models/test_logprobs.py",
    "inference/test_sampling.py",
    "checkpoints/test_sealed_folder.py",
)
"""Below tests/; the last alone without a GPU."""

MAX_PROCESSES = 4
CORES_EACH = 2


def measure(part: Part) -> None:
    """Add a row for each file, and one for each test that failed."""
    files = FILES if part.gpu else FILES[-1:]
    processes = max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) // CORES_EACH))
    with ThreadPoolExecutor(processes) as pool:
        results = [(file, pool.submit(_run, file, part)) for file in files]
        for file, future in results:
            for name, row in _rows(file, *future.result()):
                part.add(name, row)


def _run(file: str, part: Part) -> tuple[list[dict[str, Any]], str]:
    """Return what pytest reported of each test, and why it did not come to its end; empty if it did."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        device = "cuda" if part.gpu else "cpu"
        environment = {"TEST_DEVICE": device, "TEST_PRECISION": part.name, "TEST_ROWS": str(rows)}
        options = ["--noconftest", "-p", "bench.gpu.watch", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "-q"]
        settings = ["-o", "addopts=", "-o", "filterwarnings=default", "-o", "timeout=100", "--basetemp", f"{folder}/tmp"]
        command = [sys.executable, "-m", "pytest", *options, *settings, f"tests/{file}"]
        problem = ""
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                check=False,
                timeout=max(1.0, part.left),
            )
            if done.returncode not in (0, 1):
                problem = f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}"
        except subprocess.TimeoutExpired:
            problem = "its time was over"
        return [json.loads(line) for line in rows.read_text().splitlines()], problem


def _rows(file: str, tests: list[dict[str, Any]], problem: str) -> Iterator[tuple[str, dict[str, Any]]]:
    outcomes = {"passed": "passed", "not_passed": "failed", "skipped": "skipped"}
    row: dict[str, Any] = {name: sum(test["outcome"] == outcome for test in tests) for name, outcome in outcomes.items()}
    row["seconds"] = round(sum(test["seconds"] for test in tests), 1)
    if failed := problem or ("" if tests else "no test ran"):
        row["failed"] = failed
    yield file, row
    yield from ((test["test"], {"failed": test["why"]}) for test in tests if test["outcome"] == "failed")
