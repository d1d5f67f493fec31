"""Write a finished run to each tracker with processes that are killed, read it back, and measure what a live run's cost.

`make trackers` writes build/trackers.json. It exits with 1 if a tracker lacks a step, or has one twice.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from shutil import copytree
from typing import Any

from agentrl.workers.page.demo import open_demo
from agentrl.workers.stack.report_processes import ReportProcess
from agentrl.workflow.settings import settings
from agentrl.workflow.store import run_reports
from agentrl.workflow.store.connect import Database
from agentrl.workflow.store.migrate import open_database
from agentrl.workflow.store.reads import curves
from agentrl.workflow.trackers import EVALUATION, ITERATION, iteration_metrics
from bench.trackers.read_back import READERS

RUN = "demo"
KILLS = 3
TICKS = os.sysconf("SC_CLK_TCK")


def main(chosen: list[str]) -> int:
    """Measure the chosen trackers; return the exit code."""
    found: dict[str, Any] = {"load": os.getloadavg()}
    with tempfile.TemporaryDirectory(prefix="agentrl-trackers-") as folder:
        os.environ |= {"AGENTRL_HOME": folder, "WANDB_MODE": "offline", "TRACKIO_DIR": f"{folder}/trackio"}
        copytree(open_demo().root, folder, dirs_exist_ok=True)
        settings.cache_clear()
        with closing(Database(settings().database)) as db:
            for name in chosen:
                found[name] = write_with_kills(db, name)
                print(name, json.dumps(found[name]), flush=True)
        found["cost"] = measure_live_run(chosen, Path(folder))
    Path("build").mkdir(exist_ok=True)
    Path("build/trackers.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found["cost"], indent=1))
    return int(any(found[name]["lacking"] or found[name]["doubled"] or found[name]["wrong"] for name in chosen))


def write_with_kills(db: Database, name: str) -> dict[str, Any]:
    """Write the demo's run to a tracker, with processes that are killed while they write; compare what it has with the rows."""
    run_reports.add_reports(db, RUN, [name], 1)
    seconds, kills = time.monotonic(), 0
    while (report := _report(db, name)).status != "done":
        process, before = ReportProcess(report), kills
        while process.process.poll() is None:
            if kills == before < KILLS and _report(db, name).iteration >= report.iteration + 1:
                process.kill()
                kills += 1
            time.sleep(0.002)
        process.reap(db)
        if kills == before and process.process.returncode:
            print(_report(db, name).error)
            break
    points = READERS[name](report.handle, settings().root)
    return {"kills": kills, "seconds": time.monotonic() - seconds, **compare(db, points)}


def compare(db: Database, points: Any) -> dict[str, Any]:
    """Count the numbers of the run that a tracker has, lacks, has twice, or has otherwise."""
    expected: dict[tuple[str, int], float] = {}
    for values in curves.load_curves(db, RUN).rows:
        row = dict(zip(curves.COLUMNS, values, strict=True))
        expected |= {(name, row["iteration"]): value for name, value in iteration_metrics(row).items()}
        expected[ITERATION, row["iteration"]] = row["iteration"]
    for row in run_reports.load_own_evals(db, 1, -1):
        expected |= {("eval/reward", row["version"]): row["mean_reward"], (EVALUATION, row["version"]): row["version"]}
    there = [(name, step) for name, series in points.items() for step, _ in series]
    values = {(name, step): value for name, series in points.items() for step, value in series}
    wrong = [key for key, value in expected.items() if key in values and abs(values[key] - value) > 1e-6 * max(1, abs(value))]
    return {
        "numbers": len(there),
        "lacking": len(expected.keys() - values.keys()),
        "doubled": len(there) - len(set(there)),
        "wrong": len(wrong),
    }


def measure_live_run(chosen: list[str], folder: Path) -> dict[str, Any]:
    """Train a tiny model with all trackers on; return processor seconds of each reporter per iteration, start-up apart."""
    agentrl = [sys.executable, "-m", "agentrl.cli"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    os.environ["AGENTRL_HOME"] = str(folder / "live")
    settings.cache_clear()
    subprocess.run([*agentrl, "sft", "--dataset", "arithmetic", "--model", "tiny", "--steps", "60"], check=True, **quiet)
    words = ["--dataset", "arithmetic", "--model", "tiny", "--epochs", "1", "--name", "live", "--report-to", ",".join(chosen)]
    began = time.monotonic()
    run = subprocess.Popen([*agentrl, "submit", *words, "--wait"], **quiet)
    first: dict[str, tuple[float, int]] = {}
    last: dict[str, tuple[float, int]] = {}
    with closing(open_database(settings().database)) as db:
        while run.poll() is None:
            for name, seconds in _reporter_seconds().items():
                if iteration := _report(db, name, "live").iteration:  # opened, with all that is imported at the first step
                    first.setdefault(name, (seconds, iteration))
                    last[name] = seconds, iteration
            time.sleep(0.25)
    subprocess.run([*agentrl, "down"], check=False, **quiet)
    each = {
        name: {
            "start_up_ms": round(1000 * first[name][0]),
            "iterations": last[name][1] - first[name][1],
            "ms_per_iteration": round(1000 * (last[name][0] - first[name][0]) / max(1, last[name][1] - first[name][1]), 1),
        }
        for name in first
    }
    total = round(sum(row["ms_per_iteration"] for row in each.values()), 1)
    return {"seconds": round(time.monotonic() - began, 1), "load": os.getloadavg(), "total_ms_per_iteration": total, **each}


def _reporter_seconds() -> dict[str, float]:
    """Tracker -> processor seconds of its reporter and of all that it started, by the kernel's count."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    reporters: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            words = (stat.parent / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid], seconds[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
        if b"agentrl.workers.stack.reporter" in words:
            reporters[pid] = words[words.index(b"agentrl.workers.stack.reporter") + 2].decode()
    totals = dict.fromkeys(reporters.values(), 0.0)
    for pid in parents:
        ancestor: int | None = pid
        while ancestor is not None and ancestor not in reporters:
            ancestor = parents.get(ancestor)
        if ancestor is not None:
            totals[reporters[ancestor]] += seconds[pid]
    return totals


def _report(db: Database, name: str, run: str = RUN) -> run_reports.TrackerReport:
    return next(each for each in run_reports.list_reports(db, run) if each.tracker == name)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1].split(",") if sys.argv[1:] else list(READERS)))
