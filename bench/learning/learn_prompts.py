"""`python -m bench.learning.learn_prompts`: do prompts learn, and only by a critic that reads (`make learn-prompts`)?

A scripted agent earns 0.1, and 0.3 more for each of three rules that its prompt has. The critic is scripted too: one that reads
what episodes lack advises one of these rules every second time; a blind one, the same algorithm with random edits and the same
budget, picks among 300 others and never knows. Each of apo and gepa, by both, with five seeds, through a stack of its own. Then
the tiny model at `arithmetic`, whose system prompt the blind critic edits. The rows come into `build/learn_prompts.json`, a
table into `build/learn_prompts.md`. Exits with 1 where a reading critic misses a rule, or a blind one finds all three.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any

from tests.support.real_stack import Stack
from tests.support.scripted_critic import RULES, ScriptedCritic, serving

ROOT = Path(__file__).parents[2]
BUILD = Path("build")
SEEDS = range(5)
ROWS = [{"messages": [{"role": "user", "content": f"{n} + 1?"}], "reference": str(n + 1)} for n in range(40)]
SEARCH = {"critic": "scripted", "choose_tasks": 4, "held_out_tasks": 12}
BUDGETS: Mapping[str, dict[str, Any]] = {
    "apo": {"batch_tasks": 2, "rounds": 4, "beam_width": 3, "branch_factor": 3},
    "gepa": {"batch_tasks": 2, "max_rollouts": 160},
}
TINY = {"choose_tasks": 24, "held_out_tasks": 64}


def main() -> int:
    """Plays it; the exit code."""
    BUILD.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with (
        tempfile.TemporaryDirectory(prefix="arl-", dir="/tmp") as made,
        closing(Stack(Path(made) / "home", AGENTRL_IDLE_STOP_SECONDS="60", PYTHONPATH=path)) as stack,
    ):
        folder = Path(made)
        stack.agentrl("sft", "--dataset", "arithmetic", "--model", "tiny")
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        ways = [(name, mode, seed) for name in BUDGETS for mode in ("informed", "blind") for seed in SEEDS]
        rows = [_ruled(stack, folder, *way) for way in ways]
        rows += [_tiny(stack, folder, name) for name in BUDGETS]
    (BUILD / "learn_prompts.json").write_text(json.dumps(rows, indent=1))
    lines = table(rows)
    (BUILD / "learn_prompts.md").write_text("\n".join(lines) + "\n")
    print(*lines, f"load {os.getloadavg()[0]:.1f}", sep="\n")
    return (
        1 if any(row["mode"] != "tiny" and (row["rules"] == len(RULES)) != (row["mode"] == "informed") for row in rows) else 0
    )


def _ruled(stack: Stack, folder: Path, algorithm: str, mode: str, seed: int) -> dict[str, Any]:
    """The scripted agent, with a critic that reads or one that is blind."""
    asked = {
        "env": "plain",
        "dataset": {"name": str(folder / "rows.jsonl")},
        "model": {"path": "tiny-arithmetic"},
        "agent": {"name": "tests.search.ruled_agent:solve"},
        "resources": {"prompt": "Solve this: {question}"},
        "search": {**SEARCH, **BUDGETS[algorithm]},
    }
    return _searched(stack, folder, f"{algorithm}-{mode}-{seed}", algorithm, mode, seed, asked)


def _tiny(stack: Stack, folder: Path, algorithm: str) -> dict[str, Any]:
    """The tiny model, which has learned sums and no English."""
    asked = {
        "dataset": {"name": "arithmetic", "max_tasks": 128},
        "model": {"path": "tiny-arithmetic"},
        "rollout": {"max_new_tokens": 32},
        "resources": {"system_prompt": "Add."},
        "search": {"critic": "scripted", **TINY, **BUDGETS[algorithm]},
    }
    return _searched(stack, folder, f"{algorithm}-tiny", algorithm, "tiny", 0, asked)


def _searched(
    stack: Stack, folder: Path, name: str, algorithm: str, mode: str, seed: int, asked: Mapping[str, Any]
) -> dict[str, Any]:
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps({**asked, "name": name, "seed": seed, "algorithm": {"name": algorithm}}))
    with serving(ScriptedCritic("blind" if mode == "tiny" else mode, seed)) as url:
        stack.agentrl("down")  # its workers ask another critic
        stack.environment["AGENTRL_CRITIC_URL"] = url
        stack.agentrl("submit", "--config", str(file), "--wait")
    shown = json.loads(stack.agentrl("prompts", name, "--json"))
    best = next(row for row in shown["versions"] if row["chosen"])
    held = shown["held_out"] or {}
    found = {"run": name, "algorithm": algorithm, "mode": mode, "seed": seed, "versions": len(shown["versions"])}
    found |= {"episodes": sum(row["episodes_done"] for row in shown["versions"]), "text": best["text"]}
    found |= {key: held.get(key) for key in ("first", "second", "difference", "low", "high", "tasks")}
    return found | {"rules": sum(advice in best["text"] for advice in RULES.values())}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """What each found."""
    lines = [
        "| algorithm | critic | rules found, by seed | held out, from -> to (mean of seeds) | episodes |",
        "|---|---|---|---|---|",
    ]
    for algorithm in BUDGETS:
        for mode in ("informed", "blind"):
            some = [row for row in rows if (row["algorithm"], row["mode"]) == (algorithm, mode)]
            moved = [(row["first"] if row["first"] is not None else 0.1, row["second"] or 0.1) for row in some]
            went = f"{mean(a for a, _ in moved):.2f} -> {mean(b for _, b in moved):.2f}"
            told = ", ".join(f"{row['rules']} of {len(RULES)}" for row in some)
            lines.append(f"| `{algorithm}` | {mode} | {told} | {went} | {mean(row['episodes'] for row in some):.0f} |")
    for row in rows:
        if row["mode"] == "tiny":
            gain = "it stayed with the first text"
            if row["first"] is not None:
                interval = f"difference {row['difference']:+.3f}, 95% [{row['low']:+.3f}, {row['high']:+.3f}]"
                gain = f"{row['first']:.3f} -> {row['second']:.3f}, {interval}, {row['tasks']} tasks"
            lines.append(f"| `{row['algorithm']}` | blind, the tiny model | - | {gain} | {row['episodes']} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
