"""`python -m bench.learning.learn_algorithms`: does every algorithm learn (`make learn`)?

Each file of workflow/algorithms trains the tiny model on `arithmetic`, from the same warm start and with the same seeds: 96
iterations of 16 tasks x 8 episodes, by `agentrl submit` on an embedded stack of its own. What a run gave is in
`build/learn.json` once it is over; called again it goes on with the runs that are not there. At the end a table
(`build/learn.md`) and a picture (`build/learn.svg`) are made of all that is there. Exits with 1, and says why, where a run
did not end, the last iterations of GRPO average less than 0.9, or PPO needs more than twice GRPO's iterations.

`--only grpo,ppo` and `--seeds 0,1` choose, `--jobs 2` is how many run at once, one core each. Ctrl-C ends it at once, a SIGTERM
once the runs that are on their way are over. What has other options by now than its row says is run anew; after a change of
code, or of the warm start, remove build/learn.json to begin again.
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

from sqlalchemy import text

from agentrl.workflow.algorithms import gradients
from bench.learning.curves import Curve, failures, load, save, summed_up, table
from tests.support.real_stack import Stack

SEEDS = (0, 1, 2)
ITERATIONS = 96
ARITHMETIC = ("--dataset", "arithmetic", "--model", "tiny")
COMMON = (
    *(*ARITHMETIC, "--epochs", "3", "--tasks-per-iteration", "16", "--group-size", "8"),
    *("--max-new-tokens", "32"),  # an episode has 13 in two turns; a policy that babbles would take minutes
    *("--batch-size", "64"),  # two steps per iteration: with one every ratio is 1, and no clip is ever active
)
RECIPES: dict[str, Mapping[str, float]] = {}
"""Algorithm -> keys of the config that it needs and the others do not. Who is not here has the defaults."""

MAX_SECONDS = 7200.0
BUILD = Path("build")
REWARDS = "SELECT mean_reward, seconds FROM v_iterations WHERE run = 'learn' AND status = 'done' ORDER BY iteration"
PICTURE, TABLE, ROWS = BUILD / "learn.svg", BUILD / "learn.md", BUILD / "learn.json"


class Unfinished(Exception):
    """A run did not come to its end."""


def main() -> int:
    """Plays it; the exit code."""
    from bench.learning.picture import (
        draw,  # what it needs is missing now, and not after an hour; the tests of this file go without
    )

    asked = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    BUILD.mkdir(exist_ok=True)
    start = warm_start()
    weights = hashlib.sha256((start / "model.safetensors").read_bytes()).hexdigest()[:12]
    made = load(ROWS)
    if other := {curve.start for curve in made} - {weights}:
        print(
            f"{ROWS} is of another warm start ({', '.join(other)}, not {weights}): remove it to begin again.", file=sys.stderr
        )
        return 2
    kept = [curve for curve in made if curve.options == typed(curve.algorithm)]
    wanted = [(name, seed) for seed in asked.seeds for name in asked.only]
    missing = [run for run in wanted if run not in {(curve.algorithm, curve.seed) for curve in kept}]
    print(f"{len(wanted)} runs, {len(missing)} of them not made yet, {asked.jobs} at once", flush=True)
    wrong = run_all(missing, lambda name, seed: played(name, typed(name), seed, start, weights), kept, asked.jobs)
    found = summed_up(kept)
    if found:
        TABLE.write_text("\n".join(table(found)) + "\n")
        draw(found, PICTURE)
    wrong += failures(found)
    print("", *table(found), "", *wrong, f"load {os.getloadavg()[0]:.1f}", sep="\n")
    return 1 if wrong else 0


def typed(algorithm: str) -> str:
    """What is typed for an algorithm after `agentrl submit`, but for the seed."""
    own = (f"-s {key}={value:g}" for key, value in RECIPES.get(algorithm, {}).items())
    return " ".join([*COMMON, "--algorithm", algorithm, *own])


def warm_start(words: Sequence[str] = ARITHMETIC, name: str = "tiny-arithmetic") -> Path:
    """The folder of the warmed-up model, made by the first call and kept: all runs are to start from the same weights.

    Args:
        words: what `agentrl sft` is told.
        name: of the folder that it makes.
    """
    home = (BUILD / "learn").resolve()
    folder = home / "models" / name
    if not (folder / "config.json").exists():
        environment = {**os.environ, "AGENTRL_HOME": str(home)}
        subprocess.run([sys.executable, "-m", "agentrl.cli", "sft", *words], env=environment, check=True, timeout=MAX_SECONDS)
    return folder


def run_all(
    missing: Sequence[tuple[str, int]],
    learn: Callable[[str, int], Curve],
    kept: list[Curve],
    jobs: int,
    rows: Path = ROWS,
    word: str = "algorithm",
) -> list[str]:
    """Makes the runs, adds each to `kept` and to the file as soon as it is over; what went wrong."""
    one_writes = Lock()

    def play(run: tuple[str, int]) -> str | None:
        began = time.monotonic()
        try:
            curve = learn(*run)
        except Unfinished as error:
            return str(error)
        with one_writes:
            kept.append(curve)
            save(rows, kept, word)
            said = f"{run[0]} seed {run[1]}: {curve.rewards[0]:.3f} -> {curve.rewards[-1]:.3f}"
            print(f"{said}, {time.monotonic() - began:.0f} s", flush=True)
        return None

    with ThreadPoolExecutor(jobs) as pool:
        return [said for said in pool.map(play, missing) if said]


def played(name: str, options: str, seed: int, start: Path, weights: str, module: str = "") -> Curve:
    """One run with these options of `submit`, or by a program of that module, on a stack that is thrown away.

    Raises:
        Unfinished: with the logs.
    """
    words = ["agentrl.cli", "submit", *options.split(), "--seed", str(seed), "--name", "learn", "--wait"]
    with _stack(start) as stack:
        done = subprocess.run(
            [sys.executable, "-m", *([module, str(seed)] if module else words)],
            env=stack.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=MAX_SECONDS,
        )
        with stack.database.read() as tx:
            rows = [tuple(row) for row in tx.execute(text(REWARDS))]
        if done.returncode or len(rows) < ITERATIONS:
            said = f"{name} seed {seed} ended with {done.returncode} after {len(rows)} of {ITERATIONS} iterations"
            raise Unfinished(f"{said}\n{done.stderr[-2000:]}\n{stack.logs()}")
    rewards, seconds = zip(*rows, strict=True)
    return Curve(name, seed, options, weights, rewards, seconds)


@contextmanager
def _stack(start: Path) -> Iterator[Stack]:
    with TemporaryDirectory(prefix="arl-", dir="/tmp") as folder:  # a socket's path must be short
        home = Path(folder) / "home"
        shutil.copytree(start, home / "models" / start.name)
        with closing(Stack(home, AGENTRL_LEASE_SECONDS="30", AGENTRL_TICK_SECONDS="2")) as stack:
            yield stack


def _arguments() -> argparse.Namespace:
    known = sorted(gradients(), key=lambda name: (name != "grpo", name))
    parser = argparse.ArgumentParser(description="Does every algorithm learn?")
    parser.add_argument("--only", type=lambda words: words.split(","), default=known, metavar="NAME,NAME")
    parser.add_argument("--seeds", type=lambda words: [int(word) for word in words.split(",")], default=SEEDS, metavar="N,N")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), metavar="N")
    asked = parser.parse_args()
    if unknown := set(asked.only) - set(known):
        parser.error(f"no algorithm is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return asked


if __name__ == "__main__":
    sys.exit(main())
