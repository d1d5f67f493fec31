"""A run on the embedded stack whose rollout worker loses its device in mid-turn: the run must end `done`.

After a device-side assert nothing can be computed in that process any more. The supervisor must start another one, which
samples what is missing. Without a GPU the same error is raised by every pass of that process.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from agentrl.workers.stack import broker
from agentrl.workflow.settings import Settings
from bench.gpu.lossy_engine import FILE, LOST
from bench.gpu.part import Part, Row
from bench.performance.models import saved

TASKS, GROUP_SIZE, TOKENS = 4, 4, 8
STOP_SECONDS = 20.0
QUERY = (
    "SELECT r.status, r.episodes_done AS done, r.seconds, SUM(g.failures) AS failures, SUM(g.losses) AS losses"
    " FROM v_runs r JOIN v_groups g ON g.run = r.run GROUP BY r.status, r.episodes_done, r.seconds"
)
"""`failures`: attempts that were spent, `losses`: groups whose worker was lost."""


def measure(part: Part) -> None:
    """Add a row for the run."""
    with tempfile.TemporaryDirectory(prefix="lost-") as folder:  # short: a socket lies in it
        if broker.find_server(Settings(home=Path(folder))) is None:
            part.skip("a run whose worker loses its device", "no Redis server is here, and without one no supervisor")
            return
        part.attempt("a run whose worker loses its device", lambda: _row(part, Path(folder)))


def _row(part: Part, folder: Path) -> Row:
    lost = folder / "lost"
    environment = {
        **os.environ,
        FILE: str(lost),
        "AGENTRL_HOME": str(folder / "home"),
        "AGENTRL_LEASE_SECONDS": "5",
        "AGENTRL_TICK_SECONDS": "0.5",
    }
    words = [
        "submit",
        "--dataset",
        "arithmetic",
        "--model",
        str(saved("tiny", folder)),
        "--name",
        "lost",
        "--epochs",
        "1",
        "--wait",
    ]
    words += ["--engine", "bench.gpu.lossy_engine:lossy", "--max-tasks", str(TASKS), "--tasks-per-iteration", str(TASKS)]
    words += ["--group-size", str(GROUP_SIZE), "--max-new-tokens", str(TOKENS), "--max-steps", "1"]
    try:
        _agentrl(words, environment, max(1.0, part.left - STOP_SECONDS))
        run = json.loads(_agentrl(["sql", "--json", QUERY], environment, STOP_SECONDS))[0]
    finally:
        _agentrl(["down"], environment, STOP_SECONDS)
    lines = lost.read_text().splitlines()
    row: Row = {**run, "processes": len(lines) - lines.count(LOST)}
    expected = row["status"] == "done" and row["done"] == TASKS * GROUP_SIZE and LOST in lines
    return row | ({} if expected else {"failed": "the run did not recover, or its worker lost nothing"})


def _agentrl(words: list[str], environment: dict[str, str], seconds: float) -> str:
    """Run a command to its end; return what it prints.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
        TimeoutExpired: it took longer.
    """
    command = [sys.executable, "-m", "agentrl.cli", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"agentrl {words[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
    return done.stdout
