"""`python -m bench.learning.learn_code`: does the tiny model learn to program, over a killed tools worker (`make learn-code`)?

What a user would type: a warm start from demonstrations that are often wrong, then three epochs of GRPO, 48 iterations, in
which every program and every verdict goes through the `tools` queue and the sandbox. Half way, while calls are out, the tools
worker gets a kill -9. Before and after, held-out tasks are counted.

Prints the curve of the share of hidden tests passed and writes it to `build/learn_code.json`. Exits with 1 unless the share
rose by `RISE` from the first iterations to the last, and no episode was lost. With a folder as its argument it works there,
keeps it, and begins with the warm start that it finds.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any

from sqlalchemy import text

from agentrl.cli.plot import plot
from agentrl.workflow.store.connect import Database
from tests.support.real_stack import Stack

RISE = 0.2
ENDS = 6
"""So many iterations at either end are what is compared."""

RUN, DATASET = "learn-code", "code_tiny"
EPOCHS, ITERATIONS = 3, 48
HELD_OUT = ("--dataset", DATASET, "-n", "128", "--json")
MAX_SECONDS = 7200.0
SHARES = "SELECT avg(value) FROM v_rewards WHERE run = :run AND part = 'tests_passed' GROUP BY iteration ORDER BY iteration"
DONE = "SELECT count(*) FROM v_iterations WHERE run = :run AND status = 'done'"
OPEN = "SELECT count(*) FROM tool_calls WHERE run = :run AND result IS NULL"
WORKERS = "SELECT count(DISTINCT worker) FROM v_tool_calls WHERE run = :run AND worker <> ''"
BOXED = "SELECT count(*) FROM v_tool_calls WHERE run = :run AND sandbox IS NOT NULL"
AGAIN = "SELECT count(*) FROM v_tool_calls WHERE run = :run AND attempts > 1"
LOST = "SELECT count(*) FROM v_episodes WHERE run = :run AND status <> 'done'"


def main() -> int:
    """Plays it; the exit code."""
    with tempfile.TemporaryDirectory(prefix="arl-", dir="/tmp") as folder:
        home = Path(sys.argv[1] if len(sys.argv) > 1 else folder) / "home"
        with closing(Stack(home.resolve(), AGENTRL_LEASE_SECONDS="30", AGENTRL_TICK_SECONDS="2")) as stack:
            found = learned(stack)
    file = Path("build/learn_code.json")
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1))
    print("\n".join(told(found)))
    return 0 if found["killed"] and not found["lost"] and found["last"] - found["first"] >= RISE else 1


def learned(stack: Stack) -> dict[str, Any]:
    """The whole experiment, and what came of it."""
    seconds: dict[str, float] = {}
    if not (stack.home / "models" / f"tiny-{DATASET}" / "config.json").exists():
        _said(stack, seconds, "sft", "--dataset", DATASET, "--model", "tiny")
    before = json.loads(_said(stack, seconds, "eval", "--policy", f"tiny-{DATASET}", *HELD_OUT))
    killed = _trained(stack, seconds)
    after = json.loads(_said(stack, seconds, "eval", "--policy", RUN, *HELD_OUT))
    shares = _column(stack.database, SHARES)
    return {
        "shares": shares,
        "first": mean(shares[:ENDS]),
        "last": mean(shares[-ENDS:]),
        "held_out": [[said[key] for key in ("mean_reward", "low", "high")] for said in (before, after)],
        "killed": killed,
        "workers": _column(stack.database, WORKERS)[0],
        "boxed": _column(stack.database, BOXED)[0],
        "sent_again": _column(stack.database, AGAIN)[0],
        "lost": _column(stack.database, LOST)[0],
        "seconds": seconds,
        "load": os.getloadavg(),
    }


def told(found: dict[str, Any]) -> list[str]:
    """What a person reads of it."""
    held_out = [f"{share:.3f} [{low:.3f}, {high:.3f}]" for share, low, high in found["held_out"]]
    return [
        "",
        *plot(found["shares"]),
        f"share of hidden tests passed {found['first']:.3f} -> {found['last']:.3f} "
        f"(mean of the first and the last {ENDS} of {len(found['shares'])} iterations; at least {RISE} more is asked)",
        f"held out {' -> '.join(held_out)}",
        f"{found['boxed']} calls and verdicts in the sandbox by {found['workers']} tools workers, one killed in iteration "
        f"{found['killed']}; {found['sent_again']} sent again, {found['lost']} episodes lost",
        "seconds: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in found["seconds"].items()),
    ]


def _trained(stack: Stack, seconds: dict[str, float]) -> int:
    """The run; the number of the iteration in which the tools worker was killed, 0 for none."""
    started, killed = time.monotonic(), 0
    asked = ("submit", "--dataset", DATASET, "--model", "tiny", "--epochs", str(EPOCHS), "--name", RUN, "--wait")
    with subprocess.Popen([sys.executable, "-m", "agentrl.cli", *asked], env=stack.environment) as running:
        while running.poll() is None:
            done = _column(stack.database, DONE)[0]
            if not killed and done >= ITERATIONS // 2 and _column(stack.database, OPEN)[0]:
                stack.kill_worker("tools")
                killed = done + 1
            time.sleep(0.1)
    assert running.returncode == 0, f"submit ended with {running.returncode}\n{stack.logs()}"
    seconds["submit"] = time.monotonic() - started
    return killed


def _said(stack: Stack, seconds: dict[str, float], command: str, *arguments: str) -> str:
    """Runs a command, whose errors and progress the terminal gets; its stdout."""
    started = time.monotonic()
    print("==", command, *arguments, file=sys.stderr, flush=True)
    whole = [sys.executable, "-m", "agentrl.cli", command, *arguments]
    done = subprocess.run(whole, env=stack.environment, stdout=subprocess.PIPE, text=True, check=True, timeout=MAX_SECONDS)
    name = command if command not in seconds else f"{command} again"
    seconds[name] = time.monotonic() - started
    return done.stdout


def _column(database: Database, query: str) -> list[Any]:
    with database.read() as tx:
        return list(tx.execute(text(query), {"run": RUN}).scalars())


if __name__ == "__main__":
    sys.exit(main())
