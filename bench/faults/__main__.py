"""`python -m bench.faults`: every fault at every hit of every point (`make faults`), or with `--sample` what CI has time for.

Writes `build/faults.json`, a list of {fault, action, hit, hits, prelude, env, outcome, seconds, violated}, and prints a table.
Exits with 1 if an invariant was violated.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

from bench.faults.loop import (
    ACTIONS,
    Case,
    Result,
    every,
    in_box,
    laboratory,
    of_agents,
    of_tools,
    of_trainer,
    play,
    recordings,
    sample,
    with_agents,
    with_critic,
)

Row = dict[str, Any]
WORLDS = {"world": "", "boxed": ", in the sandbox", "critic": ", PPO", "agent": ", with agents"}


def main() -> int:
    """Plays the loop."""
    asked = _asked()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    rows: list[Row] = []

    def told(case: Case, result: Result) -> None:
        rows.append(_row(case, result))
        end = f"{result.outcome:10} {result.seconds:5.1f} s  {', '.join(result.deaths)}"
        print(f"{case.env:6} {case.fault:60} {end}", flush=True)
        for line in result.violated:
            print(f"    {line}", flush=True)

    with laboratory() as bare:
        lab, recorded = recordings(bare)
        boxed = in_box(lab, recorded[""].record) if "boxed" in asked.world else None
        critic = with_critic(lab) if "critic" in asked.world else None
        agents = with_agents(lab) if "agent" in asked.world else {}
        firsts = every(recorded, asked.action) if "world" in asked.world else []
        firsts += of_tools(boxed, asked.action) if boxed else []
        firsts += of_trainer(critic, asked.action) if critic else []
        firsts += of_agents(agents, set[str]().union(*(one.hits for one in recorded.values())), asked.action)
        plain = recorded[""]
        undisturbed = {"world": plain, "boxed": plain, "critic": critic or plain, "agent": agents.get("", plain)}
        chosen = sample(firsts) if asked.sample else firsts
        cases = [case for case in chosen if any(fnmatchcase(case.point, pattern) for pattern in asked.point)]
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        try:
            play(lab, cases, {env: one.record for env, one in undisturbed.items()}, asked.jobs, not asked.sample, told)
        finally:  # what is known after half an hour is kept
            asked.json.write_text(json.dumps(rows, indent=1))
    seconds = {(prelude, "world"): recording.seconds for prelude, recording in recorded.items()}
    seconds |= {("", env): found.seconds for env, found in (("boxed", boxed), ("critic", critic)) if found}
    seconds |= {(prelude, "agent"): recording.seconds for prelude, recording in agents.items()}
    print(table(rows, seconds))
    return int(any(row["outcome"] == "violated" for row in rows))


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument("--sample", action="store_true", help="at most one hit per point and action, instead of every hit")
    parser.add_argument("--world", action="append", choices=WORLDS, help="only this; may be repeated")
    parser.add_argument("--action", action="append", choices=ACTIONS, help="only this; may be repeated")
    parser.add_argument("--point", action="append", help="only points of this pattern, as of a shell; may be repeated")
    parser.add_argument("--jobs", type=int, default=3, help="experiments side by side")
    parser.add_argument("--json", type=Path, default=Path("build/faults.json"))
    asked = parser.parse_args()
    asked.action, asked.world, asked.point = asked.action or ACTIONS, asked.world or WORLDS, asked.point or ["*"]
    return asked


def _row(case: Case, result: Result) -> Row:
    fields = asdict(case) | asdict(result)
    return {"fault": fields.pop("point"), **fields, "seconds": round(result.seconds, 2)}


def table(rows: Sequence[Row], undisturbed: dict[tuple[str, str], float]) -> str:
    """One line per point: hits, how many faults it stood, and what they cost in seconds beyond the undisturbed run of that
    prelude and world.
    """
    lines = ["| point | hits | faults | passed | seconds lost: median | most |", "|---|---|---|---|---|---|"]
    touched = [row for row in rows if row["outcome"] != "untouched"]
    for point, env in sorted({(row["fault"], row["env"]) for row in touched}):
        mine = [row for row in touched if (row["fault"], row["env"]) == (point, env)]
        passed = sum(row["outcome"] == "recovered" for row in mine)
        lost = [max(0.0, row["seconds"] - undisturbed[row["prelude"], env]) for row in mine]
        hits, where = mine[0]["hits"], WORLDS[env]
        lines.append(f"| {point}{where} | {hits} | {len(mine)} | {passed} | {median(lost):.1f} | {max(lost):.1f} |")
    passed = sum(row["outcome"] == "recovered" for row in touched)
    lines.append(f"| all | | {len(touched)} | {passed} | | |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
