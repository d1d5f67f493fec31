"""`python -m bench.faults.disturbed`: the same run twice, left alone and struck again and again (`make disturbed`).

Four modes: `exact` or `float32` numerics, on the embedded stack over SQLite or on separate workers over a Postgres and a Redis.
Every 2 to 10 s a worker that has been ready for 5 s gets a kill -9; once Redis does (the one beside Postgres forgets all it
knew), and once Postgres is restarted without notice, or the embedded stack's supervisor killed. Leases last 2 s. Then the two
records are compared: the token ids of every episode, the weights of every policy version, what was trained on; under exact
numerics all of it must be the same.

What was redone is counted from the fault points that all processes pass: a step for which sampling began and that was not
committed was sampled again; so were calls run and updates made more often than there are any.

Writes `build/disturbed.json`, one entry per mode, and prints a table. Exits with 1 if anything is not as it must be.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.faults import killer, places, record
from bench.faults.experiment import forked
from bench.faults.loop import Laboratory, laboratory

Row = dict[str, Any]
MODES = tuple(f"{numerics}-{place}" for numerics in ("exact", "float32") for place in places.PLACES)
KILLS = 30
ITERATIONS = {"sqlite": 110, "postgres": 190}
"""Enough for that: workers that are forked are back at once, a whole process takes some seconds."""

LIMIT_SECONDS = 900.0
PARTS = ("episodes", "consumed", "policies")
BEGUN = {"steps": "generate.sent", "calls": "run_tool.before", "updates": "update.before"}
"""What is redone -> the point at which it begins."""


def main() -> int:
    """Plays the modes; returns the exit code."""
    asked = _asked()
    file: Path = asked.json
    rows: dict[str, Row] = json.loads(file.read_text()) if file.exists() else {}
    with laboratory() as lab:
        for mode in asked.mode:
            rows[mode] = compared(lab, mode, asked.iterations or ITERATIONS[mode.partition("-")[2]], asked.seed)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(rows, indent=1))
            print("\n".join(rows[mode]["violated"]), flush=True)
    print(table(rows))
    return int(any(rows[mode]["violated"] for mode in asked.mode))


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.faults.disturbed", description=__doc__)
    parser.add_argument("--mode", action="append", choices=MODES, help="only this; may be repeated")
    parser.add_argument("--iterations", type=int, help="of the run, which must be long enough for 30 kills")
    parser.add_argument("--seed", type=int, default=0, help="of the killer")
    parser.add_argument("--json", type=Path, default=Path("build/disturbed.json"))
    asked = parser.parse_args()
    asked.mode = asked.mode or list(MODES)
    return asked


def compared(lab: Laboratory, mode: str, iterations: int, seed: int) -> Row:
    """The run of a mode, left alone and struck, and what came of it."""
    load = os.getloadavg()[1]
    calm = played(lab, mode, iterations, None)
    struck = played(lab, mode, iterations, seed)
    different = {part: _different(calm["record"][part], struck["record"][part]) for part in PARTS}
    violated = [f"undisturbed: {line}" for line in calm["record"]["wrong"]] + struck["record"]["wrong"]
    if mode.startswith("exact"):
        violated += [f"{part} {name} differs" for part, names in different.items() for name in names]
    kills = sum(number for victim, number in struck["blows"].items() if victim in (*places.ROLES, "rollout,train"))
    if kills < KILLS:
        violated.append(f"{kills} kills are too few: ask for more iterations")
    return {
        "iterations": iterations,
        "kills": kills,
        "blows": struck["blows"],
        "seconds": {"calm": calm["seconds"], "struck": struck["seconds"]},
        "load": [round(load, 1), round(os.getloadavg()[1], 1)],
        "redone": struck["redone"],
        "redone_undisturbed": calm["redone"],
        "unknown_calls": struck["record"]["unknown"],
        "episodes": len(calm["record"]["episodes"]),
        "versions": len(calm["record"]["policies"]),
        "different": {part: len(names) for part, names in different.items()},
        "first_different": min((int(name.split()[0]) for name in different["episodes"]), default=None),
        "recovery": struck["recovery"],
        "violated": violated,
    }


def _different(left: Row, right: Row) -> list[str]:
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


def played(lab: Laboratory, mode: str, iterations: int, seed: int | None) -> Row:
    """One run, in a process and a folder of its own; `seed` is the killer's, None leaves the run alone."""
    folder = lab.folder / f"{mode}-{'calm' if seed is None else seed}"
    folder.mkdir()
    print(f"== {folder.name}", flush=True)
    answer = folder / "answer.json"
    pid = forked(partial(_play, lab.folder / "model", folder, mode, iterations, seed, answer), folder / "log")
    os.waitpid(pid, 0)
    said = (folder / "log").read_text()
    print(said, flush=True)
    assert answer.exists(), f"{mode} did not come to its end; see {folder}"
    found: Row = json.loads(answer.read_text())
    shutil.rmtree(folder)
    return found


