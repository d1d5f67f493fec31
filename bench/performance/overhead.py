"""Of a run's time and of its processor time, how much is not the model's? From the first claim to the last commit.

One process samples and trains, as the embedded stack has it; the tools, the control loop and Redis are processes of their own,
the database is a SQLite file. A short run goes before the one that counts, so that models are loaded. torch has one thread, so
that the processor time of a call of the model is that of its thread.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.performance.cases import Cases
from bench.performance.fleet import Fleet, fleet, seconds
from bench.performance.models import saved
from bench.performance.report import Measured, Table, load
from tests.support.small_models import tiny_calling

ITERATIONS = 10
COLUMNS = (
    "run",
    "iterations",
    "s per iteration",
    "model s",
    "rollout s",
    "update s",
    "overhead",
    "to claim s",
    "processor s",
    "the model's share",
)
"""`overhead` is 1 - model s / s per iteration, waiting counted; `to claim s` is from an update's commit to the next first
claim; `processor s` is that of all worker processes in an iteration.
"""

TRAINED: dict[str, Any] = {
    "hooks": ["tests.support.parity_hook:Lucky"],
    "epochs": 1,
    "rollout.tasks_per_iteration": 16,
    "rollout.group_size": 8,
}
CALLING = TRAINED | {"dataset.name": "arithmetic", "rollout.max_steps": 2, "rollout.max_new_tokens": 16}
PLAIN = TRAINED | {"dataset.name": "arithmetic", "rollout.max_steps": 1, "rollout.max_new_tokens": 64}


def measure() -> Measured:
    """The tiny model with a tool call in each episode, the bench model without, training an adapter or all of it."""
    with TemporaryDirectory() as folder:
        tiny, bench = tiny_calling(Path(folder) / "tiny", layers=4, width=128), saved("bench", Path(folder))
        runs = {
            "tiny, a call in each episode": CALLING | {"model.path": str(tiny)},
            "bench, LoRA": PLAIN | {"model.path": str(bench), "model.lora_r": 8},
            "bench, all weights": PLAIN | {"model.path": str(bench), "rollout.tasks_per_iteration": 8},
        }
        rows, cases = [], Cases()
        for name, options in runs.items():
            with cases.case(f"overhead, {name}"):
                rows.append(_row(name, options))
    return Measured([Table("overhead of a run", COLUMNS, [*rows, *cases.rows()], load())], unmeasured=cases.unmeasured)


def _row(name: str, options: Mapping[str, Any]) -> list[object]:
    with fleet(AGENTRL_THREADS="1") as crew:
        return [name, *_figures(crew, *played(crew, options, ITERATIONS))]


def played(crew: Fleet, options: Mapping[str, Any], iterations: int) -> tuple[Mapping[str, Any], float]:
    """Plays a short run and the one that counts; what the clock says, and the processor seconds of the one that counts."""
    file = crew.clocked("rollout,train")
    for role in ("tools", "control"):
        crew.worker(role)
    spent = 0.0
    for name, count in (("warm", 1), ("counts", iterations)):
        tasks, before = int(options["rollout.tasks_per_iteration"]) * count, crew.processor_seconds()
        crew.submit(name, {**options, "dataset.max_tasks": tasks})
        crew.wait_for(name)
        spent = crew.processor_seconds() - before
    crew.end()
    found: Mapping[str, Any] = json.loads(file.read_text())
    return found, spent


def _figures(crew: Fleet, clock: Mapping[str, Any], spent: float) -> list[object]:
    rows = crew.rows(
        "SELECT i.number, min(g.started_at), i.finished_at, i.rolled_out_at, i.update_seconds FROM iterations i"
        " JOIN groups g ON g.iteration_id = i.id JOIN runs r ON r.id = i.run_id WHERE r.name = 'counts'"
        " GROUP BY i.id ORDER BY i.number"
    )
    claims, commits, rolled = ([seconds(row[column]) for row in rows] for column in (1, 2, 3))
    first, last, n = claims[0], commits[-1], len(rows)
    model = sum(min(end, last) - max(start, first) for start, end in clock["intervals"] if end > first and start < last)
    computed = sum(taken for began, taken in clock["computed"] if first <= began < last)
    rollouts = sum(end - start for start, end in zip(claims, rolled, strict=True))
    gaps = sum(claim - commit for commit, claim in zip(commits, claims[1:], strict=False))
    updates = sum(row[4] for row in rows)
    whole = last - first
    per_iteration = (whole / n, model / n, rollouts / n, updates / n)
    return [n, *per_iteration, 1 - model / whole, gaps / (n - 1), spent / n, computed / spent]
