"""What does `Trainer.fit` add to an iteration, beside `agentrl submit --wait`? Processor seconds of all, workers included.

Each side is a program of its own that trains the same run on an embedded stack of its own and ends it; the processor seconds
are those of all of its processes, also of those that left it. The sides take turns, 20 pairs of a run of one iteration, which
is what a program needs once, and of a longer one: what they differ by is the iterations'.
"""

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentrl.workflow.stats.evaluation import interval
from bench.performance.cases import Cases
from bench.performance.report import Comparison, Measured, Table, load

PAIRS = 20
ITERATIONS = 24
OPTIONS: Mapping[str, Any] = {
    "dataset.name": "arithmetic", "model.path": "tiny", "rollout.group_size": 4, "rollout.tasks_per_iteration": 8,
    "rollout.max_new_tokens": 24, "name": "counts",
}  # fmt: skip
MAX_ADDED = 0.05
"""The greatest share that `fit` may add."""

COUNTING = """
import ctypes, os, resource, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # whoever loses its parent is ours, and is counted
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
subprocess.run([sys.executable, "-m", "agentrl.cli", "down"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""
FITTED = """
import json, sys
import agentrl
agentrl.Trainer(**json.loads(sys.argv[1])).fit()
"""


def measure() -> Measured:
    """The same run, submitted and fitted."""
    cases, rows, comparisons = Cases(), list[list[object]](), list[Comparison]()
    with cases.case("fit beside submit"), TemporaryDirectory(prefix="arl-", dir="/tmp") as made:
        folder = Path(made)
        environment = {**os.environ, "AGENTRL_HOME": f"{folder}/home", "AGENTRL_THREADS": "1"}
        train = ["sft", "--dataset", "arithmetic", "--model", "tiny", "--steps", "50"]
        subprocess.run([sys.executable, "-m", "agentrl.cli", *train], env=environment, check=True, capture_output=True)
        found = [_pair(environment, folder) for _ in range(PAIRS + 1)][1:]  # the first only warms up
        submitted, fitted = ([pair[place] for pair in found] for place in (0, 1))
        mean, margin = interval([ours / other - 1 for ours, other in zip(fitted, submitted, strict=True)])
        medians = [statistics.median(seconds) for seconds in (submitted, fitted)]
        once = statistics.median(pair[2] for pair in found)
        rows.append(["an iteration", *medians, mean, mean + margin, "yes" if mean + margin <= MAX_ADDED else "no", once])
        name = "an iteration by fit, processor s of all processes"
        comparisons.append(Comparison(name, fitted, submitted, "s", "agentrl submit --wait", "less"))
    columns = ["what", "submit s", "fit s", "added", "95% at most", f"within {MAX_ADDED:.0%}", "added once s"]
    return Measured([Table("what fit adds", columns, [*rows, *cases.rows()], load())], comparisons, cases.unmeasured)


def _pair(environment: Mapping[str, str], folder: Path) -> tuple[float, float, float]:
    """Seconds of an iteration, submitted and fitted, and what `fit` adds once."""
    short, long = (_both(environment, folder, iterations) for iterations in (1, ITERATIONS))
    each = [(whole - once) / (ITERATIONS - 1) for whole, once in zip(long, short, strict=True)]
    return each[0], each[1], short[1] - short[0]


def _both(environment: Mapping[str, str], folder: Path, iterations: int) -> list[float]:
    options = {**OPTIONS, "iterations": iterations}
    file = folder / "run.yaml"
    file.write_text(json.dumps(options))
    typed = [sys.executable, "-m", "agentrl.cli", "submit", "--config", str(file), "--wait"]
    return [_seconds(command, environment, folder) for command in (typed, [sys.executable, "-c", FITTED, json.dumps(options)])]


def _seconds(command: list[str], environment: Mapping[str, str], folder: Path) -> float:
    """The processor seconds of the command, its stack and all else that it started; the run is forgotten then."""
    counting = [sys.executable, "-c", COUNTING, *command]
    done = subprocess.run(counting, env=dict(environment), cwd=folder, check=True, capture_output=True, text=True)
    for left in (folder / "home").glob("agentrl.db*"):
        left.unlink()
    found = float(done.stdout)
    assert math.isfinite(found)
    return found