def _play(model: Path, folder: Path, mode: str, iterations: int, seed: int | None, answer: Path) -> None:
    from agentrl.workflow.settings import settings
    from agentrl.workflow.store.migrate import open_database
    from bench.faults.long import config

    numerics, _, name = mode.partition("-")
    places.prepare(folder, folder.parent / "migrated.db")
    place = places.PLACES[name](folder)
    try:
        started = time.monotonic()
        place.begin(config(model, iterations, "exact" if numerics == "exact" else "fast"))
        database = open_database(settings().database)
        rng = None if seed is None else random.Random(seed)
        blows = killer.follow(place, database, LIMIT_SECONDS, rng)
        seconds = time.monotonic() - started
        recovered, calls = _summary(killer.recoveries(blows, database)), killer.calls_run(database)
        if name == "postgres":
            places.copy_rows(database, folder / "home" / "agentrl.db")
        database.close()
    finally:
        place.end()
    kept = record.read(folder / "home")
    made = {"steps": sum(steps for *_, steps, _ in kept["episodes"].values()), "updates": iterations, "calls": calls}
    hits = {name: (folder / "hits" / point).stat().st_size for name, point in BEGUN.items()}
    answer.write_text(
        json.dumps(
            {
                "record": kept,
                "seconds": round(seconds, 1),
                "blows": Counter(blow.victim for blow in blows),
                "recovery": recovered,
                "redone": {name: hits[name] - made[name] for name in BEGUN},
            }
        )
    )


def _summary(recovered: Iterable[tuple[str, float, float]]) -> Row:
    """Victim (and `all`) -> median and maximum of the seconds to any progress, and to the victim's own."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for victim, progress, own in recovered:
        for key in (victim, "all"):
            rows.setdefault(key, []).append((progress, own))
    return {
        victim: {
            what: {"median": round(median(column), 2), "max": round(max(column), 2)}
            for what, column in zip(("any", "own"), zip(*pairs, strict=True), strict=True)
        }
        for victim, pairs in rows.items()
    }


def table(rows: dict[str, Row]) -> str:
    """One line per mode."""
    lines = [
        "| mode | kills | other blows | seconds: calm | struck | steps redone | episodes that differ | weights that differ"
        " | recovery: median s | max s | violated |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, row in rows.items():
        different, seconds = row["different"], row["seconds"]
        others = " ".join(victim for victim in row["blows"] if victim in ("redis", "postgres", "supervisor"))
        recovery = row["recovery"].get("all", {"own": {"median": "", "max": ""}})["own"]
        lines.append(
            f"| {mode} | {row['kills']} | {others} | {seconds['calm']} | {seconds['struck']} | {row['redone']['steps']}"
            f" | {different['episodes']} of {row['episodes']} | {different['policies']} of {row['versions']}"
            f" | {recovery['median']} | {recovery['max']} | {len(row['violated'])} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
